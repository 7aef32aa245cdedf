"""Whether samplers that run ahead pay: an event model of a run's own lengths on a pod.

Synchronous steps, samplers on shared devices, on a part of each host's devices, and on hosts of
their own are compared, each in its best layout.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from distflow_jax.config.graph_settings import with_values
from distflow_jax.config.run_config import Config
from distflow_jax.config.stream_config import StreamConfig
from distflow_jax.dag.residency import UPDATE_WEIGHTS
from distflow_jax.models.weights.source import open_options, open_shapes
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import RunPlan, plan_run
from distflow_jax.pods.generation import Load, estimate_generation
from distflow_jax.pods.given_lengths import ResponseLengths, Seconds
from distflow_jax.pods.pod_plan import SPARE, PodPlan, plan_on
from distflow_jax.pods.schedules import (
    SYNCHRONOUS,
    Decode,
    DeviceSplit,
    Schedule,
    StepWork,
    step_seconds,
)
from distflow_jax.pods.topology import Pod
from distflow_jax.programs.text_table import WIDTH, broken_command, fill_lines, text_table

LEAST_GAIN = 1.05  # below, the simpler option is suggested
_RESPONSES = 20_000  # that are simulated for a layout, about
_CALLS = 64  # decode calls of the longest response, at most
_SHARES = (0.25, 0.5, 0.75)  # of devices or hosts, that samplers may have
_FILLED = 0.85  # of a partial batch's tokens, before it is trained


@dataclasses.dataclass(frozen=True)
class Option:
    """A way to run in its best layout: seconds of a step, and the settings that choose it."""

    name: str
    where: str  # the devices that sample
    width: int
    seconds: float
    settings: Mapping[str, Any]  # config key -> value

    @property
    def flags(self) -> str:
        """Command-line flags that choose it."""
        flags = [f"--config.{key}={value}" for key, value in self.settings.items()]
        return " ".join(f'"{flag}"' if "{" in flag else flag for flag in flags)


@dataclasses.dataclass(frozen=True)
class AsyncPlan:
    """All options, synchronous steps first."""

    pod: Pod
    lengths: ResponseLengths
    options: tuple[Option, ...]

    @property
    def best(self) -> Option:
        """The first option that is no more than LEAST_GAIN slower than the fastest."""
        most = LEAST_GAIN * min(option.seconds for option in self.options)
        return next(option for option in self.options if option.seconds <= most)

    def describe(self) -> str:
        """The options as a table of text, and the flags of the suggested one."""
        base, lengths = self.options[0].seconds, self.lengths
        rows = [("", "samplers on", "width", "a step, s", "gain")]
        for o in self.options:
            seconds = f"{o.seconds:.3g}", f"{base / o.seconds:.2f}"
            rows.append((o.name, o.where, str(o.width), *seconds))
        how = "the run's measured seconds" if lengths.measured else "EXPECTED seconds"
        text = (
            f"{self.pod.describe()}\n{lengths.counts.sum():,} response lengths: mean "
            f"{lengths.mean:.0f}, longest {lengths.longest:,} tokens\n"
            f"from an event model with {how}, each row in its best layout; differences "
            f"below {LEAST_GAIN - 1:.0%} count as equal (docs/asynchronous.md)\n\n"
            f"{text_table(rows)}\n\nchoose: {self.best.name}\n\n"
        )
        flags = broken_command(self.best.flags, WIDTH - 2)
        return fill_lines(text) + "".join(f"  {line}\n" for line in flags)

    def to_tree(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        options = [dataclasses.asdict(o) | {"flags": o.flags} for o in self.options]
        return {"pod": self.pod.name, "options": options, "suggested": self.best.name}


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A layout that a run may have, by its settings."""

    layout: DeviceSplit
    where: str
    settings: Mapping[str, Any]
    planned: RunPlan

    def option(self, name: str, seconds: float) -> Option:
        """The option with these seconds of a step."""
        return Option(name, self.where, self.layout.width, seconds, self.settings)


