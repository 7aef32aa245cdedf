"""Roofline predictions for each segment of a run on these devices, next to measured times."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from device.segments import SegmentTimes

from distflow_jax.dag.residency import UPDATE_WEIGHTS
from distflow_jax.planning.chips import Chip
from distflow_jax.pods.compile import compile_program, compile_sync
from distflow_jax.pods.generation import GenerationEstimate, Load, estimate_generation
from distflow_jax.pods.roofline import Estimate, estimate
from distflow_jax.pods.topology import Pod, present_pod
from distflow_jax.programs.costs import Costs
from distflow_jax.programs.text_table import text_table
from distflow_jax.runtime.open_run import OpenRun


def beside_prediction(
    run: OpenRun, times: SegmentTimes, steps: Sequence[Mapping[str, float]], chip: Chip
) -> list[dict[str, Any]]:
    """Predicted seconds of each segment at the chip's rates, and the median of the measured ones.

    Programs are those that ran, compiled for these devices. Their costs are bounds for all rows;
    predictions are scaled to the rows that the batch filled. Sampling is predicted by the formula
    of docs/scaling.md for the sampled lengths.
    """
    pod, measured = present_pod(chip), times.take()
    found = []
    for name, program in run.runtime.programs.items():
        cost = compile_program(program, pod)
        share = times.rows[name] / run.prepared.sizes.packing.rows[program.unit.layout]
        share /= run.prepared.sizes.mesh.ranks
        one = _of_program(pod, cost, program.mesh.size)
        found.append(_row(name, one, statistics.median(measured[name]), share))
    cost = compile_sync(run.prepared, run.runtime.programs, pod)
    seconds = statistics.median(step["timing_s/update_weights"] for step in steps)
    found.append(_row(UPDATE_WEIGHTS, _of_program(pod, cost, pod.size), seconds))
    sampling = _sampling(run, pod, steps)
    seconds = statistics.median(measured["rollout"])
    return [_segment("rollout", sampling.total, sampling.whole.bound, seconds), *found]


def _row(name: str, one: Estimate, seconds: float, share: float = 1.0) -> dict[str, Any]:
    return _segment(name, one.total * share, one.bound, seconds, share)


def _segment(
    name: str, predicted: float, bound: str, measured: float, filled: float = 1.0
) -> dict[str, Any]:
    return {
        "segment": name,
        "filled": filled,
        "predicted_seconds": predicted,
        "bound": bound,
        "measured_seconds": measured,
        "ratio": measured / predicted,
    }


def _of_program(pod: Pod, cost: Costs, devices: int) -> Estimate:
    accessed = cost.bytes_accessed or 0.0
    return estimate(pod, flops=cost.flops / devices, accessed=accessed, traffic=cost.traffic)


def _sampling(run: OpenRun, pod: Pod, steps: Sequence[Mapping[str, float]]) -> GenerationEstimate:
    """The estimate for the sampled lengths; the longest is the mean over steps of the longest."""
    prepared = run.prepared
    ranks = pod.size // prepared.sizes.rollout_tensor
    samples = prepared.config.rollout.num_samples

    def mean(name: str) -> float:
        return statistics.fmean(step[name] for step in steps)

    load = Load(
        responses=-(-prepared.config.data.prompts_per_step * samples // ranks),
        slots=prepared.sizes.engine.slots // ranks,
        prompt=round(mean("prompt_length/mean")),
        mean=mean("response_length/mean"),
        longest=round(mean("response_length/max")),
        group=samples,
    )
    model, engine = prepared.source.config, prepared.sizes.engine
    return estimate_generation(pod, model, engine, prepared.sizes.rollout_tensor, load)


def describe(segments: Sequence[Mapping[str, Any]]) -> str:
    """The segments as a table of text."""
    rows = [("segment", "rows filled", "predicted s", "bound by", "measured s", "ratio")]
    for s in segments:
        rows.append(
            (
                s["segment"],
                f"{s['filled']:.0%}",
                f"{s['predicted_seconds']:.3g}",
                s["bound"],
                f"{s['measured_seconds']:.3g}",
                f"{s['ratio']:.2f}",
            )
        )
    return text_table(rows)
