"""Environments that fail: tries, responses that are drawn anew, and what leaves its group.

Nightly: without another try, too, steps that fail end a run whose resets succeed.
"""

import asyncio
import contextlib
import logging
import math
import random
import threading

import numpy as np
import pytest
from support.late_calls import be_late, let_deadlines_pass
from support.turn_sampler import PROMPTS, STOP_IDS, TOKENIZER, Sampler, assert_agree
from support.waiting import HANG

from distflow_jax.environments.environment import Turn
from distflow_jax.environments.episodes import episode_metrics, episode_sums, turn_columns
from distflow_jax.environments.failures import CallFailure, Failures
from distflow_jax.environments.handle import check_environments
from distflow_jax.environments.multiturn import REDRAWS, TurnLimits
from distflow_jax.environments.registry import CallLimits, Environments

HERE = __name__
LONG = TurnLimits(response=90, turn=90, turns=4)  # few turns are cut
PATIENT = {"calls": CallLimits(HANG, threads=1000, max_infra_rate=1.0)}  # a run that nothing ends


@pytest.fixture(scope="module")
def sampler():
    return Sampler()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    let_deadlines_pass(monkeypatch)
    Counted.open.clear()
    Counted.made = 0


def metrics_of(episodes):
    return episode_metrics([episode_sums(list(episodes.values()))], 1)


class Counted:
    """Objects that are open; made and closed from any thread."""

    open: set = set()
    made = 0
    lock = threading.Lock()

    def __init__(self, tokenizer):
        with self.lock:
            Counted.made += 1
            self.open.add(self)

    def reset(self, prompt):
        self.counter = prompt.counter

    def close(self):
        with self.lock:
            self.open.remove(self)


# -- environments that always fail for one prompt --------------------------------------------------


class Faulty(Counted):
    """Goes wrong for the prompt that `counter` says, each time."""

    goes_on = threading.Event()  # what hangs waits for it

    def __init__(self, tokenizer, *, where, how, counter=1):
        super().__init__(tokenizer)
        self.where, self.how, self.bad = where, how, counter

    def reset(self, prompt):
        super().reset(prompt)
        return self._maybe("reset")

    def step(self, tokens, text):
        return self._maybe("step") or Turn(done=True, reward=1.0)

    def _maybe(self, where):
        if self.counter == self.bad and self.where == where:
            if self.how == "raise":
                raise KeyError("no such room")
            if self.how == "exit":
                raise {"reset": SystemExit, "step": KeyboardInterrupt}[where](3)
            if self.how == "stop":
                raise StopIteration
            if self.how == "hang":
                be_late()
                self.goes_on.wait(HANG)
            return "nothing like a turn" if where == "step" else 7


class AsyncFaulty(Faulty):
    """The same, awaited."""

    async def reset(self, prompt):
        Counted.reset(self, prompt)
        return await self._wrong("reset")

    async def step(self, tokens, text):
        return await self._wrong("step") or Turn(done=True, reward=1.0)

    async def close(self):
        super().close()

    async def _wrong(self, where):
        await asyncio.sleep(0)
        if self.how != "hang" or self.counter != self.bad or where != self.where:
            return self._maybe(where)
        be_late()
        await asyncio.Event().wait()


@pytest.fixture
def released(monkeypatch):
    """Hanging calls continue when the environments are closed."""
    close = Environments.close
    monkeypatch.setattr(Faulty, "goes_on", threading.Event())

    def release(environments):
        Faulty.goes_on.set()
        close(environments)

    monkeypatch.setattr(Environments, "close", release)


@pytest.mark.parametrize("name", ["Faulty", "AsyncFaulty"])
@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("how", ["raise", "exit", "stop", "return", "hang"])
def test_a_response_whose_environment_never_answers_leaves_its_group(
    sampler, caplog, name, where, how, released
):
    with caplog.at_level(logging.WARNING, logger="distflow_jax"):
        episodes = sampler.run(f"{HERE}:{name}", LONG, where=where, how=how, settings=PATIENT)
    for (counter, _), episode in episodes.items():
        cut = episode.turns == 1 and episode.response.tokens[-1] not in STOP_IDS
        assert len(episode.response.tokens) > 0 and episode.mask.all()
        if counter == 1:
            assert episode.reason == "failed" or (where == "step" and cut)
            assert math.isnan(episode.reward) == (episode.reason == "failed")
            assert not episode.response.finished
        else:
            assert episode.reason == ("turn_length" if cut else "done")
            assert episode.reward == (0.0 if cut else 1.0)
    metrics = metrics_of(episodes)
    cause = "timed_out" if how == "hang" else "raised"
    failed = sum(e.reason == "failed" for e in episodes.values())
    redrawn = metrics["environment/infra/redrawn"]
    assert failed >= 2 and metrics["environment/infra/unscored"] == failed
    assert redrawn >= failed * REDRAWS and metrics[f"environment/infra/{cause}"] >= 3 * redrawn
    assert not Counted.open and Counted.made > 16
    # all failed alike, one is told of, with its traceback, and the number at the end
    first, *others = [r.getMessage() for r in caplog.records]
    assert len(others) == 1 and f"{int(metrics[f'environment/infra/{cause}'])} x" in others[0]
    if how == "raise":
        assert "KeyError: 'no such room'" in first and "test_failing_calls.py, line" in first
        assert "Traceback" in first


