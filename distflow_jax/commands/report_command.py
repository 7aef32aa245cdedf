"""The subcommand report."""

from types import SimpleNamespace

from distflow_jax.report.live.write_or_serve import write_or_serve


def main(options: SimpleNamespace) -> int:
    """Reads the folders, and writes or serves the report."""
    folders = [*([options.workdir] if options.workdir else []), *options.arguments]
    return write_or_serve(folders, out=options.out, port=options.serve, host=options.host)
