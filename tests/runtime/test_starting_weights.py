"""A run goes on only from the weights that it was started from, and its start takes little more
memory than its steps."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from support.tiny_model import mesh_of

from distflow_jax.config.run_config import Config
from distflow_jax.config.training_config import LoraConfig
from distflow_jax.layout import Layout
from distflow_jax.models.parameters import num_params
from distflow_jax.models.weights.load_params import load_or_init_params
from distflow_jax.models.weights.source import open_model
from distflow_jax.parallel.host_memory import buffers
from distflow_jax.planning.run_models import ModelOfRun, States
from distflow_jax.runtime.run_state import _check_starting_weights

MODELS = {
    "actor": ModelOfRun("actor", "ACTOR", None, True, ""),
    "reward": ModelOfRun("reward", "REWARD", None, False, "runs/judge"),
}
PREPARED = types.SimpleNamespace(models=MODELS, source=types.SimpleNamespace(spec="models/b"))
NOW = {"actor": "b", "reward": "step 9, d"}


def test_the_same_weights_go_on(caplog):
    _check_starting_weights({"starting_weights": NOW}, NOW, PREPARED)
    assert not caplog.records


@pytest.mark.parametrize(
    "before, named",
    [
        ({"actor": "a", "reward": "step 9, d"}, "'actor': .* was 'a' and is 'b' for 'models/b'"),
        ({"actor": "b", "reward": "step 8, c"}, "model 'reward': .*'step 9, d' for 'runs/judge'"),
    ],
)
def test_other_weights_are_refused(before, named):
    with pytest.raises(ValueError, match=f"{named}.*restore these, or start in a new --workdir"):
        _check_starting_weights({"starting_weights": before}, NOW, PREPARED)


def test_a_model_that_the_graph_gained_starts_anew():
    _check_starting_weights({"starting_weights": {"actor": "b"}}, NOW, PREPARED)


def test_a_checkpoint_of_version_0_1_has_the_digest_of_the_source():
    _check_starting_weights({"model": "b"}, NOW, PREPARED)
    with pytest.raises(ValueError, match="model 'actor'"):
        _check_starting_weights({"model": "a"}, NOW, PREPARED)


def test_a_checkpoint_without_any_digest_goes_on():
    """Checkpointer.restore warns of it, once for all that it lacks."""
    _check_starting_weights({}, NOW, PREPARED)


SOURCE = open_model("random:llama?hidden=64&layers=6&heads=4&mlp=192&vocab=512")
LAYOUT = Layout("mesh")
ROLES = {"actor": ("ACTOR", True), "critic": ("CRITIC", True), "reference": ("REFERENCE", False)}


def states_of(keys, rank):
    models = {key: ModelOfRun(key, ROLES[key][0], LAYOUT, ROLES[key][1], "") for key in keys}
    lora = LoraConfig(rank, 2.0, ("query",)) if rank else LoraConfig()
    config = dataclasses.replace(Config(), lora=lora)
    return States(models, SOURCE, config, {LAYOUT: mesh_of(1, 1)}, "bfloat16")


@pytest.mark.parametrize(
    ("keys", "rank", "most"),
    [
        # 4 bytes as they are read, and the largest matrix twice
        (("actor", "reference"), 1, 4.6),
        # the critic's stay in float32 until the actor's lie there
        (("actor", "critic"), 1, 6.6),
        # a reference in bfloat16, made before the actor with its moments
        (("actor", "reference"), 0, 14.1),
        (("actor", "critic", "reference"), 0, 26.1),
    ],
)
def test_bytes_of_a_parameter_at_the_start(keys, rank, most, monkeypatch):
    def live():
        return sum(buffers(jax.live_arrays()).values())

    def watched(name):
        call = getattr(kind, name)

        def run(*given, **more):
            made = call(*given, **more)
            taken.append(live() - before)
            return made

        monkeypatch.setattr(kind, name, run)

    kind, taken, states = type(jnp.zeros(())), [], states_of(keys, rank)
    watched("astype")
    watched("copy")
    before = live()
    made = states.initial({}, lambda key, state: (taken.append(live() - before), state)[1])
    assert max(taken) / num_params(SOURCE.config) < most
    del made


@pytest.mark.parametrize("rank", [0, 1])
def test_every_model_starts_from_the_source(rank):
    """Whichever takes the arrays that were read, and in whatever dtype they are stored."""
    read = flatten_dict(load_or_init_params(SOURCE, Config().seed, mesh_of(1, 1)), sep="/")
    made = states_of(ROLES, rank).initial({})
    frozen = flatten_dict(made["reference"], sep="/")
    actor, critic = (flatten_dict(made[key].params, sep="/") for key in ("actor", "critic"))
    for path, x in read.items():
        short = x.astype(jnp.bfloat16) if "norm" not in path else x
        np.testing.assert_array_equal(frozen[path], short, err_msg=path)
        for trained, name in ((actor, path), (critic, f"trunk/{path}")):
            np.testing.assert_array_equal(trained[name], short if rank else x, err_msg=path)
