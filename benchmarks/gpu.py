"""Checks and benchmarks of one machine in one command, for a GPU, a TPU or a CPU.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 python benchmarks/gpu.py --out=gpu.json
    python benchmarks/gpu.py --parts=update --models=random:configs/shapes/llama32_1b \\
        --micro-rows=1,2,4,8 --remat=dots
    python benchmarks/gpu.py --attention=kernel --decode-attention=gpu
    python benchmarks/gpu.py --quick

The third command measures our Triton kernels, which `auto` does not choose on GPUs.
Runs on the devices that JAX finds, in one process, without the network, with random weights.
Several devices divide parameters and rows. Parts:

check   log-probs, loss, gradient and sampled tokens of a small model against this machine's CPU, in
        float32, and in bfloat16 by the chosen attention. A wrong result ends the program with
        exit code 1 before anything is timed. JAX needs its CPU too (JAX_PLATFORMS=cuda,cpu).
update  an optimizer step of a run's own program: rows of 4,096 tokens, AdamW. MFU counts the FLOPs
        of the mathematics (models/model_flops.py), causal attention as half of a square.
decode  256 slots per device, prompts of 512 tokens, 512 new tokens: tokens/s, and the share of the
        bandwidth.
step    whole GRPO steps as scripts/train.py runs them, 32 prompts x 16 samples x up to 512 tokens,
        and each segment's seconds next to the roofline's prediction at the chip's peak rates.
        Starts a process for the reward, and writes some MB into a temporary folder.

Every result is written to --out at once. A part that does not fit is reported, and the next part
begins; no part begins after --minutes. Tables for docs/benchmarks.md are printed at the end. Peak
rates of devices that are not in planning/chips.py, such as CPUs, are measured first. The file is
what scripts/plan.py --calibrate takes. Exit code 1: a wrong result or a failure; 2: a user error,
in one line.
"""

import argparse
import dataclasses
import datetime
import functools
import gc
import json
import os
import pathlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
from device.check import check, describe
from device.decode import time_decode
from device.predict import describe as describe_segments
from device.rates import measured_chip, this_chip
from device.step import time_step
from device.update import time_update
from device.work import QUICK, Work

from distflow_jax.config.implementation_table import DECODE, ROWS, names
from distflow_jax.models.remat import REMATS
from distflow_jax.planning.chips import Chip

PARTS = ("check", "update", "decode", "step")
SHAPES = pathlib.Path(__file__).parents[1] / "configs" / "shapes"
MODELS = tuple(f"random:{SHAPES / name}" for name in ("llama32_1b", "llama32_3b"))
QUICK_MODEL = "random:llama?hidden=64&layers=2&heads=4&kv_heads=2&mlp=128&vocab=512"
TITLES = {
    "update": ("model", "rows at a time", "remat", "s a step", "tokens/s", "MFU", "program GiB",
               "compilations"),
    "decode": ("model", "slots", "tokens/s", "of these decoding", "share of bandwidth",
               "compilations"),
    "step": ("model", "s a step", "rollout s", "update MFU", "tokens/s", "response tokens, mean",
             "compilations"),
}  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--models", default="", help="model sources, comma-separated")
    parser.add_argument("--out", default="gpu.json", help="file for the results")
    parser.add_argument("--minutes", type=float, default=10, help="no part begins after that")
    parser.add_argument("--quick", action="store_true", help="small sizes, to check the setup")
    parser.add_argument("--micro-rows", default="", help="per device in an update, comma-separated")
    parser.add_argument("--remat", choices=REMATS, default="none")
    parser.add_argument("--attention", choices=names(ROWS), default="auto", help="of the trainer")
    parser.add_argument(
        "--decode-attention", choices=names(DECODE), default="auto", help="of the sampler"
    )
    parser.add_argument("--step-rows", type=int, default=1, help="per device at a time, in a step")
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"--parts={part}: known are {', '.join(PARTS)}")
    if not pathlib.Path(args.out).absolute().parent.is_dir():
        parser.error(f"--out={args.out}: its folder does not exist; make it first")
    default = [QUICK_MODEL] if args.quick else list(MODELS)
    args.models = args.models.split(",") if args.models else default
    try:
        args.micro_rows = tuple(int(n) for n in args.micro_rows.split(",") if n)
    except ValueError:
        parser.error(f"--micro-rows={args.micro_rows}: numbers with commas between, such as 1,2,4")
    return args


