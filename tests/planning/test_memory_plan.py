"""The planned memory of a device is known before step 1, and equals what the device then holds.

Nightly: the memory that a plan states is within 15 % of what a run then takes, with and without
offload.
"""

import copy
import dataclasses
import functools
import gc
import json

import jax
import numpy as np
import pytest
from support import haste
from support.partial_batches import APART
from support.programs import finished
from support.tiny_config import tiny_config

from distflow_jax import run
from distflow_jax.dag.residency import plan_residency
from distflow_jax.layout import Layout
from distflow_jax.models.decoder_config import adapted
from distflow_jax.models.parameters import num_params
from distflow_jax.parallel.host_memory import live_bytes
from distflow_jax.parallel.rules import device_bytes
from distflow_jax.planning import memory_plan
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.memory_advice import _changes, shortage
from distflow_jax.planning.memory_plan import (
    Held,
    MemoryPlan,
    Segment,
    _trained,
    plan_memory,
)
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.planning.run_models import States
from distflow_jax.programs.costs import Costs, costs_of
from distflow_jax.programs.units import format_bytes, in_unit_of
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.rollout.engine.engine_programs import sampler_programs
from distflow_jax.runtime.build import build, make_meshes, trace
from distflow_jax.runtime.make_engine import make_engine
from distflow_jax.training.state import sharded_params
from distflow_jax.training.update import with_sums

SMALL = [
    "model.source=random:llama?hidden=64&layers=4&heads=4&kv_heads=2&mlp=128&vocab=512",
    "algorithm.kl_coef=0.04",  # a reference model
    "training.micro_batch_rows=16",
    "eval.dataset=",
    "training.steps=1",
]


def config_of(*assignments):
    return tiny_config(*SMALL, *assignments)


class Compiled:
    """A plan on 8 devices, its programs and what they cost."""

    def __init__(self, *assignments):
        self.planned = plan_run(config_of(*assignments), Machine.current())
        self.programs = trace(self.planned)
        self.costs = {n: costs_of(p.traced, p.compile()) for n, p in self.programs.items()}

    def memory(self, residencies=None):
        return plan_memory(self.planned, self.programs, self.costs, residencies)

    def with_devices_of(self, size):
        machine = dataclasses.replace(self.planned.machine, memory=int(size))
        planned = dataclasses.replace(self.planned, machine=machine)
        memory = plan_memory(planned, self.programs, self.costs)
        return shortage(planned, memory, self.programs, self.costs)


@pytest.fixture(scope="module")
def compiled():
    return Compiled()


def test_live_arrays_are_those_that_states_make(compiled):
    """Of two policies, one optimizer, and a decode state, made for real."""
    planned, memory = compiled.planned, compiled.memory()
    before = live_bytes()
    meshes = make_meshes(planned.sizes)
    states = States(planned.models, planned.source, planned.config, meshes, "float32").initial({})
    cache = make_engine(planned.source, planned.config, planned.sizes).init_decode_state()
    live = live_bytes() - before
    wanted = memory.between - memory.segments[0].sampler_weights
    assert live == pytest.approx(wanted, rel=0.01)
    del states, cache
    update = memory.segments[-1]
    whole = 4 * num_params(planned.source.config) / 8
    # norms are whole on every device, and little
    assert update.parameters == pytest.approx(2 * whole, rel=0.03)
    assert update.optimizer == pytest.approx(2 * whole, rel=0.03)
    assert update.gradients == pytest.approx(whole, rel=0.03) and update.trains
    assert update.sampler_weights == 4 * num_params(planned.source.config)


def test_segments_are_the_nodes_that_use_devices(compiled):
    memory = compiled.memory()
    names = [segment.name for segment in memory.segments]
    programs = [u.name for u in compiled.planned.plan.units if u.name in compiled.programs]
    assert names == ["update_weights", "rollout", *programs]
    for segment in memory.segments[2:]:
        cost = compiled.costs[segment.name]
        # beside them some metrics; its arguments are live arrays, and a few numbers
        assert 0 <= segment.gradients + segment.temporaries - cost.temp_bytes < 4096
        live = segment.parameters + segment.optimizer + segment.batch
        assert cost.argument_bytes < live + 4096
    assert memory.fullest == memory.segments[-1]
    assert memory.device == compiled.planned.machine.memory


