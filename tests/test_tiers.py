"""The tiers of tests: CONTRIBUTING.md says of every file with slow tests which promise they guard.

`python tests/test_tiers.py LOG` prints its table with the seconds in a log of `make test-nightly`.
"""

import collections
import pathlib
import re
import sys

from support.paths import ROOT, TESTS

SLOW = re.compile(r"\bmark\.slow\b")
SECTION = re.compile(r"^(#+) Slow tests.*?$(.*?)(?=^#{1,2} |\Z)", re.DOTALL | re.MULTILINE)
DURATION = re.compile(r"^([\d.]+)s (?:setup|call|teardown) +(tests/[\w/]+\.py)::", re.MULTILINE)


def slow_files() -> set[str]:
    """Files that mark a test or a case as slow."""
    found = {p for p in TESTS.rglob("test_*.py") if SLOW.search(p.read_text())}
    return {str(p.relative_to(ROOT)) for p in found} - {"tests/test_tiers.py"}


def table() -> dict[str, list[str]]:
    """{file: [the promise, its seconds]} by the rows of the section on slow tests."""
    texts = [path.read_text() for path in sorted(ROOT.glob("CONTRIBUTING*.md"))]
    sections = [found[2] for text in texts for found in SECTION.finditer(text)]
    rows = [line.split("|") for text in sections for line in text.splitlines()]
    rows = [[cell.strip() for cell in row[1:-1]] for row in rows if len(row) == 5]
    files = [row for row in rows if row[0].startswith("tests/")]
    assert len({row[0] for row in files}) == len(files), "a file has two rows"
    return {row[0]: row[1:] for row in files}


def test_every_file_with_slow_tests_has_its_promise_in_contributing_md():
    rows = table()
    assert rows.keys() - slow_files() == set(), "these files have no slow tests"
    assert slow_files() - rows.keys() == set(), "say what these guard"
    assert all(promise for promise, _ in rows.values())


def test_no_target_of_the_makefile_leaves_a_slow_test_out():
    """Together `make test` and `make test-nightly` run all but what has a target of its own."""
    makefile = (ROOT / "Makefile").read_text()
    apart = "not soak and not gpu and not tpu"
    assert f'-m "slow and {apart}"' in makefile and "-m soak\n" in makefile
    assert f"-m 'not slow and {apart}'" in (ROOT / "pyproject.toml").read_text()


def main() -> None:
    """Prints the table with the seconds of a log."""
    seconds = collections.Counter()
    for number, file in DURATION.findall(pathlib.Path(sys.argv[1]).read_text()):
        seconds[file] += float(number)
    for file, (promise, known) in table().items():
        print(f"| {file} | {promise} | {round(seconds[file]) if file in seconds else known} |")
    print(f"in all {round(seconds.total())}", file=sys.stderr)


if __name__ == "__main__":
    main()
