"""Inputs that subcommands must refuse: one line, exit code 2, no work done, nothing left.

support/bad_starts.py makes them from the keys of the config, the flags and the parsers of train;
support/named_places.py from all flags and keys that name a file or folder. All of them
run as forks of one process that has imported the package (support/many_starts.py): a new process
spends some two CPU-seconds on imports, which are the same for each, and are counted. What a fork
cannot show, the start of Python and the order of imports, is tried with real processes: a choice
that is the same in every run in the nightly tests, 500 in the soak test.

Nightly: some 1,600 bad inputs of `train.py`, and 900 names of files for all subcommands, end in one
line with exit code 2, within 5 CPU-seconds; no process is left. Each flag and key of a path refuses
a bucket.
"""

import json
import os
import random
import re
import sys

import pytest
from support.named_places import KEYS, NO_PATHS
from support.paths import ROOT
from support.programs import finished
from support.run_folders import json_lines

from distflow_jax.config.key_reference import keys

CPU_SECONDS = 5.0
SECONDS = 3600 * 3  # for all: a guard against hangs

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="orphans are counted as Linux does"
)


def run(module, *arguments, cwd):
    paths = [str(ROOT), str(ROOT / "tests")]
    # where it is set, the key compilation_cache is not read
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    # the cases of sizes are for eight devices
    flags = "--xla_force_host_platform_device_count=8"
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    environment |= {"PYTHONPATH": os.pathsep.join(paths)}
    finished("-m", module, *arguments, env=environment, cwd=cwd, seconds=SECONDS)


def cases_in(folder, made_by="support.bad_starts"):
    run(made_by, folder, cwd=folder)
    return json.loads((folder / "cases.json").read_text())


def problems(case, result):
    """Reasons for which the end of a start is wrong."""
    found, line = [], result["stderr"]
    if result["code"] != 2:
        found.append(f"exit code {result['code']}")
    if not all(line.endswith(" ...") for line in result["stdout"].splitlines()):  # a long wait
        found.append(f"standard output {result['stdout'][:200]!r}")
    if not re.fullmatch(r"error: [^\n]+\n", line) or not line[:-1].isprintable():
        found.append(f"not one line: {line[-1000:]!r}")
    found += [f"{line!r} does not say {words!r}" for words in case["says"] if words not in line]
    if result["cpu"] > CPU_SECONDS:
        found.append(f"{result['cpu']:.1f} CPU-seconds")
    return found + [f"left {command}" for command in result["left"]]


def refused(how, cases, folder):
    """Starts all cases; fails with all that is wrong with any of them."""
    (folder / "chosen.json").write_text(json.dumps(cases))
    results = folder / "results.jsonl"
    run("support.many_starts", how, folder / "chosen.json", results, cwd=folder)
    lines = json_lines(results)
    assert [line["name"] for line in lines] == [case["name"] for case in cases]
    wrong = [
        f"{case['name']}: {', '.join(found)}"
        for case, line in zip(cases, lines, strict=True)
        if (found := problems(case, line))
    ]
    seconds = max(line["cpu"] for line in lines)
    print(f"{len(lines)} starts, at most {seconds:.1f} CPU-seconds")
    assert not wrong, f"{len(wrong)} of {len(lines)}:\n" + "\n".join(wrong)


def test_every_key_of_text_is_known_to_be_a_path_or_none():
    free = [key for key in keys().values() if not (key.kind and key.kind.choices)]
    of_text = {key.name for key in free if "str" in key.type or "dict" in key.type}
    assert of_text == {*KEYS, *NO_PATHS}


@pytest.mark.slow
def test_every_place_of_every_path_is_refused(tmp_path):
    """Every flag and key that names a file or folder (parsing/paths.py), and all who read one."""
    cases = cases_in(tmp_path, "support.named_places")
    assert len(cases) >= 500
    refused("fork", cases, tmp_path)


@pytest.mark.slow
def test_every_bad_start_is_refused(tmp_path):
    """Every check of a config, a file and user code before step 1 (config/, planning/, data/)."""
    cases = cases_in(tmp_path)
    assert len(cases) >= 500
    refused("fork", cases, tmp_path)


@pytest.mark.slow
def test_thirty_in_processes_of_their_own(tmp_path):
    """The same of the script itself (commands/main.py, the order of imports)."""
    refused("exec", random.Random(0).sample(cases_in(tmp_path), 30), tmp_path)
