"""Every kind of sampler with every feature: a run is planned, or refused in one line, by the list
in this file. The list may only shrink; a setting without any effect is not a feature.

Nightly: samplers on their own part of the devices, whose list is that of workers.
"""

import functools
import itertools

import pytest
from support.tiny_config import tiny_config

from distflow_jax.models.weights.source import open_model
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.runtime.samplers.worker_nodes import read_nodes

MACHINE = Machine(2, 16, 8, "cpu", memory=1 << 32, host_memory=1 << 32)
COMMON = (
    "stream.max_staleness=2",
    "algorithm.correction=token_tis",
    "training.row_tokens=512",
    "eval.dataset=",
)
PLACES = {
    "workers": ("stream.workers=True",),
    "own part": ("mesh.devices=0:4", "mesh.roles={'ROLLOUT': {'devices': '4:8'}}"),
    "trainer's devices": (),
}
SEES = (
    "model.source=random:smolvlm?hidden=64&layers=2&heads=4&kv_heads=2&mlp=96&vocab=272"
    "&max_position=1024&vision_hidden=32&vision_layers=2&vision_heads=2&patch=8&image=48"
)
TURNS = ("rollout.max_turns=3", "rollout.turn_length=8")
TOOLS = "rollout.environment_kwargs={'tools': {'calculator': 'calculator'}}"
PARTIAL = {
    "counter": ("stream.partial_batches=counter", "stream.partial_batch_prompts=2"),
    "ready": ("stream.partial_batches=ready", "stream.partial_batch_rows=16"),
}
STREAM = {
    **PARTIAL,
    "boundary": ("stream.weight_update=boundary",),
    "divergence": ("stream.divergence=0.001",),
    "recording": ("stream.record=True",),
    "region": ("dag=dapo",),
}
ENVIRONMENTS = {
    "environment": ("rollout.environment=calculator", *TURNS),
    "images": (SEES, "rollout.environment=configs/examples/grid_walk.py:GridWalk", *TURNS),
    "tools": ("rollout.environment=tools", TOOLS, *TURNS),
}
FEATURES = {
    **STREAM,
    **ENVIRONMENTS,
    "evaluation": ("eval.dataset=task:arithmetic?held_out=1", "eval.every=2"),
    "LoRA": ("lora.rank=4",),
    "critic": ("dag=ppo",),
    "KL": ("algorithm.kl_coef=0.01",),
    "vision": (SEES,),
    "mini-batches": ("training.mini_batches=2",),
    "epochs": ("training.epochs=2",),
}
# weights move at the end of each step, or when they have changed enough
ANYWHERE = [{"boundary", "divergence"}]
REFUSED = {
    "workers": ANYWHERE,
    "own part": ANYWHERE,
    # sampling and training take turns there
    "trainer's devices": [*ANYWHERE, {"boundary"}, {"counter"}, {"ready"}],
}


@pytest.fixture(scope="module")
def region_with_critic(tmp_path_factory):
    path = tmp_path_factory.mktemp("dags") / "both.yaml"
    region = "{nodes: [rollout, reward], until: informative, max_rounds: 4}"
    path.write_text(f"name: both\nbase: ppo\nregions: [{region}]\n")
    return (f"dag={path}",)


opened = functools.cache(open_model)


def refusal(settings):
    """The line that a run is refused with; "": it is planned, and so is each of its workers."""
    try:
        run = plan_run(tiny_config(*COMMON, *settings), MACHINE, open_source=opened)
        if not run.own_samplers:
            assert read_nodes((), run.config, run.graph, run.source).samples
    except ValueError as error:
        return str(error)
    return ""


def sets_of(features, sizes):
    """The sets of so many features that mean something: of one kind of partial batches and one of
    environments, and with recordings of the former."""
    for count in sizes:
        for names in map(set, itertools.combinations(features, count)):
            if "recording" in names and not PARTIAL.keys() & names:
                names.add("counter")
            if all(len(names & kinds.keys()) < 2 for kinds in (PARTIAL, ENVIRONMENTS)):
                yield frozenset(names)


def cells(place):
    """The cells that are planned: each feature in flight and at boundaries, all sets of the
    stream's, and for workers all pairs."""
    sizes = (0, 1, 2) if place == "workers" else (0, 1)
    in_flight = {*sets_of(FEATURES, sizes)}
    return in_flight | {f | {"boundary"} for f in in_flight} | {*sets_of(STREAM, range(8))}


OWN_PART = pytest.param("own part", marks=pytest.mark.slow)


@pytest.mark.parametrize("place", ["workers", OWN_PART, "trainer's devices"])
def test_each_combination_is_planned_or_refused_by_the_list(place, region_with_critic):
    found, planned = {}, cells(place)
    assert len(planned) == (244 if place == "workers" else 60)
    for features in planned:
        both = region_with_critic if {"region", "critic"} <= features else ()
        named = itertools.chain(*(FEATURES[name] for name in FEATURES if name in features), both)
        message = refusal((*PLACES[place], *named))
        assert "\n" not in message and "no effect" not in message
        listed = [one for one in REFUSED[place] if one <= features]
        assert bool(message) == bool(listed), (features, message)
        if features in REFUSED[place]:
            found[message] = features
            assert "use " in message or "take it out" in message, message
    assert len(found) == len(REFUSED[place])


def test_workers_refuse_no_more_than_samplers_on_a_part():
    assert REFUSED["workers"] == REFUSED["own part"]
    assert all(one in REFUSED["trainer's devices"] for one in REFUSED["workers"])
