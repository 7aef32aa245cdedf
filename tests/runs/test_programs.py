"""Runs whose reward runs programs in a sandbox that fails now and then.

Nightly: with a fifth of the sandbox's calls failing at random, steps are those of a run without
failures, and no response is left out.
"""

import json
import os

import pytest
from support import haste
from support.paths import ROOT
from support.programs import finished

FAILING = """
import os, random, sys

if any("worker_main" in argument for argument in sys.orig_argv):
    from distflow_jax.sandbox.sandbox import Sandbox
    from distflow_jax.sandbox.sandbox_records import SandboxError

    draw = random.Random(os.getpid())

    def failing(call):
        def may_fail(self, program):
            if self.level and draw.random() < 0.2:  # not in its attack on itself
                with open(os.environ["FAILURES"], "a") as file:
                    file.write("x")
                raise SandboxError("at random")
            return call(self, program)

        return may_fail

    Sandbox.run, Sandbox.open = failing(Sandbox.run), failing(Sandbox.open)
"""
SMALL = [
    *("data.prompts_per_step=4", "rollout.num_samples=4", "training.steps=2", "eval.dataset="),
]
TIMES = ("perf/", "timing_s/", "timing_per_token_ms/", "memory/", "system/")


def steps(folder, env):
    keys = [f"--config.{key}" for key in SMALL]
    finished("scripts/train.py", "--config=programs_smollm2", f"--workdir={folder}", *keys, env=env)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(TIMES) and k != "time"}
        for line in lines
    ]


@pytest.mark.slow
def test_failures_of_the_sandbox_change_no_step(tmp_path):
    hooks, count = tmp_path / "hooks", tmp_path / "failures"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(FAILING)
    count.touch()
    env = haste.environment()
    path = os.pathsep.join((str(hooks), str(ROOT), env.get("PYTHONPATH", "")))
    whole = steps(tmp_path / "whole", env)
    failing = steps(tmp_path / "failing", env | {"PYTHONPATH": path, "FAILURES": str(count)})
    assert len(count.read_text()) > 10
    assert failing == whole and any(one.get("critic/score/mean", 0) > 0 for one in whole)
