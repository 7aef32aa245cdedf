"""Writes report.html of a run's folder again, or shows runs live in a browser.

With --serve=PORT the page grows while the runs train. Several folders, or one that contains several
runs, are compared; a page of them needs --out=FILE.html.

Example:
  python scripts/report.py --workdir=runs/first
"""

from absl import flags

from distflow_jax.config.command_line import run_main
from distflow_jax.report.live.write_or_serve import write_or_serve

WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of a run, or of several runs; further ones are given without a flag."
)
OUT = flags.DEFINE_string("out", "", "File to write; empty: report.html in the run's folder.")
SERVE = flags.DEFINE_integer(
    "serve", None, "Port of a live page of the runs, 0: any free one; nothing is written.", 0, 65535
)
HOST = flags.DEFINE_string("host", "127.0.0.1", "Address at which the live page is served.")


def main(argv: list[str]) -> int:
    """Reads the folders, and writes or serves the report."""
    folders = [*([WORKDIR.value] if WORKDIR.value else []), *argv[1:]]
    return write_or_serve(folders, out=OUT.value, port=SERVE.value, host=HOST.value)


if __name__ == "__main__":
    run_main(main, takes_arguments=True)
