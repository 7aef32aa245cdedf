"""Whoever samples, with whichever features: a run is planned, or refused in one line, by the list
that stands here. It may only shrink; what has no effect at all is no feature of it."""

import dataclasses
import functools
import itertools

import pytest
from support.tiny_config import tiny_config

from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import RunPlan, plan_run
from distflow_jax.stream.checks import Surroundings, check_plan

MACHINE = Machine(2, 16, 8, "cpu", memory=1 << 32, host_memory=1 << 32)
COMMON = ("stream.max_staleness=2", "algorithm.correction=token_tis", "training.row_tokens=160")
PLACES = {
    "workers": ("stream.workers=True",),
    "own part": ("mesh.devices=0:4", "mesh.roles={'ROLLOUT': {'devices': '4:8'}}"),
    "trainer's devices": (),
}
PARTIAL = {
    "counter": {"partial_batches": "counter", "partial_batch_prompts": 2},
    "ready": {"partial_batches": "ready", "partial_batch_rows": 16},
}
STREAM = {  # {feature: keys of the section stream}
    **PARTIAL,
    "boundary": {"weight_update": "boundary"},
    "budget": {"round_tokens": 4096},
    "divergence": {"divergence": 0.001},
    "recording": {"record": True},
}
FEATURES = (*STREAM, "region")
# a budget says which groups a step has when it is spent: after partial batches of them, filter
# decisions on them, or versions that are theirs alone. What says when weights move is a version of
# each step, the newest of a deadline, or what they change; no two of them
ANYWHERE = [
    *({"budget", other} for other in ("boundary", "divergence", "region", *PARTIAL)),
    {"boundary", "divergence"},
]
REFUSED = {
    "workers": ANYWHERE,
    "own part": ANYWHERE,
    # sampling and training take turns there
    "trainer's devices": [*ANYWHERE, {"boundary"}, {"counter"}, {"ready"}],
}


@functools.cache
def planned(place: str, dag: str) -> RunPlan:
    return plan_run(tiny_config(*COMMON, *PLACES[place], f"dag={dag}", "eval.dataset="), MACHINE)


def refusal(place, features):
    """What a run with these features is refused with; "": it is not."""
    run = planned(place, "dapo" if "region" in features else "grpo")
    surroundings = Surroundings(
        run.config.algorithm,
        sampler_hosts=run.sizes.sampler_hosts,
        sampler_part=place == "own part",
        own_devices=run.sizes.samplers_have_own_devices,
        offload="none",
        group_tokens=64,
        mini_prompts=8,
        stuck_seconds=1800.0,
    )
    keys = {k: v for feature in features for k, v in STREAM.get(feature, {}).items()}
    try:
        stream = dataclasses.replace(run.config.stream, **keys)
        check_plan(stream, run.plan, surroundings)
    except ValueError as error:
        return str(error)
    return ""


def combinations():
    """All sets of features that mean something: one kind of partial batches, or recordings of
    none."""
    sizes = range(len(FEATURES) + 1)
    for features in itertools.chain(*(itertools.combinations(FEATURES, n) for n in sizes)):
        kinds = len(PARTIAL.keys() & set(features))
        if kinds == 1 or (not kinds and "recording" not in features):
            yield set(features)


@pytest.mark.parametrize("place", PLACES)
def test_each_combination_is_planned_or_refused_by_the_list(place):
    found, count = {}, 0
    for features in combinations():
        count += 1
        message = refusal(place, features)
        assert "\n" not in message
        listed = [one for one in REFUSED[place] if one <= features]
        assert bool(message) == bool(listed), (features, message)
        if features in REFUSED[place]:
            found[message] = features
            assert "use " in message or "take it out" in message, message
    assert count == (2 + 2 + 1) * 2**4 and len(found) == len(REFUSED[place])


def test_workers_refuse_no_more_than_samplers_on_a_part():
    assert REFUSED["workers"] == REFUSED["own part"]
