"""Evaluations, checkpoints and files of samples follow the steps that a config names."""

import dataclasses

import pytest

from distflow_jax.config.run_config import Config
from distflow_jax.planning.step_schedule import StepSchedule


def schedule(
    *,
    dataset="train.jsonl",
    has_sampler=True,
    evaluate=3,
    untrained=True,
    save=4,
    samples=5,
    steps=8,
):
    config = Config()
    config = dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, steps=steps),
        eval=dataclasses.replace(
            config.eval, dataset=dataset, every=evaluate, before_training=untrained
        ),
        checkpoint=dataclasses.replace(config.checkpoint, every=save),
        observe=dataclasses.replace(config.observe, samples_every=samples),
    )
    return StepSchedule.of(config, has_sampler=has_sampler)


def steps_of(is_due):
    return [step for step in range(1, 9) if is_due(step)]


def test_a_period_and_the_last_step():
    found = schedule()
    assert steps_of(found.evaluates) == [3, 6, 8]
    assert steps_of(found.saves) == [4, 8]
    assert steps_of(found.writes_samples) == [5]
    assert steps_of(found.evaluates_first) == [1]


def test_0_leaves_the_last_step():
    found = schedule(evaluate=0, samples=0)
    assert steps_of(found.evaluates) == [8]
    assert steps_of(found.writes_samples) == []
    assert steps_of(found.evaluates_first) == [1]


@pytest.mark.parametrize("missing", [{"dataset": ""}, {"has_sampler": False}])
def test_without_data_or_sampler_nothing_is_evaluated(missing):
    found = schedule(**missing)
    assert steps_of(found.evaluates) == steps_of(found.evaluates_first) == []
    assert steps_of(found.saves) == [4, 8]


def test_one_key_leaves_the_untrained_weights_out():
    found = schedule(untrained=False)
    assert steps_of(found.evaluates_first) == [] and not found.evaluates_version(0)
    assert [v for v in range(9) if found.evaluates_version(v)] == steps_of(found.evaluates)


@pytest.mark.parametrize("evaluate", [0, 1, 3, 4, 9])
@pytest.mark.parametrize("save", [1, 3, 4, 9])
@pytest.mark.parametrize("dataset", ["train.jsonl", ""])
def test_what_comes_is_counted(evaluate, save, dataset):
    found = schedule(evaluate=evaluate, save=save, dataset=dataset)
    for step in range(1, 9):
        evaluations = [s for s in range(step + 1, 9) if found.evaluates(s)]
        checkpoints = [s for s in range(step, 9) if found.saves(s)]
        assert found.coming(step) == (len(evaluations), len(checkpoints))
