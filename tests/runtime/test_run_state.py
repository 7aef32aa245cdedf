"""Steps that trained on nothing: counted in a row, warned of, and an end of the run."""

import logging

import pytest

from distflow_jax.config.data_config import DataConfig
from distflow_jax.config.run_config import Config
from distflow_jax.config.stream_config import StreamConfig
from distflow_jax.config.training_config import TrainingConfig
from distflow_jax.runtime.place import check_place
from distflow_jax.runtime.run_state import RunState, check_lost

REJECTED = {"rollout_corr/kept_weight_max": 0.0}
KEPT = {"rollout_corr/kept_weight_max": 1e-9}


def after(*steps):
    """The state after steps of (metrics, updates that were not finite)."""
    state = RunState({}, step=len(steps))
    for metrics, nonfinite in steps:
        state.count_lost(metrics | {"training/nonfinite/actor_train": nonfinite})
    return state


def test_steps_are_counted_in_a_row():
    assert (after(({}, 0)).rejected, after(({}, 2)).nonfinite) == (0, 1)
    assert after((REJECTED, 0), (REJECTED, 0)).rejected == 2
    assert after((REJECTED, 0), (KEPT, 0)).rejected == 0
    assert after((REJECTED, 1), (REJECTED, 1), (KEPT, 1)).nonfinite == 3
    assert after(({"actor_train/rollout_corr/kept_weight_max": 0.0}, 0)).rejected == 1


def check(counter, position, prompts=8, **stream):
    """Checks the place of a checkpoint against the settings of the run that goes on."""
    config = Config(data=DataConfig(prompts_per_step=prompts), stream=StreamConfig(**stream))
    check_place({"counter": counter, "loader": {"position": position}}, 4, config)


def test_batches_go_on_where_the_checkpoint_stands():
    check(None, 8, 4)
    for stream in ({}, {"max_staleness": 1}):
        with pytest.raises(ValueError, match="prompts_per_step=5: .* step 4 has trained on 8 prom"):
            check(None, 8, 5, **stream)
    with pytest.raises(ValueError, match="prompts_per_step=32: .* has trained on 48 prompts"):
        check(48, 48, 32)
    check(13, 8, max_staleness=1)
    check(16, 16)
    check(16, 16, 4, max_staleness=1)
    with pytest.raises(
        ValueError, match="before prompt 13: with stream.max_staleness=0 .* from 8 on would"
    ):
        check(13, 8)
    for counter, prompts in ((13, 4), (8, 5)):
        with pytest.raises(
            ValueError, match=f"per_step={prompts}: .* batch began at prompt 8; give"
        ):
            check(counter, 8, prompts, max_staleness=1)


def test_too_many_end_the_run(caplog):
    config = TrainingConfig(max_rejected=1, max_nonfinite=0)
    check_lost(after((KEPT, 0)), config)
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "distflow_jax"):
        check_lost(after((REJECTED, 0)), config)
    assert ["left no token" in r.getMessage() for r in caplog.records] == [True]
    with pytest.raises(RuntimeError, match="left no token in 2 steps in a row, the last being 2"):
        check_lost(after((REJECTED, 0), (REJECTED, 0)), config)
    with pytest.raises(RuntimeError, match="not finite in 1 steps in a row"):
        check_lost(after((KEPT, 1)), config)
