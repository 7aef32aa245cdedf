"""Asynchronous runs of which a reward hangs or raises: told by name, in the step that needs it.

Nightly: a reward that hangs or raises ahead of the training is told by name, in the step that needs
it.
"""

import json
import re

import pytest
from support.paths import ROOT
from support.programs import train
from support.tiny_config import SMALL_AHEAD

from distflow_jax.report.run_writer import read_metrics

FUNCTIONS = ROOT / "tests" / "support" / "late_rewards.py"
SMALL = (
    *SMALL_AHEAD,
    "training.steps=6",
    "stream.max_staleness=1",
    "eval.dataset=",
    "reward.num_workers=1",
)
ENOUGH = 50  # calls of one step of 8 x 4 responses, and some of the next


def run_until_it_ends(folder, name, *flags, processes=1, devices=1, script="scripts/train.py"):
    kwargs = json.dumps({"calls": str(folder / "calls"), "enough": ENOUGH})
    keys = (*SMALL, f"reward.function={FUNCTIONS}:{name}", f"reward.kwargs={kwargs}", *flags)
    size = {"processes": processes, "devices": devices}
    done = train(folder / "run", keys, program=script, codes=None, **size)
    return done.returncode, done.stdout + done.stderr


def steps_of(folder):
    return [row["step"] for row in read_metrics(folder / "run" / "metrics.jsonl")]


def stuck(text, node, phases="wait_for_samples"):
    """(process, step, phase, prompt) of what the watchdog says of a group that a node lacks."""
    found = re.search(
        r"no progress since [\d:]+: process (\d) (?:is behind,|stuck) at step (\d) in node "
        rf"'({phases}): {node} of prompt (\d+)'",
        text,
    )
    assert found, [line for line in text.splitlines() if "progress" in line or "is at step" in line]
    return int(found[1]), int(found[2]), found[3], int(found[4])


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("processes", [1, 2])
def test_a_reward_that_hangs_is_named_with_its_group(tmp_path, processes):
    """Watchdogs name the process that waits for it, the node and the prompt; others wait."""
    deadlines = ("reward.timeout_seconds=3600", "health.dead_seconds=30", "health.stuck_seconds=45")
    code, text = run_until_it_ends(tmp_path, "hangs_once", *deadlines, processes=processes)
    assert code not in (0, 75)
    process, step, _, prompt = stuck(text, "reward")
    assert step - 1 == prompt // 8 and steps_of(tmp_path) == list(range(1, step))
    if processes == 2:
        assert f"at step {step} in node 'wait_for_samples: other processes'" in text
    assert re.search(rf"watchdog {process}: .*in reward\b", text)  # the stack of the thread


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "every, phase", [(100, "wait_for_samples"), (1, "save_checkpoint|wait_for_samples")]
)
def test_a_sampler_that_hangs_is_named_with_its_oldest_group(tmp_path, every, phase):
    """On devices of its own; steps whose groups it has finished are trained, and a checkpoint,
    which has the responses under way, waits for it too."""
    deadlines = ("health.dead_seconds=30", "health.stuck_seconds=45", f"checkpoint.every={every}")
    part = ("mesh.devices=0:1", "mesh.roles={'ROLLOUT': {'devices': '1:2'}}")
    code, text = run_until_it_ends(
        *(tmp_path, "raises_later", *deadlines, *part),
        f"reward.kwargs={{'calls': '{tmp_path / 'calls'}', 'enough': 1000000}}",
        devices=2,
        script="tests/support/hung_sampler.py",
    )
    assert code not in (0, 75)
    _, step, waits, prompt = stuck(text, "rollout", phase)
    # a checkpoint of step s has responses of step s + 1, or of s + 2 where those have ended
    steps = (step, step + 1) if waits == "save_checkpoint" else (step - 1,)
    assert step >= 2 and prompt // 8 in steps
    assert steps_of(tmp_path) == list(range(1, step + (waits == "save_checkpoint")))
    assert re.search(r"watchdog 0: .*in hanging\b", text)  # the stack of the sampler's thread


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_reward_that_raises_ends_the_step_that_needs_it(tmp_path):
    code, text = run_until_it_ends(tmp_path, "raises_later")
    assert code not in (0, 75)
    assert "rewards failed" in text and "KeyError: 'no such answer'" in text
    steps = steps_of(tmp_path)
    assert steps and steps == list(range(1, len(steps) + 1)) and len(steps) < 6
