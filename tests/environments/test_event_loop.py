"""Calls of environments beside the sampler: how many at a time, their deadlines, and their end."""

import asyncio
import contextlib
import queue
import threading
import time

import numpy as np
import pytest
from support.late_calls import be_late, let_deadlines_pass
from support.turn_sampler import LIMITS, PROMPTS, TOKENIZER, Sampler
from support.waiting import HANG, until

from distflow_jax.environments import event_loop, handle
from distflow_jax.environments.environment import Turn
from distflow_jax.environments.event_loop import EventLoop, in_thread, stop_deadline
from distflow_jax.environments.failures import CallFailure
from distflow_jax.environments.handle import EnvironmentHandle
from distflow_jax.environments.multiturn import TurnDriver
from distflow_jax.environments.registry import CallLimits, Environments
from distflow_jax.environments.tools import Tools
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import Scheduler

TURN = np.zeros(1, np.int32)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    let_deadlines_pass(monkeypatch)
    Open.all.clear()


@contextlib.contextmanager
def environments_of(name, **settings):
    calls = CallLimits(HANG, **settings)
    environments = Environments(f"{__name__}:{name}", {}, TOKENIZER, calls=calls)
    try:
        yield environments
    finally:
        Held.go_on.set()
        environments.close()


def last(answers):
    """The next answer that no other try follows."""
    while not (answer := answers.get(timeout=HANG)).last:
        pass
    return answer.outcome


class Open:
    """Objects that are not closed."""

    all: set = set()

    def __init__(self, tokenizer):
        self.all.add(self)

    def reset(self, prompt):
        pass

    def close(self):
        self.all.remove(self)


class Together(Open):
    """Answers once 200 steps are at work."""

    steps, threads = 0, 0

    async def reset(self, prompt):
        pass

    async def step(self, tokens, text):
        Together.steps += 1
        while Together.steps < 200:
            await asyncio.sleep(0)
        Together.threads = max(Together.threads, threading.active_count())
        return Turn(done=True)

    async def close(self):
        super().close()


def test_hundreds_of_steps_are_under_way_in_one_thread():
    before, answers = threading.active_count(), queue.SimpleQueue()
    with environments_of("Together") as environments:
        handles = [EnvironmentHandle(environments, PROMPTS[0], answers) for _ in range(200)]
        for one in handles:
            one.reset()
            one.step(TURN)
        outcomes = [last(answers) for _ in range(400)]
        assert sum(outcome.done for outcome in outcomes) == 200
        assert Together.threads <= before + 1
    assert not Open.all and threading.active_count() == before


class Held(Open):
    """Steps wait until they may go on."""

    lock, going, most, begun = threading.Lock(), 0, 0, 0
    go_on = threading.Event()

    def step(self, tokens, text):
        with self.lock:
            Held.going += 1
            Held.begun += 1
            Held.most = max(Held.most, Held.going)
        self.go_on.wait(HANG)
        with self.lock:
            Held.going -= 1
        return Turn(done=True)


class Late(Held):
    """Steps are late, and go on for long."""

    def step(self, tokens, text):
        be_late()
        return super().step(tokens, text)


@pytest.fixture
def held(monkeypatch):
    for name, value in (("going", 0), ("most", 0), ("begun", 0), ("go_on", threading.Event())):
        monkeypatch.setattr(Held, name, value)
    yield Held
    Held.go_on.set()


def test_calls_that_block_have_so_many_threads_and_wait_for_them_without_harm(held):
    """The deadline is that of the call: 37 of 40 wait much longer for one of three threads."""
    answers = queue.SimpleQueue()
    with environments_of("Held", threads=3) as environments:
        handles = [EnvironmentHandle(environments, PROMPTS[0], answers) for _ in range(40)]
        for one in handles:
            one.reset()
        assert not any(last(answers).done for _ in range(40))
        for one in handles:
            one.step(TURN)
        until(lambda: held.going == 3)
        held.go_on.set()
        assert all(last(answers).done for _ in range(40))
        assert held.most == 3 and held.begun == 40
    assert not Open.all


