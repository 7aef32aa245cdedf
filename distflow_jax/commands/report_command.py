"""The subcommand report."""

import os
import pathlib
from collections.abc import Sequence
from types import SimpleNamespace

from distflow_jax.report.json_lines import write_atomic
from distflow_jax.report.live.live_server import LOOPBACK, find_runs, names_of, open_server, serve
from distflow_jax.report.page import compare_page, report
from distflow_jax.report.read_run import read_run


def main(options: SimpleNamespace) -> int:
    """Reads the folders, and writes or serves the report."""
    folders = [*([options.workdir] if options.workdir else []), *options.arguments]
    return write_or_serve(folders, out=options.out, port=options.serve, host=options.host)


def write_or_serve(
    folders: Sequence[str | os.PathLike],
    *,
    out: str = "",
    port: int | None = None,
    host: str = LOOPBACK,
) -> int:
    """Writes a page of runs, or serves them until a signal; returns the exit code.

    Args:
      folders: of runs, or of folders that contain runs.
      out: file of the page; "": report.html in the folder of the one run.
      port: port of the live page, 0 for any free one; None: the page is written.
      host: address at which the live page is served.

    Raises:
      ValueError: folders or flags that do not fit.
    """
    if port is not None:
        if out:
            raise ValueError(f"--out={out} and --serve={port} exclude each other; use one of them")
        serve(open_server(folders, port, host))
        return 0
    runs = find_runs(folders)
    if len(runs) > 1 and not out:
        raise ValueError(f"a page of {len(runs)} runs needs a name: give --out=FILE.html")
    if len(runs) == 1:
        given = pathlib.Path(folders[0])
        folder = given if given.resolve() == runs[0] else runs[0]
        path = pathlib.Path(out) if out else folder / "report.html"
        text = report(runs[0])
    else:
        path = pathlib.Path(out)
        text = compare_page(dict(zip(names_of(runs), map(read_run, runs), strict=True)))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
    print(f"wrote {path}")
    return 0
