"""The subcommand report."""

import pathlib
from types import SimpleNamespace

from distflow_jax.report.json_lines import write_atomic
from distflow_jax.report.live.live_server import find_runs, names_of, open_server, serve
from distflow_jax.report.page import compare_page, report
from distflow_jax.report.read_run import read_run


def main(options: SimpleNamespace) -> int:
    """Writes a page of runs, or serves them until a signal; returns the exit code."""
    folders = [*([options.workdir] if options.workdir else []), *options.arguments]
    out = options.out
    if options.serve is not None:
        if out:
            raise ValueError(
                f"--out={out} and --serve={options.serve} exclude each other; leave one out"
            )
        serve(open_server(folders, options.serve, options.host))
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
