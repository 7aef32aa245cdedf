"""Checks and benchmarks of one machine in one command, for a GPU, a TPU or a CPU.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 python benchmarks/gpu.py --out=gpu.json
    python benchmarks/gpu.py --parts=update --models=random:configs/shapes/llama32_1b \\
        --micro-rows=8,4,2,1 --remat=dots
    python benchmarks/gpu.py --attention=kernel --decode-attention=gpu
    python benchmarks/gpu.py --quick

A second call with the same --out goes on where the first one stopped: what the file has is kept,
what failed or did not begin is run. The third command measures our Triton kernels, which `auto`
does not choose on GPUs. Runs on the devices that JAX finds, in one process, without the network,
with random weights. Several devices divide parameters and rows. Parts, the most worth first:

check   log-probs, loss, gradient and sampled tokens of a small model against this machine's CPU, in
        float32, and in bfloat16 by the chosen attention. A wrong result ends the program before
        anything is timed. JAX needs its CPU too (JAX_PLATFORMS=cuda,cpu).
update  an optimizer step of a run's own program: rows of 4,096 tokens, AdamW.
decode  256 slots per device, prompts of 512 tokens, 512 new tokens: share of the bandwidth.
step    whole GRPO steps as scripts/train.py runs them, 32 prompts x 16 samples x up to 512 tokens,
        and each segment's seconds next to what plan.py predicts at the chip's peak rates. Starts a
        process for the reward, and writes some MB into a temporary folder.
kernels every attention that the device has, also beside cuDNN's plain causal attention; at the end
        decode again by each of them.
batch   the update with the most rows at a time that memory holds.
async   the part step with stream.max_staleness=1: unfinished responses continue in the next step.

Every result is written to --out at once, which is what scripts/plan.py --calibrate takes. A part
that does not fit is reported, and the next part begins if the seconds that it may take
(benchmarks/device/tasks.py) are left of --minutes; what still runs a minute after --minutes is
given up. Peak rates of devices that are not in planning/chips.py, such as CPUs, are measured first.
Exit code 1: a wrong result or a failure; 2: a user error, in one line.
"""

import argparse
import dataclasses
import datetime
import gc
import os
import pathlib
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from command_line import parser_of
from device.check import check
from device.decode import time_decode
from device.kernels import of_platform, time_kernels
from device.rates import measured_chip, this_chip
from device.step import time_step
from device.tables import lines, segments, tables
from device.tasks import SECONDS, Results, Task, expected_seconds, ordered, run_left
from device.update import largest_batch, time_update
from device.work import QUICK, Work

from distflow_jax.config.implementation_table import DECODE, ROWS, names
from distflow_jax.models.remat import REMATS
from distflow_jax.planning.chips import Chip

SHAPES = pathlib.Path(__file__).parents[1] / "configs" / "shapes"
MODELS = tuple(f"random:{SHAPES / name}" for name in ("llama32_1b", "llama32_3b"))
QUICK_MODEL = "random:llama?hidden=64&layers=2&heads=4&kv_heads=2&mlp=128&vocab=512"
SETTINGS = ("remat", "attention", "decode_attention", "step_rows")
GRACE_SECONDS = 60.0


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", default=",".join(SECONDS), help="comma-separated")
    parser.add_argument("--models", default="", help="model sources, comma-separated")
    parser.add_argument(
        "--out", default="gpu.json", help="file for the results, which is continued"
    )
    parser.add_argument("--minutes", type=float, default=7, help="in which parts have to end")
    parser.add_argument("--quick", action="store_true", help="small sizes, to check the setup")
    parser.add_argument(
        "--micro-rows", default="", help="per device in an update, comma-separated; the first first"
    )
    parser.add_argument("--remat", choices=REMATS, default="none")
    parser.add_argument("--attention", choices=names(ROWS), default="auto", help="of the trainer")
    parser.add_argument(
        "--decode-attention", choices=names(DECODE), default="auto", help="of the sampler"
    )
    parser.add_argument("--step-rows", type=int, default=1, help="per device at a time, in a step")
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    for part in args.parts:
        if part not in SECONDS:
            parser.error(f"--parts={part}: known are {', '.join(SECONDS)}")
    if not pathlib.Path(args.out).absolute().parent.is_dir():
        parser.error(f"--out={args.out}: its folder does not exist; make it first")
    default = [QUICK_MODEL] if args.quick else list(MODELS)
    args.models = args.models.split(",") if args.models else default
    try:
        args.micro_rows = tuple(int(n) for n in args.micro_rows.split(",") if n)
    except ValueError:
        parser.error(f"--micro-rows={args.micro_rows}: numbers with commas between, such as 1,2,4")
    return args


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


def measure(
    task: Task, args: argparse.Namespace, chip: Chip, folder: pathlib.Path
) -> dict[str, Any]:
    """The result of a task."""
    if task.part == "check":
        found = check(jax.devices()[0], args.attention, args.decode_attention)
        return {"comparisons": [vars(c) for c in found], "holds": all(c.holds for c in found)}
    work, setting = work_of(args), task.variant.partition("=")[2]
    model = next(source for source in args.models if short(source) == task.model)
    if task.part == "update":
        return time_update(model, chip, work, micro_rows=int(setting), remat=args.remat)
    if task.part == "batch":
        return largest_batch(model, chip, work, remat=args.remat)
    if task.part == "decode" or setting:
        work = dataclasses.replace(work, decode_attention=setting or work.decode_attention)
        return time_decode(model, chip, work, "float32" if chip.platform == "cpu" else "bfloat16")
    if task.part == "kernels":
        return time_kernels(model, work)
    rows, stale = args.step_rows * jax.device_count(), int(task.part == "async")
    here = folder / f"{task.part}-{task.model}"
    return time_step(model, chip, work, micro_rows=rows, folder=here, staleness=stale)


