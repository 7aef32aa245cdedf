"""Commands that answer find the policy of a run by what it is, not by its name."""

import json

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.config.config_dict import from_config_dict, override
from distflow_jax.config.run_config import Config
from distflow_jax.config.shipped import open_config
from distflow_jax.config.upkeep_config import CheckpointConfig
from distflow_jax.models.decoder_config import scalar_model
from distflow_jax.models.parameters import param_specs
from distflow_jax.models.weights.source import open_model
from distflow_jax.runtime.samplers.standalone_sampler import read_weights

SPEC = "random:llama?hidden=32&layers=1&heads=4&kv_heads=2&mlp=64&vocab=300"
SOURCE = open_model(SPEC)
CONFIG = from_config_dict(Config, override(open_config("tiny"), [f"model.source={SPEC}"]))


def save_run(folder, **networks):
    """A run's folder with a checkpoint of step 3: parameters of each network are its place."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model": {"source": SPEC}}))
    checkpointer = Checkpointer(folder / "checkpoints", CheckpointConfig())
    state = {
        key: {
            "params": unflatten_dict(
                {
                    path: np.full(spec.shape, place, np.float32)
                    for path, spec in param_specs(network).items()
                },
                sep="/",
            )
        }
        for place, (key, network) in enumerate(networks.items())
    }
    checkpointer.save(3, jax.device_put(state), {})
    checkpointer.close()
    return str(folder)


@pytest.mark.parametrize(
    "others, place",
    [({"student": SOURCE.config}, 1), ({"teacher": SOURCE.config, "actor": SOURCE.config}, 2)],
)
def test_the_actor_or_the_only_policy_answers(tmp_path, others, place):
    run = save_run(tmp_path / "run", critic=scalar_model(SOURCE.config), **others)
    weights, step = read_weights(CONFIG, SOURCE, run)
    assert step == 3
    assert {float(np.asarray(x).max()) for x in jax.tree.leaves(weights)} == {float(place)}


def test_without_one_the_message_names_the_models(tmp_path):
    run = save_run(tmp_path / "one", reward=scalar_model(SOURCE.config))
    with pytest.raises(ValueError, match="checkpoint 3 of .* holds no policy.*there are: reward"):
        read_weights(CONFIG, SOURCE, run)
    run = save_run(tmp_path / "two", student=SOURCE.config, teacher=SOURCE.config)
    with pytest.raises(ValueError, match="policies, student, teacher, .*by export.py --model=stud"):
        read_weights(CONFIG, SOURCE, run)