def test_a_thread_that_hangs_leaves_its_place_to_another(held):
    answers = queue.SimpleQueue()
    with environments_of("Late", threads=2, retries=0) as environments:
        for _ in range(2):
            one = EnvironmentHandle(environments, PROMPTS[0], answers)
            one.reset()
            one.step(TURN)
        outcomes = [last(answers) for _ in range(4)]
        failed = [outcome for outcome in outcomes if isinstance(outcome, CallFailure)]
        assert [failure.cause for failure in failed] == ["timed_out"] * 2
        until(lambda: held.going == 2 == len(environments.loop.hung))
        environments.loop.check_hung()  # as many as there may be
        one = EnvironmentHandle(environments, PROMPTS[0], answers)
        one.reset()
        one.step(TURN)
        assert not isinstance(last(answers), CallFailure)  # the reset has a thread
        assert last(answers).cause == "timed_out"
        until(lambda: len(environments.loop.hung) == 3)
        with pytest.raises(RuntimeError, match="3 calls .*environment_threads=2; step hangs"):
            environments.loop.check_hung()
        assert len(Open.all) == 3  # an object is not closed while a call of it is at work
        held.go_on.set()
        until(lambda: not Open.all)
        until(lambda: not environments.loop.hung)


class Stubborn(Open):
    """Does not listen when it is cancelled."""

    async def step(self, tokens, text):
        while not Held.go_on.is_set():
            try:
                be_late()
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                pass
        return Turn(done=True)


def test_a_coroutine_that_does_not_listen_holds_up_nobody(held):
    answers = queue.SimpleQueue()
    with environments_of("Stubborn", retries=0) as environments:
        one = EnvironmentHandle(environments, PROMPTS[0], answers)
        one.reset()
        one.step(TURN)
        last(answers)
        assert last(answers).cause == "timed_out"
        assert len(Open.all) == 1
        held.go_on.set()
        until(lambda: not Open.all)


class Blocking(Open):
    """Blocks the loop."""

    async def step(self, tokens, text):
        Held.going += 1
        Held.go_on.wait(HANG)
        return Turn(done=True)


def test_what_blocks_the_loop_is_named(held):
    answers = queue.SimpleQueue()
    with environments_of("Blocking") as environments:
        one = EnvironmentHandle(environments, PROMPTS[0], answers)
        one.reset()
        environments.loop.take(answers)
        one.step(TURN)
        until(lambda: Held.going)
        environments.loop.seconds = 0.0  # that it may be blocked
        with pytest.raises(RuntimeError, match="has blocked the event loop") as told:
            environments.loop.take(answers)
        assert "test_event_loop.py" in str(told.value) and "go_on.wait" in str(told.value)
        held.go_on.set()


def test_a_stopped_deadline_runs_again_in_a_thread_with_what_was_left():
    async def call():
        stop_deadline()
        event_loop._CALL.get()._since -= 2 * HANG  # it has been stopped for so long
        await in_thread(time.sleep, 0.1)
        return 2

    loop = EventLoop(HANG, 1)
    with contextlib.closing(loop):
        assert loop.start(loop.call("step", call, pending=set())).result(HANG) == 2


# -- tools -----------------------------------------------------------------------------------------


def test_tools_may_await_and_only_a_value_error_is_the_models_mistake(tmp_path):
    file = tmp_path / "tools_that_await.py"
    file.write_text(
        "import asyncio, json\n"
        "async def wait(text):\n"
        "    await asyncio.sleep(0)\n"
        "    return text * 2\n"
        "async def refuse(text):\n"
        "    raise ValueError('no such city')\n"
        "def garbled(text):\n"
        "    return json.loads('<html>')\n"
        "def gone(text):\n"
        "    raise ConnectionError('refused')\n"
        "def raw(text):\n"
        "    return text.encode()\n"
        "def unread(text):\n"
        "    return [iter(text), wait(text).close()]\n"
    )
    names = ("wait", "refuse", "garbled", "gone", "raw", "unread")
    tools = {"sum": "calculator"} | {name: f"{file}:{name}" for name in names}

    def call(name):
        turn = TOKENIZER.encode(f'<tool name="{name}">1+1</tool>')
        answers = queue.SimpleQueue()
        environments = Environments("tools", {"tools": tools}, TOKENIZER, calls=CallLimits(HANG))
        with contextlib.closing(environments):
            one = EnvironmentHandle(environments, PROMPTS[0], answers)
            one.reset()
            one.step(turn)
            last(answers)
            outcome = last(answers)
        return outcome if isinstance(outcome, CallFailure) else TOKENIZER.decode(outcome.tokens)

    assert call("sum") == "<result>2</result>" and call("wait") == "<result>1+11+1</result>"
    assert call("refuse") == "<result>error: no such city</result>"
    assert call("garbled").error.startswith("tool 'garbled' raised json.decoder.JSONDecodeError")
    assert call("gone").error.startswith("tool 'gone' raised ConnectionError: refused")
    # an address would differ between two objects that are given the same turns
    for name, what in (("raw", "b'1+1' (bytes)"), ("unread", "[<str_ascii_iterator object at 0x")):
        assert f"tool {name!r} raised TypeError: it returned {what}" in call(name).error


