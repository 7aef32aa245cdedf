"""Benchmarks take from the package what is there, and sides that are compared get the same work.

Nightly: our side of benchmarks/grpo_step.py takes a step, tuned and with default settings.
"""

import argparse
import ast
import importlib
import json

import numpy as np
import pytest
from support.paths import ROOT
from support.programs import finished

FILES = sorted((ROOT / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_benchmark_imports_what_the_package_has(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("distflow"):
            continue
        module = importlib.import_module(node.module)
        for name in (alias.name for alias in node.names):
            if not hasattr(module, name):
                importlib.import_module(f"{node.module}.{name}")


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return lambda name: importlib.import_module(f"peers.{name}")


def test_prompts_are_the_same_as_ids_and_as_text(peers):
    work, parser = peers("work"), argparse.ArgumentParser()
    work.add_flags(parser)
    args = parser.parse_args(["--model=135m", "--steps=2"])
    first, second = work.prompt_ids(args)
    assert first.shape == second.shape == (8, 32) and (first != second).any()
    for row in first:
        text = work.as_text(row)
        assert work.as_ids(text.encode().decode()) == row.tolist() and len(text) == 32
    assert work.end_ids(512, 0.02) == list(range(502, 512)) and work.end_ids(512, 0) == []


def test_groups_have_the_lengths_that_their_names_say(peers):
    for name, shape in peers("groups").SHAPES.items():
        samples, tokens = (int(part.replace(",", "")) for part in name.split(" x "))
        draw = np.random.default_rng(0)
        lengths = np.array([shape.lengths(draw) for _ in range(2000)])
        assert lengths.shape[1] == samples and lengths.max() <= shape.most
        assert lengths.mean() == pytest.approx(tokens, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--defaults", "--beta=0.04"]])
def test_our_side_takes_steps(flags):
    sizes = ["--prompts=1", "--samples=2", "--prompt-length=4", "--new-tokens=4", "--steps=2"]
    shown = finished("benchmarks/grpo_step.py", *sizes, *flags).stdout.splitlines()
    steps = [json.loads(line.removeprefix("STEP ")) for line in shown if line.startswith("STEP ")]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["tokens"] == 8 and step["compilations"] == 0 < step["cpu_s"]
        assert 0 < step["update_s"] < step["step_s"]