def short(model: str) -> str:
    """The end of a model's source, its name in results."""
    return model.rpartition("/")[2]


def measured(
    task: Task, args: argparse.Namespace, chip: Chip, folder: pathlib.Path
) -> dict[str, Any]:
    """The result with its "part_seconds", or {"error": reason} if sizes are too large or do not fit
    together.

    Other exceptions add a "traceback", so that the results of the other parts are kept.
    """
    print(f"{task.name} ...", flush=True)
    began = time.perf_counter()
    try:
        found = measure(task, args, chip, folder)
    except ValueError as error:
        found = {"error": str(error)}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        if "RESOURCE_EXHAUSTED" not in found["error"]:
            traceback.print_exc()
            found["traceback"] = traceback.format_exc()
    gc.collect()  # arrays referenced by an error's traceback
    return found | {"part_seconds": round(time.perf_counter() - began, 1)}


def show(found: Mapping[str, Any]) -> None:
    """Prints a result, in its table's rows."""
    print(*lines(found), *segments(found), f"took {found['part_seconds']} s", sep="\n", flush=True)


def about(args: argparse.Namespace) -> dict[str, Any]:
    """The machine and the date."""
    return {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "python": sys.version.partition(" ")[0],
        "devices": jax.device_count(),
        "device_kind": jax.devices()[0].device_kind,
        "settings": {"sizes": "quick" if args.quick else "full"}
        | {name: getattr(args, name) for name in SETTINGS},
    }


def chip_of_results(results: Results) -> Chip:
    """This job's chip, by peak rates or by those that were measured; the file gets both."""
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    chip = this_chip(dtype)
    rates = chip if chip.source == "measured" else measured_chip(dtype)
    links = {"link_bandwidth": rates.link_bandwidth} if jax.device_count() > 1 else {}
    own = ("flops", "memory_bandwidth", "source")
    results.note(
        peaks={name: getattr(chip, name) for name in own},
        measured={name: getattr(rates, name) for name in own[:2]} | links,
    )
    print(
        f"{jax.device_count()} x {chip.name}: {chip.flops / 1e12:,.4g} TFLOP/s and "
        f"{chip.memory_bandwidth / 1e9:,.4g} GB/s ({chip.source}); a plain product reaches "
        f"{rates.flops / 1e12:,.4g}, a copy {rates.memory_bandwidth / 1e9:,.4g}",
        flush=True,
    )
    return chip


def has_cpu() -> bool:
    """Whether JAX has this machine's CPU in addition to its accelerator."""
    try:
        return bool(jax.devices("cpu"))
    except RuntimeError:
        return False


def print_all(results: Results, late: Sequence[Task]) -> None:
    """Prints all tables, and the tasks that a further call would run."""
    for text in tables(results.all()):
        print(f"\n{text}")
    for task in late:
        print(f"\nnot begun: {task.name}; the same command goes on with it")


def main() -> int:
    started, args = time.perf_counter(), parse_arguments()
    if "check" in args.parts and not has_cpu():
        print(
            f"error: the part check needs JAX's CPU beside {jax.default_backend()}, and "
            f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')} leaves it out: add ,cpu to that",
            file=sys.stderr,
        )
        return 2
    try:
        results = Results(pathlib.Path(args.out), about(args))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    def left() -> float:
        return 60 * args.minutes - (time.perf_counter() - started)

    def give_up() -> None:
        print_all(results, [])
        print(f"error: a part ran on after --minutes={args.minutes:g}", file=sys.stderr, flush=True)
        os._exit(1)  # nothing can interrupt a compilation

    limit = threading.Timer(left() + GRACE_SECONDS, give_up)
    limit.daemon = True
    limit.start()
    chip, work = chip_of_results(results), work_of(args)
    models = [short(model) for model in args.models]
    decodes = of_platform(DECODE, jax.default_backend())
    tasks = list(ordered(args.parts, models, work.micro_rows, decodes))
    with tempfile.TemporaryDirectory(prefix="distflow-gpu-") as folder:
        late = run_left(
            tasks,
            results,
            seconds=lambda task: expected_seconds(task, models, quick=args.quick),
            left=left,
            run=lambda task: measured(task, args, chip, pathlib.Path(folder)),
            show=show,
        )
    limit.cancel()
    print_all(results, late)
    print(f"\nwrote {args.out} after {(time.perf_counter() - started) / 60:.1f} minutes")
    if wrong := [one for one in results.all() if not one.get("holds", True)]:
        print(
            f"error: this device does not compute what the CPU does ({wrong[0]['task']}); nothing "
            "was timed after that",
            file=sys.stderr,
        )
    return 1 if wrong or any("traceback" in one for one in results.all()) else 0


if __name__ == "__main__":
    sys.exit(main())