def test_tools_work_without_a_run():
    tools = Tools(TOKENIZER, tools={"sum": "calculator"})
    tools.reset(PROMPTS[0])
    turn = asyncio.run(tools.step(TURN, "<tool>1+1</tool>"))
    assert turn.observation == "<result>2</result>"
    assert asyncio.run(in_thread(max, 1, 2)) == 2


# -- cancelling ------------------------------------------------------------------------------------


class Stays(Open):
    """Waits in the call that `at` says, for the prompt 1, or fails in it each time."""

    at, fails = "", False
    there = threading.Event()

    async def reset(self, prompt):
        self.counter = prompt.counter
        await self._stay("reset")

    async def step(self, tokens, text):
        await self._stay("step")
        return Turn("ab")

    async def close(self):
        super().close()

    async def _stay(self, call):
        if self.counter == 1 and call == self.at:
            self.there.set()
            if self.fails:
                raise ConnectionError("gone")
            await asyncio.Event().wait()


class StaysInThread(Stays):
    """The same, in a thread."""

    async def _stay(self, call):
        if self.counter == 1 and call == self.at:
            self.there.set()
            await in_thread(Held.go_on.wait, HANG)


def go_on(driver):
    """A round of a driver that does not wait: what it would wait for may never come."""
    driver.take_answers(wait=False)
    driver.step()


@pytest.fixture(scope="module")
def sampler():
    return Sampler(slots=4)


@pytest.mark.parametrize(
    ("state", "name", "at", "fails"),
    [
        ("waits for its reset", "Stays", "reset", False),
        ("waits for a thread's reset", "StaysInThread", "reset", False),
        ("waits for a slot", "Stays", "", False),
        ("decodes", "Stays", "", False),
        ("waits for its step", "Stays", "step", False),
        ("waits for a thread's step", "StaysInThread", "step", False),
        ("waits for its next try", "Stays", "step", True),
        ("waits for its next reset", "Stays", "reset", True),
    ],
)
def test_a_response_can_be_cancelled_whatever_it_is_at(
    sampler, held, monkeypatch, state, name, at, fails
):
    monkeypatch.setattr(Stays, "at", at)
    monkeypatch.setattr(Stays, "fails", fails)
    monkeypatch.setattr(Stays, "there", threading.Event())
    if fails:
        monkeypatch.setattr(handle, "PAUSE", HANG)
    scheduler = Scheduler(sampler.engine, sampler.state.params, state=sampler.state.decode)
    before = threading.active_count()
    with environments_of(name) as environments:
        driver = TurnDriver(scheduler, environments, None)
        sampling = SamplingParams(4, LIMITS.response)
        for index in (0, 1):
            driver.begin(index, GroupRequest(PROMPTS[index], sampling), {})

        def at_work():
            return [c for c in driver._by_handle.values() if c.group.index == 1]

        if at:
            until(lambda: go_on(driver) or Stays.there.is_set())
        elif state == "decodes":
            until(lambda: go_on(driver) or any(c.turns for c in at_work()))
        else:
            while any(c.id is None for c in at_work()):
                driver.take_answers(wait=True)
        driver.cancel(1)
        held.go_on.set()
        until(lambda: go_on(driver) or not driver.live)
        assert {index for index, _ in driver.done} == {0} and len(driver.done) == 4
        assert not scheduler.busy and scheduler.free_slots == 4 and not scheduler._loop.parked
        driver.close()
        until(lambda: not Open.all)  # also of what was cancelled
        loop = environments.loop
        until(lambda: not loop._work and not loop._ending and not loop.hung)
    until(lambda: threading.active_count() <= before)
    sampler.state = Sampler.emptied(sampler.state, scheduler)


@pytest.mark.parametrize("at", ["reset", "step"])
def test_closing_ends_what_is_at_work(sampler, held, monkeypatch, at):
    monkeypatch.setattr(Stays, "at", at)
    monkeypatch.setattr(Stays, "there", threading.Event())
    scheduler = Scheduler(sampler.engine, sampler.state.params, state=sampler.state.decode)
    before = threading.active_count()
    with environments_of("Stays") as environments:
        driver = TurnDriver(scheduler, environments, None)
        request = GroupRequest(PROMPTS[1], SamplingParams(4, LIMITS.response))
        driver.begin(0, request, {})
        until(lambda: go_on(driver) or Stays.there.is_set())
        assert Open.all  # nobody closes the driver: the environments do
    assert not Open.all
    until(lambda: threading.active_count() <= before)
    driver.close()  # nothing more to be done, and no error
    sampler.state = Sampler.emptied(sampler.state, scheduler)