def test_gradients_and_moments_are_of_adapters_alone():
    """Rank 4 in place of all parameters; traced, not compiled."""
    planned = plan_run(config_of("lora.rank=4"), Machine.current())
    programs = trace(planned)
    cost = Costs(0.0, temp_bytes=1 << 30, output_bytes=0, alias_bytes=0)
    costs = dict.fromkeys(programs, cost)
    update = plan_memory(planned, programs, costs).segments[-1]
    count = num_params(adapted(planned.source.config, planned.config.lora))
    adapters = 4 * (count - num_params(planned.source.config))
    assert 0 < update.gradients <= adapters
    # the reference is the policy without them, and lies there once
    assert "reference" in planned.models
    network = adapted(planned.source.config, planned.config.lora)
    mesh = make_meshes(planned.sizes)[planned.sizes.mesh.layout]
    assert update.parameters == device_bytes(sharded_params(network, mesh))
    assert update.optimizer == pytest.approx(2 * update.gradients, rel=0.01)


def test_accumulators_of_partial_batches_are_there_in_every_program(compiled):
    """The sums of partial batches lie beside all that computes on their mesh, and are gone between
    steps."""
    (key,) = _trained(compiled.planned.plan.units[-1])
    planned, programs, costs = compiled.planned, compiled.programs, compiled.costs
    state = programs["actor_train"].given_states[key]
    spec = state.params
    update = copy.copy(programs["actor_train"])
    update.given_states = update.given_states | {key: with_sums(state, spec)}
    adding = programs | {"actor_train": update}
    plain, partial_batches = (plan_memory(planned, found, costs) for found in (programs, adding))
    assert partial_batches.between == plain.between
    for a, b in zip(plain.segments, partial_batches.segments, strict=True):
        more = device_bytes(spec) if a.name in programs else 0
        assert b == dataclasses.replace(a, gradients=a.gradients + more)


def test_long_prompts_are_in_the_plan():
    """Room for prompts that are read in chunks, and for shared prefixes, as an engine has it."""

    def planned(*assignments):
        many = ["mesh.rollout_tensor=2", "data.max_prompt_length=256", "training.row_tokens=512"]
        return plan_run(config_of(*many, *assignments), Machine.current())

    def cache(run):
        return {s.name: s.cache for s in plan_memory(run, {}, {}).segments}

    short, long, shared = (
        planned(),
        *(planned("rollout.prefill_tokens=64", f"rollout.prefix_tokens={n}") for n in (0, 128)),
    )
    programs = make_engine(long.source, long.config, long.sizes).programs
    kept = programs.prompts._room(256 + 64)
    room = device_bytes(kept)
    assert room == sum(x.addressable_shards[0].data.nbytes for x in kept[:2])
    assert cache(long)["rollout"] == cache(short)["rollout"] + 2 * room
    assert cache(long)["update_weights"] == cache(short)["update_weights"]
    prefixes = room * (128 + 128) // (256 + 64)
    assert all(cache(shared)[name] == size + prefixes for name, size in cache(long).items())
    names = [sampler_programs(run.source.config, run.sizes.engine) for run in (short, long)]
    assert names == [("prefill", "decode"), ("prefill", "prefill_long", "decode")]


def test_what_waits_on_the_host_is_not_there(compiled):
    planned = compiled.planned
    residencies = plan_residency(planned.plan, planned.own_samplers)
    segments = {s.name: s for s in compiled.memory(residencies).segments}
    with_all = {s.name: s for s in compiled.memory().segments}
    rollout, update = segments["rollout"], segments["actor_train"]
    assert rollout.optimizer == 0 and rollout.cache == with_all["rollout"].cache
    assert update.sampler_weights == 0 == update.cache
    assert update.optimizer == with_all["actor_train"].optimizer
    assert all(segments[name].total <= with_all[name].total for name in segments)


