"""Runs whose reward runs programs in a sandbox that fails now and then.

Nightly: with a fifth of the sandbox's calls failing at random, steps are those of a run without
failures, and no response is left out; with workers, programs run in the sandbox of the host that
rewards, and nowhere else.
"""

import json
import os

import pytest
from support import haste
from support.paths import ROOT
from support.programs import finished
from support.worker_runs import STEPS, check_trained, trainers, worker

from distflow_jax.report.run_writer import read_metrics

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


@pytest.mark.slow
@pytest.mark.multiprocess
def test_programs_run_on_the_host_that_rewards(tmp_path, started):
    flags = (
        "data.train=task:programs?hints=1&shown=0&kinds=numbers",
        "data.max_prompt_length=512",
        "training.row_tokens=600",
        "rollout.environment=python",
        "rollout.max_turns=2",
        "rollout.turn_length=8",
        "reward.function=code",
        "reward.kwargs={}",
        "stream.worker_nodes=('reward','environment')",
    )
    folder = tmp_path / "run"
    job = trainers(started, folder, flags)
    sampler = worker(started, folder, flags)
    host = worker(started, folder, flags, own=("--nodes=reward,environment",))
    assert job.end() == 0, job.output() + sampler.output() + host.output()
    assert sampler.end() == 0 and host.end() == 0, sampler.output() + host.output()
    assert "sandbox: level" in host.output()
    assert "sandbox: level" not in job.output() + sampler.output()
    check_trained(folder, exact=False)
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]]
    assert len(rows) == STEPS
    for row in rows:
        assert row["environment/tool_calls"] >= 0 and not row.get("reward/not_scored")
