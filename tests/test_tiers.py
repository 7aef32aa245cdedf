"""The tiers of tests: every file says what it promises, and what its slow tests add to that.

`python tests/test_tiers.py` prints the promises of the nightly tier, and with the log of
`make test-nightly` the seconds of each file.
"""

import ast
import collections
import functools
import pathlib
import re
import sys

from support.paths import ROOT, TESTS

SLOW = re.compile(r"\bmark\.slow\b")
NIGHTLY = re.compile(r"\n\nNightly: (.+?)(?=\n\n|\Z)", re.DOTALL)
DURATION = re.compile(r"^([\d.]+)s (?:setup|call|teardown) +(tests/[\w/]+\.py)::", re.MULTILINE)


@functools.cache
def docstrings() -> dict[str, str]:
    """{file: its docstring} of all files with tests."""
    files = sorted(TESTS.rglob("test_*.py"))
    return {
        str(path.relative_to(ROOT)): ast.get_docstring(ast.parse(path.read_text())) or ""
        for path in files
    }


def promises() -> dict[str, str]:
    """{file: what its slow tests promise}."""
    found = {file: NIGHTLY.search(text) for file, text in docstrings().items()}
    return {file: " ".join(one[1].split()) for file, one in found.items() if one}


def test_every_file_of_tests_begins_with_what_it_promises():
    assert [file for file, text in docstrings().items() if not text] == []


def test_every_file_with_slow_tests_says_what_they_promise():
    slow = {file for file in docstrings() if SLOW.search((ROOT / file).read_text())}
    slow -= {"tests/test_tiers.py"}
    assert promises().keys() - slow == set(), "these files have no slow tests"
    assert slow - promises().keys() == set(), 'say what these guard, after "Nightly:"'


def test_no_target_of_the_makefile_leaves_a_slow_test_out():
    """Together `make test` and `make test-nightly` run all but what has a target of its own."""
    makefile = (ROOT / "Makefile").read_text()
    apart = "not soak and not gpu and not tpu"
    assert f'-m "slow and {apart}"' in makefile and "-m soak\n" in makefile
    assert f"-m 'not slow and {apart}'" in (ROOT / "pyproject.toml").read_text()


def main() -> None:
    """Prints the promises, with the seconds of a log if one is given."""
    seconds = collections.Counter()
    for log in sys.argv[1:]:
        for number, file in DURATION.findall(pathlib.Path(log).read_text()):
            seconds[file] += float(number)
    for file, promise in promises().items():
        print(f"{file}: {promise}" + f" [{seconds[file]:.0f} s]" * (file in seconds))
    if seconds:
        print(f"in all {seconds.total():.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
