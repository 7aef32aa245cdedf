"""Commands that answer without training use the settings of the graph that a run was trained by."""

import types

import pytest

from distflow_jax.commands import evaluate_command, generate_command, serve_command
from distflow_jax.config.config_dict import override
from distflow_jax.config.shipped import open_config


def options_of(folder, settings, chosen=(), **flags):
    """The flags of a command whose config names a graph with these settings."""
    path = folder / "own.yaml"
    path.write_text(f"name: own\nbase: grpo\nsettings: {{{settings}}}\nnodes: []\n")
    config = override(open_config("base"), [f"dag={path}", *chosen])
    keys = {setting.split("=")[0] for setting in chosen}
    return types.SimpleNamespace(config=config, chosen=keys, **flags)


def test_evaluate(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate_command, "join_job", lambda options: None)
    with pytest.raises(FileNotFoundError, match="data file own.jsonl does not exist"):
        evaluate_command.main(options_of(tmp_path, "eval.dataset: own.jsonl", out=str(tmp_path)))
    with pytest.raises(ValueError, match="eval.dataset is empty"):
        evaluate_command.main(options_of(tmp_path, "eval.dataset: own.jsonl", ["eval.dataset="]))


def test_generate(tmp_path):
    flags = {"prompt": "Hi", "file": None, "samples": 4}
    with pytest.raises(ValueError, match="--samples=4 is above config.rollout.num_samples=2"):
        generate_command.main(options_of(tmp_path, "rollout.num_samples: 2", **flags))
    chosen = ["rollout.num_samples=3"]
    with pytest.raises(ValueError, match="--samples=4 is above config.rollout.num_samples=3"):
        generate_command.main(options_of(tmp_path, "rollout.num_samples: 2", chosen, **flags))


@pytest.mark.parametrize("slots, used", [(None, 5), (64, 64), (7, 7)])
def test_serve(tmp_path, slots, used):
    options = options_of(tmp_path, "rollout.num_slots: 5, eval.num_prompts: 3", slots=slots)
    config = serve_command.served_config(options)
    assert (config.rollout.num_slots, config.eval.num_prompts) == (used, 3)
