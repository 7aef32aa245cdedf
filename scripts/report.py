"""Writes report.html of a run's folder again, or shows runs live in a browser.

With --serve=PORT, the page updates while the runs train. To compare runs, give several folders, or
one that contains several runs; to write a page of them, add --out=FILE.html.

    python scripts/report.py --workdir=runs/first

In a checkout the same as `distflow report`; --help shows flags and examples.
"""

from distflow_jax.commands.main import run_script

if __name__ == "__main__":
    run_script("report")
