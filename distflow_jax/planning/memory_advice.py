"""Advice for a plan that needs more memory than a device has: settings, by what they save."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from distflow_jax.config.graph_settings import with_values
from distflow_jax.dag.residency import plan_residency
from distflow_jax.planning.memory_plan import MemoryPlan, Segment, plan_memory
from distflow_jax.planning.plan_run import RunPlan
from distflow_jax.planning.sizes import responses_under_way
from distflow_jax.planning.unit_programs import Program
from distflow_jax.programs.costs import Costs
from distflow_jax.programs.units import format_bytes
from distflow_jax.rollout.cache_sizing import cache_bytes, with_trajectories
from distflow_jax.rollout.decode_state import PAGE_CHUNK, EngineConfig, least_pages, num_pages

_MOMENT_BYTES = {"float32": 8, "bfloat16": 4, "int8": 2.2}  # of both, for each parameter


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of a setting, and the bytes that the fullest segment of the plan takes with it."""

    text: str
    fullest: int


def shortage(
    planned: RunPlan,
    memory: MemoryPlan,
    programs: Mapping[str, Program],
    costs: Mapping[str, Costs],
) -> str:
    """The reason why a plan does not fit its devices, with changes that would help; "" if it fits.

    Savings are exact for arrays that live from step to step, and estimates for the temporaries of a
    program, which are known only once the changed program has been compiled.
    """
    fullest = memory.fullest
    if not memory.device or fullest.total <= memory.device:
        return ""
    changes = sorted(_changes(planned, memory, programs, costs), key=lambda c: c.fullest)
    changes = [change for change in changes if change.fullest < fullest.total]
    enough = [change for change in changes if change.fullest <= memory.device]
    columns = {
        "parameters": fullest.parameters,
        "optimizer": fullest.optimizer,
        "gradients": fullest.gradients,
        "temporaries": fullest.temporaries or 0,
        "sampler's weights": fullest.sampler_weights,
        "its cache": fullest.cache,
        "batch": fullest.batch,
    }
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in columns.items() if size)
    if enough:
        advice = "each of these settings is enough: " + _listed(enough, fullest)
    elif changes:
        listed = _listed(changes, fullest)
        advice = f"no single setting is enough, but several together may be: {listed}"
    else:
        advice = "use devices with more memory, or a smaller model"
    return (
        f"node {fullest.name!r} needs about {format_bytes(fullest.total)} on each device, "
        f"which has {format_bytes(memory.device)}: {held}; {advice}"
    )


def _listed(changes: list[Change], fullest: Segment) -> str:
    return ", ".join(f"{c.text} (saves {format_bytes(fullest.total - c.fullest)})" for c in changes)