class Results:
    """Results so far, in a file."""

    def __init__(self, path: pathlib.Path, about: dict[str, Any]):
        self._path, self._tree = path, about | {"results": []}
        self.save()

    def add(self, part: str, model: str, found: dict[str, Any]) -> None:
        """Adds the result of a part, and writes all results."""
        self._tree["results"].append({"part": part, "model": model} | found)
        self.save()

    def save(self) -> None:
        """Replaces the file atomically."""
        beside = self._path.with_suffix(".tmp")
        beside.write_text(json.dumps(self._tree, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self._path)


def work_of(args: argparse.Namespace) -> Work:
    """Sizes for the available devices."""
    work = QUICK if args.quick else Work()
    chosen = dataclasses.replace(
        work,
        micro_rows=args.micro_rows or work.micro_rows,
        attention=args.attention,
        decode_attention=args.decode_attention,
    )
    return chosen.on(jax.device_count())


def tasks(
    args: argparse.Namespace, chip: Chip, folder: pathlib.Path
) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """(part, model, function that measures it), the first model before all others."""
    work, step_rows = work_of(args), args.step_rows * jax.device_count()
    for model in args.models:
        name = model.rpartition("/")[2]
        of_model = functools.partial(time_update, model, chip, work, remat=args.remat)
        if "update" in args.parts:
            for rows in work.micro_rows:
                yield "update", name, functools.partial(of_model, micro_rows=rows)
        if "decode" in args.parts:
            dtype = "float32" if chip.platform == "cpu" else "bfloat16"
            yield "decode", name, functools.partial(time_decode, model, chip, work, dtype)
        if "step" in args.parts:
            run = functools.partial(time_step, model, chip, work, micro_rows=step_rows)
            yield "step", name, functools.partial(run, folder=folder / name)


def measure(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result, or {"error": reason} if sizes are too large or do not fit together.

    Other exceptions add a "traceback", so that the results of the other parts are kept.
    """
    try:
        return run()
    except ValueError as error:
        return {"error": str(error)}
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if "RESOURCE_EXHAUSTED" in reason:
            return {"error": reason}
        traceback.print_exc()
        return {"error": reason, "traceback": traceback.format_exc()}


def row(part: str, model: str, found: dict[str, Any]) -> str:
    """A row of the part's table in docs/benchmarks.md."""
    if "error" in found:
        return f"| {model} | {found['error']} |"
    if part == "update":
        cells = [
            f"{found['micro_rows']}",
            found["remat"],
            f"{found['median_seconds']:.3f}",
            f"{found['tokens_per_second']:,.0f}",
            f"{found['mfu']:.1%}",
            f"{found['program_gb'] or 0:.1f}",
        ]
    elif part == "decode":
        cells = [
            f"{found['slots']}",
            f"{found['tokens_per_second']:,.0f}",
            f"{found['decode_tokens_per_second']:,.0f}",
            f"{found['bandwidth_share']:.1%}",
        ]
    else:
        of = found["medians"]
        mfu = of.get("perf/mfu/actor")
        cells = [
            f"{of['timing_s/step']:.2f}",
            f"{of['timing_s/gen']:.2f}",
            "-" if mfu is None else f"{mfu:.1%}",
            f"{of['perf/throughput']:,.0f}",
            f"{of['response_length/mean']:.0f}",
        ]
    return f"| {' | '.join([model, *cells, str(found['compilations'])])} |"


def about(chip: Chip, rates: Chip) -> dict[str, Any]:
    """The machine and the date."""
    return {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "python": sys.version.partition(" ")[0],
        "devices": jax.device_count(),
        "device_kind": jax.devices()[0].device_kind,
        "peaks": {
            "flops": chip.flops,
            "memory_bandwidth": chip.memory_bandwidth,
            "source": chip.source,
        },
        "measured": {"flops": rates.flops, "memory_bandwidth": rates.memory_bandwidth}
        | ({"link_bandwidth": rates.link_bandwidth} if jax.device_count() > 1 else {}),
    }


def has_cpu() -> bool:
    """Whether JAX has this machine's CPU in addition to its accelerator."""
    try:
        return bool(jax.devices("cpu"))
    except RuntimeError:
        return False


def main() -> int:
    args, started = parse_arguments(), time.perf_counter()
    if "check" in args.parts and not has_cpu():
        print(
            f"error: the part check needs JAX's CPU beside {jax.default_backend()}, and "
            f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')} leaves it out: add ,cpu to that",
            file=sys.stderr,
        )
        return 2
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    chip = this_chip(dtype)
    rates = chip if chip.source == "measured" else measured_chip(dtype)
    results = Results(pathlib.Path(args.out), about(chip, rates))
    print(
        f"{jax.device_count()} x {chip.name}: {chip.flops / 1e12:,.4g} TFLOP/s and "
        f"{chip.memory_bandwidth / 1e9:,.4g} GB/s ({chip.source}); a plain product reaches "
        f"{rates.flops / 1e12:,.4g}, a copy {rates.memory_bandwidth / 1e9:,.4g}",
        flush=True,
    )
    if "check" in args.parts:
        comparisons = check(jax.devices()[0], args.attention, args.decode_attention)
        print(describe(comparisons), flush=True)
        results.add("check", "small", {"comparisons": [vars(c) for c in comparisons]})
        if not all(c.holds for c in comparisons):
            print("error: this device does not compute what the CPU does; see above, nothing was "
                  "timed", file=sys.stderr)  # fmt: skip
            return 1
    rows: dict[str, list[str]] = {}
    failed = False
    with tempfile.TemporaryDirectory(prefix="distflow-gpu-") as folder:
        for part, model, run in tasks(args, chip, pathlib.Path(folder)):
            if time.perf_counter() - started > 60 * args.minutes:
                late = f"not begun: --minutes={args.minutes:g} were over"
                found: dict[str, Any] = {"error": late}
            else:
                found = measure(run)
            failed |= "traceback" in found
            results.add(part, model, found)
            rows.setdefault(part, []).append(row(part, model, found))
            print(f"{part} {rows[part][-1]}", flush=True)
            if "segments" in found:
                print(f"\n{describe_segments(found['segments'])}\n", flush=True)
            gc.collect()  # arrays referenced by an error's traceback
    for part, lines in rows.items():
        print(f"\n| {' | '.join(TITLES[part])} |\n|{'---|' * len(TITLES[part])}", *lines, sep="\n")
    print(f"\nwrote {args.out} after {(time.perf_counter() - started) / 60:.1f} minutes")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
