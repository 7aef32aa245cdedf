"""Damaged files: read, or refused in one line; nothing else happens to the process.

One process tries all mutations of support/fuzz.py under a limit of its memory. A crash of C++, a
traceback of another kind or a hang ends it, and its last line names the mutation.

Nightly: 1,000 mutations of every file that strangers write are read or refused in one line, within
time and memory.
"""

import json
import os

import pytest
from support import haste
from support.fuzz import PARSERS
from support.paths import ROOT
from support.programs import finished


def outcomes(folder, count, *names):
    env = haste.environment() | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = finished("-m", "support.fuzz", folder, count, *names, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def test_fifty_mutations_of_every_file(tmp_path):
    found = outcomes(tmp_path, 50)
    assert list(found) == PARSERS
    for name, counts in found.items():
        assert sum(counts.values()) == 50 and counts["refused"] > 25, (name, counts)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_a_thousand_mutations(tmp_path, name):
    """Every outcome of 1,000 mutations of a file is a value or one line (distflow_jax/parsing/)."""
    counts = outcomes(tmp_path, 1000, name)[name]
    assert sum(counts.values()) == 1000 and counts["refused"] > 500
