"""Paths that tests read."""

import pathlib

ROOT = pathlib.Path(__file__).parents[2]
TESTS = ROOT / "tests"
