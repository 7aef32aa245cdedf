"""A server under attack: answers are those given alone, memory stays, small requests are fast.

benchmarks/serve_under_attack.py says what 12 threads send, and compares.

Nightly: a minute of aborts, garbage and large prompts: answers are those given alone, memory does
not grow.
"""

import os
import sys

import pytest
from support.paths import ROOT
from support.programs import finished

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="resident memory is read from /proc"
)


def attack(*flags, seconds):
    # compiled as a user's server is: code in a hurry would leave nothing to the attack
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = ("benchmarks/serve_under_attack.py", f"--seconds={seconds}", *flags)
    print(finished(*command, env=env, seconds=900 + 20 * seconds).stdout)


@pytest.mark.slow
def test_a_minute_of_attack():
    """No wrong answer, no other code, no growing memory (serving/, rollout/scheduling/)."""
    attack("--slice=5", "--most=inf", seconds=60)


@pytest.mark.soak
def test_ten_minutes_of_attack():
    """The same, and p99 of small requests at most twice that in peace."""
    attack(seconds=600)
