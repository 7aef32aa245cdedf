"""No program leaves its sandbox: more than 100 attempts, at every level, as root and as a user.

Each attempt is a real one: outside of the sandbox the same code gets through, wherever that does no
harm. Programs that take all of something, or will not end, end at their limits, and nothing of them
is left. The hosts run in processes of their own (support/sandbox_host.py), one for each user.
"""

import json
import os
import subprocess
import sys
import tempfile

import pytest
from support import escapes, greedy_programs
from support.paths import TESTS
from support.waiting import HANG

from distflow_jax.config.sandbox_config import LEVELS
from distflow_jax.sandbox import system_calls

pytestmark = pytest.mark.skipif(bool(system_calls.unsupported()), reason=system_calls.unsupported())
USERS = ["root", "user"] if os.geteuid() == 0 else ["user"]


@pytest.fixture(scope="module")
def found():
    """{user: what its host has found}."""
    # not below pytest's folders, which are closed to other users
    with tempfile.TemporaryDirectory(prefix="distflow-hosts-") as folder:
        os.chmod(folder, 0o777)
        hosts = {}
        for user in USERS:
            command = [sys.executable, str(TESTS / "support" / "sandbox_host.py"), user, folder]
            hosts[user] = subprocess.Popen(command, stdout=subprocess.PIPE)
        return {user: json.loads(host.communicate(timeout=HANG)[0]) for user, host in hosts.items()}


def levels(found):
    """(user, level, its results) of all levels that this machine has."""
    for user, told in found.items():
        yield from ((user, level, told[level]) for level in LEVELS if isinstance(told[level], dict))


def test_users_are_root_and_another(found):
    assert {user: told["user"] == 0 for user, told in found.items()} == {
        user: user == "root" for user in USERS
    }


def test_every_user_has_a_level_here(found):
    assert {user for user, _, _ in levels(found)} == set(USERS), found


@pytest.mark.parametrize("name", escapes.ATTEMPTS)
def test_attempt_is_stopped(found, name):
    said = {(user, level): told["escapes"][name] for user, level, told in levels(found)}
    for place, text in said.items():
        # a 32-bit call ends the process: SIGSYS
        assert text.startswith("stopped: ") or text == "signal -31", (place, text)
        assert "THROUGH" not in text, (place, text)


X86 = [name for name in escapes.ATTEMPTS if name not in escapes.OF_X86 or os.uname()[4] == "x86_64"]


@pytest.mark.parametrize("name", [name for name in X86 if escapes.ATTEMPTS[name].outside])
def test_attempt_is_real(found, name):
    """Outside it gets through, as root at least."""
    by = ["root"] if escapes.ATTEMPTS[name].outside == escapes.BY_ROOT else USERS
    said = {user: found[user]["outside"][name] for user in by if user in found}
    assert [text for text in said.values() if not text.endswith("THROUGH")] == []


def test_world_outside_has_not_changed(found):
    assert {(user, level): told["escapes"][""] for user, level, told in levels(found)} == {
        (user, level): "" for user, level, _ in levels(found)
    }


@pytest.mark.parametrize("name", greedy_programs.PROGRAMS)
def test_greedy_program_ends(found, name):
    program, limits = greedy_programs.PROGRAMS[name], greedy_programs.LIMITS
    for user, level, told in levels(found):
        outcome = told["greedy"][name]
        assert outcome["cause"] in program.causes, (user, level, outcome)
        assert program.exit_code in (None, outcome["exit_code"]), (user, level, outcome)
        assert outcome["stdout"] <= limits.output


def test_signals_to_init_end_nothing(found):
    """They would fail the sandbox, and a program chooses its outcome by no failure of that."""
    assert {told["init"] for told in found.values()} <= {"ended", ""}


def test_nothing_is_left(found):
    left = {(user, level): told["greedy"][""]["left"] for user, level, told in levels(found)}
    assert set(map(tuple, left.values())) == {()}, left
    assert {user: told["left"] for user, told in found.items()} == {user: [] for user in USERS}


def test_at_least_60_attempts():
    assert len(escapes.ATTEMPTS) + len(greedy_programs.PROGRAMS) >= 100
