"""Host memory of asynchronous steps: as planned, so it is; what does not fit is refused."""

import dataclasses

import numpy as np
import pytest
from support.tiny_config import tiny_config

from configs import vision_tiny
from distflow_jax.config.config_dict import from_config_dict, override
from distflow_jax.config.run_config import Config
from distflow_jax.images.picture_files import PREVIEW
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import plan_run

MACHINE = Machine(2, 16, 8, "cpu", memory=1 << 32, host_memory=1 << 32)
AHEAD = ("stream.max_staleness=2", "algorithm.correction=token_tis", "data.prompts_per_step=6")
PART = (
    "mesh.devices=0:4",
    "mesh.roles={'ROLLOUT': {'devices': '4:6'}}",
    "stream.weight_update=boundary",
)


def planned(*assignments, machine=MACHINE):
    config = tiny_config(*AHEAD, *assignments)
    return plan_run(config, machine)


def test_no_samplers_ahead_need_no_memory():
    run = planned("stream.max_staleness=0")
    assert run.waiting is None and "ahead" not in run.text()


def test_columns_of_a_group_at_its_largest():
    run = planned()
    config, waiting = run.config, run.waiting
    assert waiting.nodes == ("rollout", "reward")
    assert waiting.groups == 3 * 3  # two samplers share 6 prompts of a step
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    samples = config.rollout.num_samples
    columns = {
        "response": np.zeros((samples, response), np.int32),
        "rollout_logp": np.zeros((samples, response), np.float32),
        "version": np.zeros((samples, response), np.int32),
        "response_mask": np.zeros((samples, response), bool),
        "prompt": np.zeros(prompt, np.int32),
        "uid": np.zeros((samples, 2), np.int64),
    }
    assert {n: waiting.columns[n] for n in columns} == {n: x.nbytes for n, x in columns.items()}
    assert all(size == 8 * samples for n, size in waiting.columns.items() if n not in columns)
    assert "score" in waiting.columns
    assert waiting.total == waiting.groups * sum(waiting.columns.values())  # and no buffers


@pytest.mark.parametrize("evaluated", ["", "task:arithmetic?held_out=1"], ids=["", "evaluates"])
@pytest.mark.parametrize("weight_update, buffers", [("boundary", 3), ("in_flight", 2)])
def test_trainers_keep_all_versions_that_workers_may_need(weight_update, buffers, evaluated):
    """With boundary those of max_staleness + 1 steps: a worker that joins answers by any of
    them. As many again may be evaluated."""
    buffers *= 1 + bool(evaluated)
    workers = (
        "stream.workers=True",
        f"eval.dataset={evaluated}",
        "eval.every=0",
        f"stream.weight_update={weight_update}",
    )
    run = planned(*workers)
    waiting = run.waiting
    assert (
        run.config.stream.max_staleness == 2 and waiting.buffers == buffers and waiting.buffer > 0
    )
    groups = waiting.groups * sum(waiting.columns.values())
    assert waiting.total == groups + buffers * waiting.buffer
    (row,) = [line for line in waiting.describe().splitlines() if line.startswith("weights ")]
    assert row.split()[1] == str(buffers)


def test_images_of_prompts_that_wait():
    """As large as those of the loader's largest prompt; a run on text has no such column."""
    assert "images" not in planned().waiting.columns
    config = from_config_dict(Config, override(vision_tiny.get_config(), AHEAD))
    run = plan_run(config, MACHINE)
    sizes, length = run.sizes.packing.images, config.data.max_prompt_length
    patches = length * sizes.merge
    arrays = (
        np.zeros((patches, sizes.patch_bytes), np.uint8),
        np.zeros((patches, 2), np.int32),
        np.zeros(patches, np.int32),
        np.zeros(length, np.int32),
        np.zeros((PREVIEW, PREVIEW, 3), np.uint8),
    )
    assert run.waiting.columns["images"] == sum(x.nbytes for x in arrays)


@pytest.mark.parametrize("staleness, buffers", [(1, 2), (2, 2), (5, 5)])
def test_weights_on_their_way(staleness, buffers):
    run = planned(*PART, f"stream.max_staleness={staleness}")
    waiting = run.waiting
    assert waiting.buffers == buffers
    assert waiting.total == waiting.groups * waiting.group + buffers * waiting.buffer
    wide = planned(*PART, f"stream.max_staleness={staleness}", "mesh.rollout_tensor=2").waiting
    assert waiting.buffer <= wide.buffer < 1.1 * waiting.buffer  # one copy, whatever divides it


def test_groups_that_wait_for_the_disk():
    partial_batches = (*PART, "stream.partial_batches=counter", "stream.partial_batch_prompts=2")
    without, recorded = (
        planned(*partial_batches).waiting,
        planned(*partial_batches, "stream.record=True").waiting,
    )
    assert recorded.groups == without.groups + 3 * without.share
    assert recorded.total > without.total


def test_the_plan_names_what_runs_ahead():
    text = planned(*PART).text()
    assert "rollout, reward run ahead of the training, at most 2 steps" in text
    rows = [line.split() for line in text.splitlines()]
    assert any(row[:2] == ["weights", "2"] for row in rows)
    assert any(row[:2] == ["response", "9"] for row in rows)


@pytest.mark.parametrize("steps", [1, 2])
def test_groups_that_do_not_fit_are_refused_with_a_fix_that_works(steps):
    waiting = planned().waiting
    small = dataclasses.replace(MACHINE, host_memory=(steps * waiting.share + 1) * waiting.group)
    with pytest.raises(
        ValueError, match="stream.max_staleness=2 with data.prompts_per_step=6"
    ) as error:
        planned(machine=small)
    staleness = steps - 1
    assert str(error.value).endswith(f"use stream.max_staleness={staleness}")
    planned(f"stream.max_staleness={staleness}", machine=small)


def test_fewer_prompts_where_not_even_a_step_fits():
    many = ("data.prompts_per_step=20", "stream.max_staleness=1")
    small = dataclasses.replace(MACHINE, host_memory=5 * planned().waiting.group)
    with pytest.raises(ValueError, match="data.prompts_per_step=4 or less"):
        planned(*many, machine=small)
    planned(*many, "data.prompts_per_step=4", machine=small)
