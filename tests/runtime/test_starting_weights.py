"""A run goes on only from the weights that it was started from."""

import types

import pytest

from distflow_jax.planning.run_models import ModelOfRun
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