# -- failures that pass ----------------------------------------------------------------------------


class Steady(Counted):
    """Repeats the middle of a turn backwards; it counts its turns, as a game would."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.turns = 0

    def step(self, tokens, text):
        self.turns += 1
        return Turn(tokens[-2:0:-1], reward=self.turns, logged={"turns": 1})


class Unsteady(Steady):
    """Fails in calls that `fails` says, by their number; half of them after a change of state."""

    fails = staticmethod(lambda call: False)
    late = False
    calls = 0

    def reset(self, prompt):
        super().reset(prompt)
        self._maybe()

    def step(self, tokens, text):
        turn = super().step(tokens, text)
        self._maybe()
        return turn

    def _maybe(self):
        with self.lock:
            number = Unsteady.calls = Unsteady.calls + 1
            fails = Unsteady.fails(number)
        if fails and self.late:
            be_late()
            Faulty.goes_on.wait(HANG)
        elif fails:
            raise ConnectionError("the sandbox is gone")


class AsyncUnsteady(Unsteady):
    async def reset(self, prompt):
        await asyncio.sleep(0)
        return super().reset(prompt)

    async def step(self, tokens, text):
        await asyncio.sleep(0)
        return super().step(tokens, text)


@pytest.fixture
def failing(monkeypatch):
    """Sets which calls of Unsteady fail."""

    def fail(fails, late=False):
        monkeypatch.setattr(Unsteady, "calls", 0)
        monkeypatch.setattr(Unsteady, "late", late)
        monkeypatch.setattr(Unsteady, "fails", staticmethod(fails))

    return fail


@pytest.fixture(scope="module")
def steady(sampler):
    return sampler.run(f"{HERE}:Steady")


def assert_alike(got, wanted, keys=None):
    for uid in wanted if keys is None else keys:
        assert got[uid].reason == wanted[uid].reason
        assert got[uid].reward == wanted[uid].reward and got[uid].turns == wanted[uid].turns
        assert got[uid].logged.get("turns") == wanted[uid].logged.get("turns")
    keys = wanted if keys is None else keys
    assert_agree({uid: got[uid] for uid in keys}, {uid: wanted[uid] for uid in keys})


@pytest.mark.parametrize("name", ["Unsteady", "AsyncUnsteady"])
@pytest.mark.parametrize("late", [False, True])
def test_a_try_that_failed_leaves_no_trace(sampler, steady, failing, name, late, released):
    """A call that changes its object and fails: a new object answers, and nothing shows."""
    if late and name == "AsyncUnsteady":
        return  # it would block the loop
    failing(lambda call: call % 19 == 0, late)
    got = sampler.run(f"{HERE}:{name}", settings=PATIENT)
    metrics = metrics_of(got)
    assert metrics[f"environment/infra/{'timed_out' if late else 'raised'}"] >= 2
    assert metrics["environment/infra/redrawn"] == 0
    assert_alike(got, steady)
    assert not Counted.open


@pytest.mark.parametrize("name", ["Unsteady", "AsyncUnsteady"])
def test_a_batch_has_no_failed_response_if_a_fifth_of_the_calls_fail(
    sampler, steady, failing, name
):
    """Responses that were not drawn anew equal those of a run without a failure."""
    rng = random.Random(5)
    failing(lambda call: rng.random() < 0.2)
    got = sampler.run(f"{HERE}:{name}")
    metrics = metrics_of(got)
    assert metrics["environment/infra/unscored"] == 0
    assert metrics["environment/infra/raised"] > 10 and metrics["environment/infra/redrawn"] > 0
    kept = [uid for uid, e in got.items() if "infra/redrawn" not in e.logged]
    assert_alike(got, steady, kept)
    drawn = [uid for uid in got if uid not in kept]
    assert drawn and all(np.isfinite(got[uid].reward) for uid in drawn)
    columns = turn_columns(list(got.values()))
    assert np.isfinite(columns["environment_reward"]).all() and len(columns["response"]) == 16
    assert not Counted.open


def test_a_run_ends_with_the_cause_if_most_calls_fail(sampler, failing):
    rng = random.Random(5)
    failing(lambda call: rng.random() < 0.6)
    with pytest.raises(RuntimeError) as told:
        sampler.run(f"{HERE}:Unsteady")
    message = str(told.value)
    assert "rollout.max_infra_rate=0.5" in message and f"environment '{HERE}:Unsteady'" in message
    assert "ConnectionError: the sandbox is gone" in message and "raised " in message
    assert not Counted.open
    sampler.state = Sampler().state  # its slots are not free


class Deaf(Counted):
    """Fails in each step, and in no reset."""

    def step(self, tokens, text):
        raise ConnectionError("the sandbox is gone")


@pytest.mark.parametrize("retries", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_resets_that_succeed_hide_no_steps_that_fail(sampler, retries):
    limits = {"calls": CallLimits(HANG, retries=retries)}
    with pytest.raises(RuntimeError, match=r"(\d+) of the last \1 steps of environment .*:Deaf'"):
        sampler.run(f"{HERE}:Deaf", settings=limits)
    assert not Counted.open
    sampler.state = Sampler().state  # its slots are not free


def test_what_is_drawn_anew_is_the_same_each_time(sampler):
    """By a key of its own: the number in the group plus a multiple of the group's size."""
    found = [sampler.run(f"{HERE}:Choosy", settings=PATIENT) for _ in range(2)]
    assert_agree(found[0], found[1])
    steady = sampler.run(f"{HERE}:Choosy", where=-1)
    redrawn = [uid for uid, e in found[0].items() if e.logged.get("infra/redrawn")]
    assert redrawn and {counter for counter, _ in redrawn} == {2}
    for uid, episode in found[0].items():
        same = episode.response.tokens.tolist() == steady[uid].response.tokens.tolist()
        assert same == (uid not in redrawn) and episode.response.sample == uid[1]
        assert episode.reason in ("done", "turn_length")


