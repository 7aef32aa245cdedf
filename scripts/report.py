"""Writes report.html of a run's folder again, or shows runs live in a browser.

With --serve=PORT the page grows while the runs train. Several folders, or one that contains several
runs, are compared; a page of them needs --out=FILE.html.

    python scripts/report.py --workdir=runs/first

In a checkout the same as `distflow report`; --help shows flags and examples.
"""

from distflow_jax.commands.main import run_script

if __name__ == "__main__":
    run_script("report")