def plan_async(
    pod: Pod, config: Config, chosen: Collection[str], lengths: ResponseLengths
) -> AsyncPlan:
    """Compares the options of a run whose responses have these lengths.

    `config`: samplers run `stream.max_staleness` steps ahead, at least one. `chosen`: config keys
    set on the command line. Raises ValueError if the synchronous run is none.
    """
    layouts = _Layouts(pod, config, chosen)
    work = _priced(pod, layouts.base, lengths)
    steps = min(24, max(4, _RESPONSES // work.responses))
    options = []

    def add(name: str, schedule: Schedule, candidates: Iterable[_Candidate]) -> None:
        ranked = [(step_seconds(work, schedule, c.layout, steps), c) for c in candidates]
        ranked.sort(key=lambda x: x[0])
        seconds, found = next(((s, c) for s, c in ranked if _fits(pod, c.planned)), (0.0, None))
        if found is None:
            return
        options.append(found.option(name, seconds))
        if schedule.own_devices and (partial := layouts.in_partial_batches(found)):
            rows = partial.settings["stream.partial_batch_rows"]
            least = _FILLED * rows * config.training.row_tokens
            schedule = dataclasses.replace(schedule, partial_batch=least)
            seconds = step_seconds(work, schedule, found.layout, steps)
            options.append(partial.option(f"{name}, partial batches", seconds))

    staleness = layouts.staleness
    add("synchronous", SYNCHRONOUS, layouts.on_all(work.decode, 0))
    if not options:
        raise ValueError(
            f"no synchronous layout of {pod.name} leaves {SPARE:.0%} of its memory free: use "
            "--sweep to find a mesh that does"
        )
    add("shared devices", Schedule("shared", staleness), layouts.on_all(work.decode, staleness))
    beside = Schedule("in_flight", staleness, own_devices=True)
    add("own devices", beside, layouts.beside(work.decode))
    add("workers", beside, layouts.workers(work.decode))
    return AsyncPlan(pod, lengths, tuple(options))


class _Layouts:
    """The layouts that a run may have on a pod.

    Attributes:
      base: the plan of synchronous steps with the config's own width.
      staleness: steps that samplers run ahead.
    """

    def __init__(self, pod: Pod, config: Config, chosen: Collection[str]):
        self._pod, self.staleness = pod, max(1, config.stream.max_staleness)
        self._chosen = {key for key in chosen if not key.startswith("stream.")}
        roles = {role: sizes for role, sizes in config.mesh.roles.items() if role != "ROLLOUT"}
        mesh = dataclasses.replace(config.mesh, devices="", roles=roles)
        self._config = dataclasses.replace(config, stream=StreamConfig(), mesh=mesh)
        self._source = open_shapes(config.model.source, **open_options(config.model))
        self.base = self._planned({}, pod.machine)
        samplers = pod.hosts // self.base.sizes.sampler_hosts
        self._slots = self.base.sizes.engine.decode_slots * samplers

    def on_all(self, widths: Iterable[int], staleness: int) -> Iterator[_Candidate]:
        """Samplers on all devices, which also train."""
        pod = self._pod
        for width in widths:
            settings = {"mesh.rollout_tensor": width}
            settings |= {"stream.max_staleness": staleness} if staleness else {}
            if planned := self._accepted(settings, pod.machine):
                sizes = planned.sizes
                samplers = pod.hosts // sizes.sampler_hosts
                slots = sizes.engine.decode_slots * samplers
                layout = DeviceSplit(pod.size, pod.size, width, samplers, slots)
                yield _Candidate(layout, f"all {pod.size}", settings, planned)

    def beside(self, widths: Iterable[int]) -> Iterator[_Candidate]:
        """Samplers on a part of each host's devices."""
        hosts, local = self._pod.hosts, self._pod.per_host
        for count, width in _shares(local, widths):
            trainers = (local - count) * hosts
            devices = {"devices": f"{local - count}:{local}"}
            settings = self._ahead(trainers, width) | {
                "mesh.devices": f"0:{local - count}",
                "mesh.roles": {**self._config.mesh.roles, "ROLLOUT": devices},
            }
            planned = self._accepted(settings, self._pod.machine)
            if planned and count % width == 0:
                slots = planned.sizes.engine.decode_slots * hosts
                layout = DeviceSplit(count * hosts, trainers, width, hosts, slots)
                where = f"{count} of {local} on each host"
                yield _Candidate(layout, where, settings, planned)

    def workers(self, widths: Iterable[int]) -> Iterator[_Candidate]:
        """Samplers on hosts of their own."""
        hosts, local = self._pod.hosts, self._pod.per_host
        for count, width in _shares(hosts, widths):
            trainers = (hosts - count) * local
            machine = dataclasses.replace(
                self._pod.machine, processes=hosts - count, devices=trainers
            )
            settings = self._ahead(trainers, width) | {"stream.workers": True}
            planned = self._accepted(settings, machine)
            if planned and local % width == 0:
                slots = min(planned.sizes.engine.decode_slots, -(-self._slots // count))
                layout = DeviceSplit(count * local, trainers, width, count, slots * count, True)
                yield _Candidate(layout, f"{count} of {hosts} hosts", settings, planned)

    def in_partial_batches(self, of: _Candidate) -> _Candidate | None:
        """The same layout with partial batches of as few rows as they may have."""
        for rows in (of.layout.trainers * 2**n for n in range(8)):
            settings = dict(of.settings) | {
                "stream.partial_batches": "ready",
                "stream.partial_batch_rows": rows,
            }
            if planned := self._accepted(settings, of.planned.machine):
                return dataclasses.replace(of, settings=settings, planned=planned)
        return None

    def _ahead(self, trainers: int, width: int) -> dict[str, Any]:
        """Settings of samplers beside so many trainers: these have fewer copies of the model, or
        less fsdp."""
        mesh = self._config.mesh
        rest = trainers // (mesh.expert * mesh.pipeline * mesh.context * mesh.tensor)
        fsdp = mesh.fsdp if mesh.fsdp and rest % mesh.fsdp == 0 else max(1, rest)
        return {
            "stream.max_staleness": self.staleness,
            "mesh.data": max(1, rest // fsdp),
            "mesh.fsdp": fsdp,
            "mesh.rollout_tensor": width,
        }

    def _accepted(self, settings: Mapping[str, Any], machine: Machine) -> RunPlan | None:
        """The plan of a run with these settings; None if there can be no such run."""
        try:
            return self._planned(settings, machine)
        except ValueError:
            return None

    def _planned(self, settings: Mapping[str, Any], machine: Machine) -> RunPlan:
        planned = plan_run(
            with_values(self._config, settings),
            machine,
            self._chosen - settings.keys(),
            searched=settings.keys(),
            open_source=lambda *_, **__: self._source,
        )
        return dataclasses.replace(planned, devices=self._pod.devices[: machine.devices])


def _fits(pod: Pod, planned: RunPlan) -> bool:
    """Whether the trainers' arrays, with temporaries by formulas, leave SPARE of the memory."""
    try:
        guess = plan_on(pod, planned, compiled=False)
    except ValueError:  # a mesh that the pod does not hold
        return False
    return not guess.problem and guess.spare >= SPARE


def _shares(of: int, widths: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(number that samples, width), of so many devices or hosts."""
    counts = dict.fromkeys(round(of * share) for share in _SHARES)
    return ((n, width) for n in counts for width in widths if 0 < n < of)


def _priced(pod: Pod, base: RunPlan, lengths: ResponseLengths) -> StepWork:
    """The work of a step and its costs: those that a run has measured, or the middle of the range
    that is expected of the pod (efficiency.py)."""
    config = base.config
    guess = plan_on(pod, base, mean_response=round(lengths.mean), compiled=False)
    measured = lengths.measured
    if measured is None:
        seconds = {n: e.expected(pod.efficiency).middle for n, e in guess.estimates.items()}
        update = seconds.pop(UPDATE_WEIGHTS, 0.0)
        measured = Seconds(0.0, sum(seconds.values()), update, 0.0)
    samples, prompts = config.rollout.num_samples, config.data.prompts_per_step

    def draw(group: int) -> tuple[np.ndarray, np.ndarray]:
        drawn = lengths.drawn(np.random.default_rng((0, group)), samples)
        return drawn, np.full(samples, measured.reward)

    work = StepWork(
        prompts=prompts,
        samples=samples,
        call=max(config.rollout.tokens_per_call, -(-lengths.longest // _CALLS)),
        draw=draw,
        decode=_decode(guess, lengths),
        token=measured.training * pod.size / (prompts * samples * lengths.mean),
        weight_update=measured.weight_update,
        scorers=prompts * samples,  # waiting for a worker is in the seconds of a reward
    )
    if not lengths.measured:
        return work
    return dataclasses.replace(work, decode=_calibrated(pod, base, work, measured.generation))


def _decode(guess: PodPlan, lengths: ResponseLengths) -> dict[int, Decode]:
    """Seconds of a group of devices by its width, for all widths that the model's heads allow.

    Linear between one slot and a group's share of all slots, whose responses are as long as those
    that are under way at a time: sum(length^2) / sum(length).
    """
    pod, base = guess.pod, guess.planned
    config, sizes, model = base.config, base.sizes, base.source.config
    samples, prompt = config.rollout.num_samples, config.data.max_prompt_length
    weights = lengths.counts * lengths.tokens
    under_way = float(np.average(lengths.tokens, weights=weights))
    share = -(-sizes.engine.decode_slots // sizes.sampler_ranks) / sizes.rollout_tensor
    found = {}
    for width in range(1, pod.size + 1):
        fits = not any(n % width for n in (pod.size, model.num_heads, model.mlp_size))
        if not fits or model.vocab_size % width or pod.interconnect.span(range(width)) is None:
            continue

        def seconds(slots: int, width: int = width) -> tuple[float, float]:
            load = Load(slots, slots, prompt, under_way, round(under_way), samples)
            of = estimate_generation(pod, model, sizes.engine, width, load)
            step, read = (e.expected(pod.efficiency).middle for e in (of.full, of.prefill))
            return step / load.full_steps, read / -(-slots // samples)

        most = max(2, round(share * width))
        (one, read), (full, _) = seconds(1), seconds(most)
        slot = (full - one) / (most - 1)
        found[width] = Decode(one - slot, slot, read)
    return found


def _calibrated(pod: Pod, base: RunPlan, work: StepWork, generation: float) -> dict[int, Decode]:
    """Costs of decoding that give synchronous steps the generation that a run has measured."""
    sizes = base.sizes
    samplers = pod.hosts // sizes.sampler_hosts
    slots = sizes.engine.decode_slots * samplers
    layout = DeviceSplit(pod.size, pod.size, sizes.rollout_tensor, samplers, slots)

    def draw(group: int) -> tuple[np.ndarray, np.ndarray]:
        return work.draw(group)[0], np.zeros(work.samples)

    bare = dataclasses.replace(work, draw=draw, token=0.0, weight_update=0.0)
    factor = generation / step_seconds(bare, SYNCHRONOUS, layout, 8, 1)
    return {
        width: Decode(d.step * factor, d.slot * factor, d.prompt * factor)
        for width, d in work.decode.items()
    }
