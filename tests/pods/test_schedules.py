"""The event model of schedules against closed forms, and what no schedule may break."""

import dataclasses

import numpy as np
import pytest

from distflow_jax.pods.schedules import (
    SYNCHRONOUS,
    Decode,
    DeviceSplit,
    Schedule,
    StepWork,
    fastest,
    step_ends,
    step_seconds,
)

STEP, SLOT, PROMPT, TOKEN, UPDATE = 1.0, 0.1, 3.0, 0.02, 5.0
DECODE = {w: Decode(STEP / w + 0.01 * (w > 1), SLOT / w, PROMPT / w) for w in (1, 2, 4)}
AHEAD = [
    Schedule("boundary", 1, own_devices=True, boundary=True),
    Schedule("in_flight", 2, own_devices=True),
    Schedule("partial_batches", 2, own_devices=True, partial_batch=0),
    Schedule("shared", 1),
]


def work_of(draw, **changes):
    return StepWork(4, 2, 4, draw, DECODE, TOKEN, UPDATE, **changes)


def fixed(length, reward=0.0):
    return lambda group: (np.full(2, length), np.full(2, reward))


def heavy(group):
    drawn = np.random.default_rng((7, group)).lognormal(3.0, 1.0, 2)
    return np.ceil(drawn).astype(int), np.zeros(2)


def on(devices, width=1, *, own=False, engines=1, slots=8, **options):
    return DeviceSplit(devices, 4 - devices if own else devices, width, engines, slots, **options)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_synchronous_step_of_equal_lengths_is_the_sum_of_its_parts(width):
    """8 responses of 12 tokens in 8 slots of 4 devices: 12 decode steps of 8 / groups slots."""
    decode, groups = DECODE[width], 4 / width
    generation = 12 * (decode.step + 8 / groups * decode.slot) + 4 * decode.prompt / groups
    wanted = generation + 8 * 12 * TOKEN / 4 + UPDATE
    found = step_seconds(work_of(fixed(12)), SYNCHRONOUS, on(4, width), steps=3, warmup=1)
    assert found == pytest.approx(wanted, rel=1e-12)


def test_samplers_divide_devices_prompts_and_slots():
    """Two samplers of two devices have half of the prompts each, at the same seconds."""
    work = work_of(fixed(12))
    one, two = (step_seconds(work, SYNCHRONOUS, on(4, engines=n), 3, 1) for n in (1, 2))
    assert one == pytest.approx(two, rel=1e-12)


def test_the_slowest_reward_ends_the_synchronous_step():
    plain, slow = (
        step_seconds(work_of(fixed(12, seconds), scorers=8), SYNCHRONOUS, on(4), 3, 1)
        for seconds in (0.0, 5.0)
    )
    assert slow == pytest.approx(plain + 5.0, rel=1e-12)
    one = step_seconds(work_of(fixed(12, 5.0), scorers=1), SYNCHRONOUS, on(4), 3, 1)
    assert one == pytest.approx(plain + 8 * 5.0, rel=1e-12)  # one response after the other


def test_overlapped_steps_of_equal_lengths_take_as_long_as_the_slower_side():
    """With weights at the boundary, and where training is the slower side."""
    for token, training in ((TOKEN, 96 * TOKEN / 2), (1.0, 96 * 1.0 / 2)):
        work = dataclasses.replace(work_of(fixed(12)), token=token)
        sampling = 12 * (STEP + 4 * SLOT) + 2 * PROMPT + UPDATE
        found = step_seconds(work, AHEAD[0], on(2, own=True), 6, 4)
        assert found == pytest.approx(max(sampling, training), rel=1e-12)


@pytest.mark.parametrize("schedule", AHEAD, ids=lambda s: s.name)
def test_no_schedule_is_faster_than_devices_that_never_wait(schedule):
    layout = on(2, own=True) if schedule.own_devices else on(4)
    steps, work = 30, work_of(heavy)
    tokens = sum(heavy(group)[0].sum() for group in range(4 * steps))
    decode = layout.decode(work)
    sampling = tokens / layout.slots * decode.step + tokens * decode.slot
    sampling += 4 * steps * decode.prompt
    training = tokens * TOKEN / layout.trainers
    least = max(sampling, training) if schedule.own_devices else sampling + training
    # responses of later steps are under way at the end, and none of these tokens is missing
    assert step_ends(work, schedule, layout, steps)[-1] > least


@pytest.mark.parametrize("schedule", AHEAD, ids=lambda s: s.name)
def test_samplers_begin_groups_in_order_and_no_further_than_the_staleness(schedule):
    begun = []

    def draw(group):
        begun.append(group)
        return heavy(group)

    layout = on(2, own=True) if schedule.own_devices else on(4)
    ends = step_ends(work_of(draw), schedule, layout, 5)
    assert begun == list(range(len(begun)))
    assert 4 * 5 <= len(begun) <= 4 * (5 + 1 + schedule.staleness)  # once five have ended
    assert (np.diff(ends) > 0).all()


def test_partial_batches_are_never_later_than_whole_steps():
    whole = dataclasses.replace(AHEAD[1], partial_batch=float("inf"))
    ends = [
        step_ends(work_of(heavy), dataclasses.replace(whole, partial_batch=n), on(2, own=True), 20)
        for n in (0, 100, float("inf"))
    ]
    assert ends[0][-1] < ends[2][-1] and ends[1][-1] < ends[2][-1]


def test_a_common_queue_is_as_good_as_turns_for_equal_lengths():
    work, schedule = work_of(fixed(12)), AHEAD[1]
    turns, common = (
        step_seconds(work, schedule, on(2, own=True, engines=2, shared_queue=shared), 6, 4)
        for shared in (False, True)
    )
    assert turns == pytest.approx(common, rel=0.05)


def test_the_fastest_layout_is_found():
    work = work_of(fixed(50))
    seconds, layout = fastest(work, SYNCHRONOUS, [on(4, w) for w in (1, 2, 4)], steps=3)
    assert layout.width == 4
    assert seconds == step_seconds(work, SYNCHRONOUS, on(4, 4), steps=3)
