"""Writes report.html of a run's folder again, for a finished, running or killed run.

Example:
  python scripts/report.py --workdir=runs/first
"""

import pathlib

from absl import flags

from distflow_jax.config.command_line import run_main
from distflow_jax.report.page import report
from distflow_jax.report.run_writer import write_atomic

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
OUT = flags.DEFINE_string("out", "", "File to write; empty: report.html in the run's folder.")
flags.mark_flag_as_required("workdir")


def main(argv: list[str]) -> int:
    """Reads the folder and writes the report."""
    folder = pathlib.Path(WORKDIR.value)
    if not folder.is_dir():
        raise ValueError(f"--workdir {str(folder)!r} does not exist; name the folder of a run")
    path = pathlib.Path(OUT.value or folder / "report.html")
    write_atomic(path, report(folder))
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    run_main(main)
