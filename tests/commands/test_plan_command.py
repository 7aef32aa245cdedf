"""The subcommand plan in this process: what it plans, and what it says of its sums."""

from types import SimpleNamespace

import pytest
from support.partial_batches import APART

from distflow_jax.commands import plan_command
from distflow_jax.config.config_dict import override
from distflow_jax.config.shipped import open_config

SETTINGS = [
    "model.source=random:llama?hidden=32&layers=1&heads=4&kv_heads=4&mlp=64&vocab=512",
    "eval.dataset=",
    *APART,
]


@pytest.mark.parametrize("topology", ["", "gpu:1x8"])
def test_a_run_in_partial_batches_is_planned(topology, capsys):
    """On this machine and for a pod; the output says what no sum has."""
    options = SimpleNamespace(
        config=override(open_config("tiny"), SETTINGS),
        chosen=frozenset(),
        devices=0,
        topology=topology,
        mean_response=0,
        sweep=False,
        only=[],
        processes=1,
        chip="",
        compile=False,
        mermaid=False,
        out="",
    )
    assert plan_command.main(options) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "temporaries of update_weights, rollout" in said
    assert " actor_train " in said