def _changes(
    planned: RunPlan,
    memory: MemoryPlan,
    programs: Mapping[str, Program],
    costs: Mapping[str, Costs],
) -> Iterator[Change]:
    config, sizes = planned.config, planned.sizes

    def change(text: str, of: Callable[[Segment], Segment]) -> Change:
        return Change(text, max(of(segment).total for segment in memory.segments))

    def programs_take(share: Callable[[int], float], segment: Segment) -> Segment:
        if not segment.trains or segment.temporaries is None:
            return segment
        return dataclasses.replace(segment, temporaries=int(share(segment.temporaries)))

    if config.training.remat != "full":
        yield change(
            "training.remat='full'",
            lambda s: programs_take(lambda size: min(size, _recomputed(size, planned)), s),
        )
    if sizes.micro_rows > 1:
        fewer = sizes.mesh.ranks * (sizes.micro_rows // 2)
        share = sizes.micro_rows // 2 / sizes.micro_rows
        yield change(
            f"training.micro_batch_rows={fewer}",
            lambda s: programs_take(lambda size: share * size, s),
        )
    kept = {config.training.optimizer.moments}
    where = "training.optimizer.moments"
    if any(m.trained and m.role == "CRITIC" for m in planned.models.values()):
        kept.add(config.critic.optimizer.moments)
        where += " and critic.optimizer.moments"
    for name, size in _MOMENT_BYTES.items() if len(kept) == 1 else ():
        share = size / _MOMENT_BYTES[next(iter(kept))]
        yield change(
            f"{where}={name!r}",
            lambda s, share=share: dataclasses.replace(s, optimizer=int(share * s.optimizer)),
        )
    moves = (
        planned.samples_apart or not config.stream.ahead
    ) and not config.stream.in_partial_batches
    if config.training.offload == "none" and moves and planned.machine.platform != "cpu":
        apart = planned.samples_apart
        residencies = plan_residency(planned.plan, planned.own_samplers, apart=apart)
        # adapters do not share their base with other models on the host
        idle = with_values(config, {"training.offload": "idle"})
        waiting = plan_memory(
            dataclasses.replace(planned, config=idle), programs, costs, residencies
        )
        yield Change("training.offload='idle'", waiting.fullest.total)
    yield from _smaller_cache(planned, memory, change)
    yield from _fewer_trajectories(planned, memory, change)
    twice = 2 * sizes.mesh.fsdp
    yield change(
        f"twice the devices, with mesh.fsdp={twice}",
        lambda s: dataclasses.replace(
            s,
            parameters=s.parameters // 2,
            optimizer=s.optimizer // 2,
            gradients=s.gradients // 2,
        ),
    )


def _recomputed(size: int, planned: RunPlan) -> float:
    """Estimated temporaries of a training program whose layers are recomputed, in bytes.

    These are the logits, one layer, and the inputs of all layers. `size`: its temporaries today.
    """
    model, sizes = planned.source.config, planned.sizes
    forward, item = sizes.forward, 2 if sizes.forward.compute_dtype == "bfloat16" else 4
    mesh, rows = sizes.mesh, sizes.micro_rows
    together = sizes.rows_at_a_time(mesh.layout) // rows  # micro-batches
    of_head = rows * together // mesh.pipeline  # pipeline ranks divide the rows of the head
    logits = min(size, 3 * 4 * of_head * forward.logp_chunk * model.vocab_size // mesh.tensor)
    tokens = rows * sizes.packing.limits.tokens // mesh.context
    # in a pipeline a layer has one input per tick of its pipeline rank
    repeats = forward.repeats if mesh.pipeline > 1 else 1
    layers, ticks = (
        model.num_layers // mesh.pipeline // repeats,
        repeats * together + mesh.pipeline - 1,
    )
    inputs = tokens * model.hidden_size * item * layers * ticks
    return logits + (size - logits) / (layers * ticks) + inputs


def _smaller_cache(
    planned: RunPlan, memory: MemoryPlan, change: Callable[..., Change]
) -> Iterator[Change]:
    """A cache that is smaller by the missing memory, but at least an eighth of its size."""
    if not planned.own_samplers:
        return
    config, sizes, machine = planned.config, planned.sizes, planned.machine
    ranks, samplers = sizes.sampler_ranks, machine.processes // sizes.sampler_hosts
    whole = _cache_bytes(planned, sizes.engine)
    missing = memory.fullest.total - memory.device
    share = max(1 / 8, (whole - missing) / whole)
    if config.rollout.cache_tokens:  # then the cache does not depend on slots
        unit = ranks * sizes.engine.page_size
        pages = int(share * num_pages(sizes.engine, ranks))
        pages -= pages % PAGE_CHUNK if pages > PAGE_CHUNK else 0  # they are rounded up
        pages = max(pages, least_pages(sizes.engine))
        text = f"rollout.cache_tokens={pages * unit * samplers}"
        left = _cache_bytes(planned, dataclasses.replace(sizes.engine, cache_tokens=pages * unit))
    elif config.rollout.num_slots == 0:
        # a fraction of the cache's actual size, which may be below rollout.cache_fraction
        fraction = int(100 * share * whole / machine.memory) / 100
        if fraction <= 0:
            return
        text, left = f"rollout.cache_fraction={fraction:g}", int(fraction * machine.memory)
    else:
        slots = max(1, int(share * sizes.engine.decode_slots / ranks)) * ranks
        text = f"rollout.num_slots={slots * samplers}"
        fewer = dataclasses.replace(sizes.engine, slots=slots, lanes=0)
        left = _cache_bytes(
            planned,
            with_trajectories(
                fewer,
                config.rollout,
                most=responses_under_way(config),
                samplers=samplers,
                ranks=ranks,
            ),
        )
    yield change(
        text, lambda s: dataclasses.replace(s, cache=max(0, s.cache - max(0, whole - left)))
    )


def _fewer_trajectories(
    planned: RunPlan, memory: MemoryPlan, change: Callable[..., Change]
) -> Iterator[Change]:
    """So many fewer trajectories that the missing memory is there, but one for each slot."""
    engine, ranks = planned.sizes.engine, planned.sizes.sampler_ranks
    if not (planned.own_samplers and engine.lanes) or planned.config.rollout.cache_tokens:
        return
    missing, whole = memory.fullest.total - memory.device, _cache_bytes(planned, engine)
    for slots in range(engine.slots - ranks, engine.lanes - 1, -ranks):
        saved = whole - _cache_bytes(planned, dataclasses.replace(engine, slots=slots))
        if saved >= missing:
            break
    samplers = planned.machine.processes // planned.sizes.sampler_hosts
    yield change(
        f"rollout.max_trajectories={slots * samplers}",
        lambda s: dataclasses.replace(s, cache=max(0, s.cache - saved)),
    )


def _cache_bytes(planned: RunPlan, engine: EngineConfig) -> int:
    """Bytes of a device for the cache of such a sampler."""
    ranks, tensor = planned.sizes.sampler_ranks, planned.sizes.rollout_tensor
    return cache_bytes(planned.source.config, engine, ranks=ranks, tensor=tensor)