def test_plan_as_text_and_json(compiled):
    memory = compiled.memory().with_sampler(1234)
    temporaries = {s.name: s.temporaries for s in memory.segments}
    assert temporaries["rollout"] == 1234 and temporaries["update_weights"] is None
    assert memory.with_sampler(5) == memory  # what is known stays
    unknown = compiled.memory()
    assert unknown.with_sampler(5, left_out=[s.name for s in unknown.segments]) == unknown
    text = memory.describe()
    assert text.startswith(f"memory of a device, which has {format_bytes(memory.device)}")
    _, write = in_unit_of(memory.fullest.total)
    for segment in memory.segments:
        assert segment.name in text and write(segment.total) in text
    tree = memory.to_tree()
    assert json.loads(json.dumps(tree)) == tree
    assert tree["fullest"]["total"] == max(s["total"] for s in tree["segments"])
    unknown = MemoryPlan(memory.segments, 0, 0)
    assert "whose memory is unknown" in unknown.describe()


def test_what_fits_is_not_complained_about(compiled):
    assert compiled.with_devices_of(0) == ""
    assert compiled.with_devices_of(compiled.memory().fullest.total) == ""


def test_shortage_names_the_numbers_and_what_is_enough(compiled):
    fullest = compiled.memory().fullest
    text = compiled.with_devices_of(fullest.total - fullest.optimizer // 4)
    assert text.startswith(
        f"node 'actor_train' needs about {format_bytes(fullest.total)} on each device, which has "
    )
    assert f"optimizer {format_bytes(fullest.optimizer)}" in text
    assert "each of these settings is enough: " in text
    for setting in (
        "training.remat='full'",
        "training.micro_batch_rows=8",
        "training.optimizer.moments='bfloat16'",
        "training.optimizer.moments='int8'",
        "mesh.fsdp=16",
    ):
        assert setting in text
    text = compiled.with_devices_of(1000)
    assert "no single setting is enough, but several together may be: " in text
    assert "rollout.num_slots=" in text


def changes_of(compiled, memory):
    found = _changes(compiled.planned, memory, compiled.programs, compiled.costs)
    return {change.text: change.fullest for change in found}


def test_savings_of_settings_are_what_they_save(compiled):
    """The optimizer's and the cache's, planned again with the setting."""
    memory = compiled.memory()
    missing = memory.segments[-1].cache // 2
    memory = dataclasses.replace(memory, device=memory.fullest.total - missing)
    found = changes_of(compiled, memory)
    (cache,) = [text for text in found if text.startswith("rollout.num_slots")]
    for text in ("training.optimizer.moments='bfloat16'", cache):
        other = Compiled.__new__(Compiled)
        other.planned = plan_run(config_of(text.replace("'", "")), Machine.current())
        other.programs, other.costs = trace(other.planned), compiled.costs
        assert other.memory().fullest.total == pytest.approx(found[text], rel=0.02)


def test_a_cache_of_so_many_tokens_gets_fewer_of_them():
    """Slots do not change it; planned again, it takes what the advice says."""
    planned = plan_run(config_of("rollout.cache_tokens=65536"), Machine.current())
    memory = plan_memory(planned, {}, {})
    missing = memory.fullest.cache // 3
    memory = dataclasses.replace(memory, device=memory.fullest.total - missing)
    found = {c.text: c.fullest for c in _changes(planned, memory, {}, {})}
    assert not any("num_slots" in text or "cache_fraction" in text for text in found)
    (text,) = [text for text in found if text.startswith("rollout.cache_tokens=")]
    other = plan_memory(plan_run(config_of(text), Machine.current()), {}, {})
    assert other.fullest.total == pytest.approx(found[text], rel=1e-3)  # pages have owners
    assert other.fullest.total <= memory.device


@pytest.mark.parametrize("part", [4, 8])
def test_fewer_trajectories_are_enough_where_those_that_wait_fill_the_cache(part):
    """Planned again with the advice it fits, and takes what the advice says."""
    turns = "rollout.environment=calculator", "rollout.max_response_length=96"
    planned = plan_run(config_of(*turns), Machine.current())
    memory = plan_memory(planned, {}, {})
    memory = dataclasses.replace(memory, device=memory.fullest.total - memory.fullest.cache // part)
    found = {c.text: c.fullest for c in _changes(planned, memory, {}, {})}
    for setting in ("rollout.max_trajectories=", "rollout.num_slots="):
        (text,) = [text for text in found if text.startswith(setting)]
        other = plan_memory(plan_run(config_of(*turns, text), Machine.current()), {}, {})
        assert other.fullest.total == pytest.approx(found[text], rel=0.01)
    (most,) = [text for text in found if "max_trajectories" in text]
    assert found[most] <= memory.device
    engine = planned.sizes.engine
    assert engine.lanes <= int(most.partition("=")[2]) < engine.slots


def test_nothing_is_moved_to_the_host_in_partial_batches():
    planned = plan_run(config_of(*APART), Machine.current())
    machine = dataclasses.replace(planned.machine, platform="gpu")
    planned = dataclasses.replace(planned, machine=machine)
    memory = dataclasses.replace(plan_memory(planned, {}, {}), device=1000)
    assert not any("offload" in change.text for change in _changes(planned, memory, {}, {}))


def test_a_base_that_adapters_share_is_counted_twice_on_the_host():
    """On the devices a frozen policy and the trained one have one base, on the host one each."""
    planned = plan_run(config_of("lora.rank=4", "algorithm.kl_coef=0.1"), Machine.current())
    machine = dataclasses.replace(planned.machine, platform="gpu", memory=1000)
    planned = dataclasses.replace(planned, machine=machine)
    programs = trace(planned)
    costs = {name: Costs(0.0) for name in programs}
    memory = plan_memory(planned, programs, costs)
    found = {c.text: c.fullest for c in _changes(planned, memory, programs, costs)}
    idle = plan_run(
        config_of("lora.rank=4", "algorithm.kl_coef=0.1", "training.offload=idle"),
        Machine.current(),
    )
    alone = plan_memory(idle, programs, costs)
    assert found["training.offload='idle'"] == alone.fullest.total


def test_a_cache_that_takes_a_share_of_the_device(compiled):
    planned = dataclasses.replace(
        compiled.planned,
        config=config_of("rollout.num_slots=0", "rollout.cache_fraction=0.5"),
        machine=dataclasses.replace(compiled.planned.machine, memory=2**21),
    )
    memory = compiled.memory()
    memory = dataclasses.replace(memory, device=memory.fullest.total - 2**16)
    found = _changes(planned, memory, compiled.programs, compiled.costs)
    assert any(c.text.startswith("rollout.cache_fraction=0.") for c in found)


def test_models_on_parts_of_the_devices_do_not_add_up():
    """A device is of one part: the fullest counts."""
    layouts = [Layout("mesh", (("fsdp", 2),), part) for part in ((0, 2), (2, 4))]
    everywhere = Layout("mesh")
    held = [
        Held("parameters", 100, layouts[0]),
        Held("optimizer", 200, layouts[0]),
        Held("parameters", 90, layouts[1]),
        Held("sampler_weights", 50, everywhere),
        Held("cache", 7, everywhere),
    ]
    rollout = memory_plan._segment("rollout", everywhere, held, 0, None, 0)
    assert rollout == Segment("rollout", False, 100, 200, 0, None, 50, 7, 0)
    assert rollout.total == rollout.live == 357
    values = memory_plan._segment("values", layouts[1], held, 5, 30, 0)
    assert (values.parameters, values.optimizer, values.total) == (90, 0, 90 + 57 + 5 + 30)
    train = memory_plan._segment("train", layouts[0], held, 5, 130, 100)
    assert (train.gradients, train.temporaries, train.trains) == (100, 30, True)


def test_live_bytes_are_of_the_fullest_device():
    before = live_bytes()
    big = jax.device_put(np.ones(1 << 22, np.float32), jax.devices()[3])
    assert live_bytes() >= 4 << 22 and live_bytes() >= before
    del big


def test_a_run_that_does_not_fit_ends_before_step_1(tmp_path):
    small = "model.source=random:llama?hidden=32&layers=1&heads=4&kv_heads=2&mlp=64&vocab=512"
    config = config_of(small, "algorithm.kl_coef=0.0", "training.device_memory_gib=0.0005")
    with pytest.raises(ValueError, match="needs about .* on each device, which has 524.3 KiB"):
        run.train_here(config, tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
def test_every_segment_takes_what_plan_py_says(tmp_path, monkeypatch):
    """configs/tiny.py on 8 devices: the arrays that lie there when a segment begins, with what its
    compiled program reports beside its arguments, are within 15 % of what scripts/plan.py said."""
    flags = ("--config=configs/tiny.py", f"--out={tmp_path / 'plan'}")
    finished("scripts/plan.py", *flags, env=haste.environment(devices=8))
    planned = json.loads((tmp_path / "plan" / "plan.json").read_text())["memory"]["segments"]
    gc.collect()
    others, taken = live_bytes(), {}  # the first: what other tests still hold

    def watching(prepared, spans, phase):
        runtime = build(prepared, spans, phase)

        def watched(name, runner):
            def run(states, values):
                taken[name] = live_bytes() - others
                if name in runtime.programs:
                    found = runtime.programs[name].compile().memory_analysis()
                    fresh = found.output_size_in_bytes - found.alias_size_in_bytes
                    taken[name] += found.temp_size_in_bytes + fresh
                return runner(states, values)

            return run

        runtime.runners = {name: watched(name, r) for name, r in runtime.runners.items()}
        return runtime

    monkeypatch.setattr(run, "open_run", functools.partial(run.open_run, build=watching))
    assert run.train_here(tiny_config("training.steps=1"), tmp_path / "run") == 0
    totals = {s["name"]: s["total"] for s in planned}
    del totals["update_weights"]  # no node of the plan, and beside it lies less than in a rollout
    assert totals.keys() == taken.keys() - {"reward"}
    for name, total in totals.items():
        assert taken[name] == pytest.approx(total, rel=0.15), name


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["none", "idle"])
def test_the_plan_of_a_run_is_what_it_takes(offload, tmp_path):
    """configs/tiny.py: what lies on a device after step 1, and with the largest program's own
    figure what the plan said, within 15 %; and nothing compiles twice."""
    overrides = ["training.steps=2", "training.optimizer.moments=int8", "algorithm.kl_coef=0.1"]
    config = tiny_config(*overrides, f"training.offload={offload}")
    assert config.eval.dataset  # an evaluation before step 2 does not count
    gc.collect()
    others = live_bytes()  # what other tests still hold
    assert run.train_here(config, tmp_path) == 0
    tree = json.loads((tmp_path / "memory.json").read_text())
    first, second = (r for r in read_metrics(tmp_path / "metrics.jsonl") if r["step"])
    live = first["perf/memory_live_gb"] * 2**30 - others
    assert live == pytest.approx(tree["between_steps"], rel=0.15)
    largest = max(s["gradients"] + (s["temporaries"] or 0) for s in tree["segments"])
    if offload == "none":  # else more is there while a node is at work than after a step
        assert live + largest == pytest.approx(tree["fullest"]["total"], rel=0.15)
    assert first["perf/memory_live_planned_gb"] * 2**30 == tree["between_steps"]
    assert "perf/memory_live_gb" not in second and second["perf/compilations"] == 0
    assert "memory of a device" in (tmp_path / "plan.txt").read_text()