class Choosy(Counted):
    """Fails after turns to one prompt whose ids have an odd sum."""

    def __init__(self, tokenizer, *, where=2):
        super().__init__(tokenizer)
        self.where = where

    def step(self, tokens, text):
        if self.counter == self.where and tokens.sum() % 2:
            raise ConnectionError("refused")
        return Turn(done=True)


# -- what a new object must do ---------------------------------------------------------------------


class Whimsical(Unsteady):
    """Answers anew in each object."""

    def step(self, tokens, text):
        super().step(tokens, text)
        return Turn(f"{random.random():.6f}")


class Repeatable(Whimsical):
    repeatable = True

    def reset(self, prompt):
        Counted.reset(self, prompt)


def test_a_new_object_that_answers_otherwise_does_not_go_on_with_the_response(sampler, failing):
    failing(lambda call: call % 23 == 0)
    metrics = metrics_of(sampler.run(f"{HERE}:Whimsical"))
    assert metrics["environment/infra/diverged"] > 0 == metrics["environment/infra/unscored"]
    assert not Counted.open


def test_one_that_is_repeatable_is_asked_again_itself(sampler, failing):
    failing(lambda call: call % 7 == 0)
    metrics = metrics_of(sampler.run(f"{HERE}:Repeatable"))
    assert metrics["environment/infra/raised"] > 3 and metrics["environment/infra/diverged"] == 0
    assert metrics["environment/infra/redrawn"] == 0
    assert Counted.made == 16


# -- rates -----------------------------------------------------------------------------------------


def test_the_rate_is_of_the_last_calls():
    failure = CallFailure("timed_out", "late", "late")
    failures = Failures("game", 0.5)
    for _ in range(63):
        failures.count("step", failure)  # too few to say
        failures.count("reset", None)  # says nothing about steps
    with pytest.raises(RuntimeError, match="64 of the last 64 steps of environment 'game' failed"):
        failures.count("step", failure)
    failures = Failures("game", 0.5)
    for _ in range(300):
        failures.count("step", None)
    for _ in range(128):  # of the last 256 half
        failures.count("step", failure)
    with pytest.raises(RuntimeError, match=r"129 of the last 256 .*\(timed_out 129\)"):
        failures.count("step", failure)


class Blocking:
    def __init__(self, tokenizer):
        pass

    async def reset(self, prompt):
        Faulty.goes_on.wait(HANG)

    step = reset


def test_environments_are_tried_before_the_run(released):
    def check(name, timeout=HANG, **kwargs):
        environments = Environments(name, kwargs, TOKENIZER, calls=CallLimits(timeout))
        with contextlib.closing(environments):
            check_environments(environments, PROMPTS[1])

    with pytest.raises(ValueError, match="(?s)an environment has blocked .* in reset"):
        check(f"{HERE}:Blocking", 0.2)
    check("calculator")
    with pytest.raises(ValueError, match="failed on the first row: .*KeyError: 'no such room'"):
        check(f"{HERE}:Faulty", where="reset", how="raise")
    with pytest.raises(ValueError, match="reset gave no answer within rollout.environment_timeout"):
        check(f"{HERE}:Faulty", where="reset", how="hang")
    with pytest.raises(ValueError, match="an observation must be text, token ids"):
        check(f"{HERE}:Faulty", where="reset", how="return")
    with pytest.raises(ValueError, match="environment_kwargs={'wher': 1} do not fit .*Faulty"):
        check(f"{HERE}:Faulty", wher=1)
    with pytest.raises(ValueError, match="has no method 'reset'"):
        check(f"{HERE}:Sampler")
    with pytest.raises(ValueError, match="unknown rollout.environment 'calcuator'; did you mean"):
        check("calcuator")
