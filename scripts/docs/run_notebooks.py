"""Runs the notebooks from top to bottom and stores them with their output.

    python scripts/docs/run_notebooks.py notebooks/quickstart.ipynb     the named ones
    python scripts/docs/run_notebooks.py                                all

Each runs in a folder of its own. Messages to stderr, times of cells and names of temporary folders
are left out, so that a notebook changes only where its results do.
"""

import os
import pathlib
import re
import sys
import tempfile

import nbclient
import nbformat

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 3600  # of one cell


def run(path: pathlib.Path) -> None:
    """Executes a notebook and writes it back with the output of its cells."""
    book = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": paths, "TMPDIR": folder}
        client = nbclient.NotebookClient(
            book, timeout=SECONDS, resources={"metadata": {"path": folder}}
        )
        client.execute(env=environment)
        for cell in book.cells:
            if cell.cell_type == "code":
                cell.metadata.pop("execution", None)
                cell.outputs = [_clean(o, folder) for o in cell.outputs if _wanted(o)]
    nbformat.write(book, path)


def _wanted(output: nbformat.NotebookNode) -> bool:
    return not (output.output_type == "stream" and output.name == "stderr")


def _clean(output: nbformat.NotebookNode, folder: str) -> nbformat.NotebookNode:
    """The output without paths of this machine: folders of the run, and of the repository."""
    places = [(re.compile(rf"{re.escape(folder)}/([a-z-]+-)\w{{8}}"), r"/tmp/\1run")]
    places += [(re.compile(re.escape(folder)), "/tmp"), (re.compile(re.escape(str(ROOT))), ".")]

    def without(value):
        if isinstance(value, dict):
            return {key: without(item) for key, item in value.items()}
        if isinstance(value, list):
            return [without(item) for item in value]
        if isinstance(value, str):
            for form, text in places:
                value = form.sub(text, value)
        return value

    return nbformat.from_dict(without(output))


def main() -> None:
    """Runs the named notebooks, or all."""
    named = [pathlib.Path(argument) for argument in sys.argv[1:]]
    for path in named or sorted((ROOT / "notebooks").glob("*.ipynb")):
        run(path)
        print(f"ran {path}")


if __name__ == "__main__":
    main()
