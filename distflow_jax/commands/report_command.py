"""The subcommand report."""

import pathlib
from types import SimpleNamespace

from distflow_jax.report.page import report
from distflow_jax.report.run_writer import write_atomic


def main(options: SimpleNamespace) -> int:
    """Reads the folder and writes the report."""
    folder = pathlib.Path(options.workdir)
    if not folder.is_dir():
        raise ValueError(f"--workdir {str(folder)!r} does not exist; name the folder of a run")
    path = pathlib.Path(options.out or folder / "report.html")
    write_atomic(path, report(folder))
    print(f"wrote {path}")
    return 0
