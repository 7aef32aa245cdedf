"""The subcommand export."""

import pathlib
import time
from types import SimpleNamespace

import jax

from distflow_jax.checkpoint.export import RunExport, run_export, source_export, untied
from distflow_jax.models.weights.atomic_folder import check_new_folder
from distflow_jax.models.weights.hf_folder import Written, write_hf_folder
from distflow_jax.models.weights.peft_folder import CONFIG_FILE, write_peft_folder
from distflow_jax.models.weights.safetensors_writer import parse_size
from distflow_jax.programs.text_table import text_table
from distflow_jax.programs.units import format_bytes, format_decimal, format_seconds


def checked(options: SimpleNamespace) -> int:
    """Bytes of the largest file. Raises ValueError for flags that do not fit, or if the folder of
    --out cannot be made."""
    if not options.workdir and not options.source:
        raise ValueError("give --workdir, the folder of a run, or --source, a model source")
    if not options.workdir and (options.step is not None or options.model or options.adapter):
        raise ValueError("--step, --model and --adapter need a run: give its --workdir")
    if options.adapter and options.untie:
        raise ValueError("--untie writes a whole model, --adapter only adapters: use one of them")
    mark = CONFIG_FILE if options.adapter else "config.json"
    check_new_folder(pathlib.Path(options.out), overwrite=options.overwrite, needed=0, mark=mark)
    return parse_size(options.max_shard_size)


def main(options: SimpleNamespace) -> int:
    """Finds the model, writes it, prints a summary."""
    start = time.monotonic()
    jax.config.update("jax_platforms", "cpu")  # accelerators may be in use by other processes
    max_shard_bytes = checked(options)
    out = pathlib.Path(options.out)
    if options.workdir:
        found = run_export(
            pathlib.Path(options.workdir),
            step=options.step,
            model=options.model,
            source=options.source,
        )
        export, what = found.export, f"{found.model} of {options.workdir} at step {found.step}"
        if options.adapter:
            _write_adapters(options, found, what, start)
            return 0
    else:
        export, what = source_export(options.source), options.source
    if options.untie:
        export = untied(export)
    written = write_hf_folder(
        out,
        export,
        dtype=options.dtype,
        max_shard_bytes=max_shard_bytes,
        overwrite=options.overwrite,
    )
    _report(options, written, what, time.monotonic() - start)
    return 0


def _write_adapters(options: SimpleNamespace, found: RunExport, what: str, start: float) -> None:
    if found.adapters is None:
        raise ValueError(f"{what} has no adapters (it was not trained with lora.rank)")
    written = write_peft_folder(
        pathlib.Path(options.out),
        found.adapters,
        dtype=options.dtype,
        overwrite=options.overwrite,
    )
    _report(options, written, f"the adapters of {what}", time.monotonic() - start)


def _report(options: SimpleNamespace, written: Written, what: str, seconds: float) -> None:
    rows = [(name, format_bytes(size)) for name, size in written.files.items()]
    print(f"{text_table([('file', 'size'), *rows])}\n")
    lost = written.lost
    if options.dtype != "float32":
        print(
            f"out of the range of {options.dtype}: {lost.above} values became infinite, "
            f"{lost.below} became 0"
        )
    if lost.not_finite:
        print(f"warning: {lost.not_finite} values were not finite before the conversion")
    print(f"wrote {what} as {options.dtype} to {options.out}:")
    print(
        f"  {format_decimal(written.num_params, '')} parameters in {len(written.files)} files, "
        f"{format_bytes(sum(written.files.values()))}, in {format_seconds(seconds)}"
    )
