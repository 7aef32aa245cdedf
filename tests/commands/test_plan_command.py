"""The subcommand plan in this process: what it plans, and what it says of its sums."""

import json
import re
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


def options_of(**changes):
    """The options of a plan by formulas."""
    options = dict(
        config=override(open_config("tiny"), SETTINGS),
        chosen=frozenset(),
        devices=0,
        topology="",
        mean_response=0,
        calibrate="",
        apply="",
        sweep=False,
        only=[],
        processes=1,
        chip="",
        compile=False,
        out="",
        **{"async": ""},
    )
    return SimpleNamespace(**options | changes)


@pytest.mark.parametrize(
    ("topology", "says"),
    [
        ("", "temporaries of update_weights, rollout"),
        ("gpu:1x8", "with temporaries estimated by formulas"),
    ],
)
def test_a_run_in_partial_batches_is_planned(topology, says, capsys):
    """On this machine and for a pod; the output says what no sum has, or what is estimated."""
    assert plan_command.main(options_of(topology=topology)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert says in said
    assert " actor_train " in said


def test_measured_rates_change_what_is_expected(tmp_path, capsys):
    path = tmp_path / "gpu.json"
    measured = {"device_kind": "NVIDIA H100 80GB HBM3", "measured": {"memory_bandwidth": 2e12}}
    decoded = {"seconds": [9.0], "first_token_seconds": [1.0], "decoded": 100}
    decode = {"part": "decode", "least_bytes_per_device": 1e9} | decoded
    path.write_text(json.dumps(measured | {"results": [decode]}))
    said = []
    for calibrate in ("", str(path)):
        assert plan_command.main(options_of(topology="gpu:1x8", calibrate=calibrate)) == 0
        said.append(" ".join(capsys.readouterr().out.split()))
    for name, text in zip(("published", "measured"), said, strict=True):
        assert f"the range that is expected at {name} shares of these rates" in text
    steps = [re.search(r"a step: expected (.*) s, bound (.*?) s", text).groups() for text in said]
    assert steps[0][0] != steps[1][0] and steps[0][1] == steps[1][1]
    with pytest.raises(ValueError, match="--calibrate=.* needs --topology: give it"):
        plan_command.main(options_of(calibrate=str(path)))
