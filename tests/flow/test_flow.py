"""The groups of steps on one process, where something is missing: it is waited for, or named."""

import contextlib
import dataclasses
import sys
import threading
import time
import types

import numpy as np
import pytest
from support.plain_flow import BATCH, SAMPLES, TOKENS, owned, plain_flow
from support.waiting import HANG

from distflow_jax.flow import flow as flow_module
from distflow_jax.flow import sampling_thread
from distflow_jax.flow.evaluations import Evaluator
from distflow_jax.flow.flow import ALL, RegionRounds
from distflow_jax.flow.ledger import Ledger
from distflow_jax.flow.producer import Producer
from distflow_jax.flow.sampling_thread import SamplingThread
from distflow_jax.flow.waves.wave_taker import WaveTaker


def in_few_batches(counter):
    """One prompt of a batch: of the second one 9, of the third one 22."""
    return counter in (1, 9, 22)


def test_a_first_step_amid_a_batch_that_has_no_group_of_this_process(tmp_path):
    """After a restart steps need not begin with a batch: a process may own none of 13 to 20. A
    group of the next step says which fields there are."""
    draw = owned(first=13, mine=in_few_batches)
    flow = plain_flow(tmp_path, draw, step=3, counter=13, steps=5)
    store, metrics = flow.take(4)
    assert store.uid.shape == (0, 2) and store.columns["response"] == []
    assert {"prompt", "response", "response_mask"} <= store.columns.keys()
    assert metrics["ledger"].values and flow.finish(4) == 13 + BATCH
    flow.publish(np.zeros(1), 4)
    store, _ = flow.take(5)
    assert store.uid[:, 0].tolist() == [22] * SAMPLES
    flow.close()


@pytest.mark.parametrize("bounds", [{"steps": 4}, {"last": 2 * BATCH}], ids=str)
def test_a_process_without_a_group_in_all_that_is_left(tmp_path, bounds):
    """It does not wait for a step that will not come: the error names what would help."""
    draw = owned(first=13, mine=in_few_batches, last=bounds.get("last"))
    flow = plain_flow(tmp_path, draw, step=3, counter=13, **bounds)
    with pytest.raises(ValueError, match="no group of step 4, and none follows .* training.steps"):
        flow.take(4)
    flow.close()


def test_a_checkpoint_without_samples_has_the_account_of_all_tokens(tmp_path):
    """The account after a run's last step goes on as if the run had not ended there."""
    flow, whole = plain_flow(tmp_path, owned(), steps=2), BATCH * SAMPLES * TOKENS
    for step in (1, 2):
        flow.take(step)
        flow.finish(step)
        flow.publish(np.zeros(1), step)
    assert flow.saver.account() == Ledger(sampled=2 * whole, trained=2 * whole)
    flow.close()


def test_samples_that_such_a_checkpoint_lacks_are_lost(tmp_path):
    flow, whole = plain_flow(tmp_path, owned(), steps=9), BATCH * SAMPLES * TOKENS
    flow.take(1)
    flow.finish(1)
    flow.drive(lambda: flow.producer.counts().tokens == 2 * whole)
    saved = flow.saver.account()
    assert saved == Ledger(sampled=2 * whole, trained=whole)
    found = Ledger.restored([saved.to_dict()], known=0)
    assert found == dataclasses.replace(saved, lost=whole)
    flow.close()


def owing(folder, evaluator=None, until=None):
    """A flow with swaps at boundaries that has trained step 1; its checkpoint waits for step 2."""
    how = {"swap": "boundary", "own_devices": True, "evaluator": evaluator, "until": until}
    flow = plain_flow(folder, owned(), steps=9, **how)
    flow.take(1)
    flow.finish(1)
    flow.publish(np.zeros(1), 1)
    flow.save(1)
    return flow


def evaluator(answer):
    return Evaluator(lambda version: True, answer, lambda answers: [], contextlib.nullcontext)


def test_an_error_of_a_group_that_a_checkpoint_waits_for(tmp_path):
    """It ends the wait of a run that was told to end: the time is not spent in vain."""

    def until(columns):
        if columns["uid"][0, 0] >= BATCH:
            raise RuntimeError("no verdict today")
        return np.ones(len(columns["uid"]), bool)

    flow = owing(tmp_path, until=until)
    with pytest.raises(RuntimeError, match="no verdict today"):
        flow.end_saving(time.monotonic() + HANG)
    flow.close()


def test_an_error_of_the_sampler_ends_the_wait_for_a_steps_last_wave(tmp_path, monkeypatch):
    """Verdicts of its groups come from the sampler's thread: without it none is known."""

    def broken(self, end):
        raise RuntimeError("no verdict today")

    monkeypatch.setattr(RegionRounds, "known", broken)
    how = {"swap": "boundary", "own_devices": True}
    flow = plain_flow(tmp_path, owned(), until=lambda columns: columns["uid"][:, 0] >= 0, **how)
    cut = flow.producer.admission.cut(1)
    source = types.SimpleNamespace(planner=types.SimpleNamespace(step=1, cut=cut))
    with pytest.raises(RuntimeError, match="no verdict today"):
        WaveTaker(flow, source, None).end()
    flow.close()


def test_a_run_that_ends_waits_for_its_evaluations_until_its_time_is_over(tmp_path):
    """One that is late is not recorded, and ends when one of its responses has ended."""
    begun = threading.Event()

    def answer(state, heard):
        begun.set()
        for _ in range(100 * int(HANG)):
            time.sleep(0.01)
            heard(None)
        raise AssertionError("the evaluation went on")

    flow = owing(tmp_path, evaluator(answer))
    assert begun.wait(HANG)
    assert flow.evaluated(0, end=time.monotonic()) is None
    flow.end_saving(time.monotonic())
    assert not flow.saver.settled
    thread = flow._sampling
    flow.close()
    thread.raise_error()


def test_a_run_that_ends_begins_no_later_evaluation(tmp_path, monkeypatch):
    """The checkpoint of step 1 waits for the evaluation of version 0, then for step 2."""
    made, ends, end_with = [], threading.Event(), SamplingThread.end_with

    def told(self, version):
        end_with(self, version)
        ends.set()

    def answer(state, heard):
        made.append(state)
        assert ends.wait(HANG)
        return state, []

    monkeypatch.setattr(SamplingThread, "end_with", told)
    flow = owing(tmp_path, evaluator(answer))
    (found,) = flow.evaluated(0, end=time.monotonic() + HANG)
    assert found.version == 0
    flow.saver.recorded(0)
    flow.drive(lambda: flow.saver.settled, needs=ALL)
    flow.close()
    flow.saver._writer.close()  # its thread waits for the checkpoint, which nobody writes here
    assert len(made) == 1


def test_what_a_wait_for_evaluations_is_told_of(tmp_path, monkeypatch):
    """The watchdog hears which one is missing; of groups behind it in the thread of rewards too."""
    monkeypatch.setattr(flow_module, "NOTE_SECONDS", HANG)  # it is told once
    goes_on, scoring, notes = threading.Event(), threading.Event(), []

    def score(answers):
        scoring.set()
        assert goes_on.wait(HANG)
        return []

    made = dataclasses.replace(evaluator(lambda state, heard: (state, [])), score=score)
    flow = plain_flow(
        tmp_path, owned(), swap="boundary", own_devices=True, evaluator=made, note=notes.append
    )
    assert scoring.wait(HANG)

    def note(text):
        notes.append(text)
        goes_on.set()

    object.__setattr__(flow._observer, "note", note)
    flow.evaluated(0)
    assert notes == ["evaluation of step 0"]
    flow.close()


@contextlib.contextmanager
def eager_threads():
    """A block in which threads switch at each chance."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("swap", ["in_flight", "boundary"])
def test_no_round_runs_while_a_sampler_rests(tmp_path, monkeypatch, swap):
    """With an order too: the arrays of the sampler are those of the thread that rests it."""
    resting, caught, begun, whole = threading.Event(), [], threading.Event(), Producer.round

    def round(self):
        begun.set()
        time.sleep(0.002)
        caught.extend([1] if resting.is_set() else [])
        return whole(self)

    monkeypatch.setattr(Producer, "round", round)
    with eager_threads():
        flow = plain_flow(tmp_path, owned(), own_devices=True, lag=9, swap=swap)
        assert begun.wait(HANG)
        for _ in range(4):  # amid 80 rounds
            with flow.at_rest(0):
                resting.set()
                time.sleep(0.02)  # for ten rounds of one that does not rest
                resting.clear()
    flow.close()
    assert not caught


def test_a_sampler_is_left_to_a_thread_that_does_not_end(tmp_path, monkeypatch):
    """It has the sampler's arrays as long as it is amid a round."""
    begun, goes_on, closed, whole = threading.Event(), threading.Event(), [], Producer.round

    def round(self):
        begun.set()
        assert goes_on.wait(HANG)
        return whole(self)

    monkeypatch.setattr(Producer, "round", round)
    monkeypatch.setattr(sampling_thread, "JOIN_SECONDS", 0.0)
    flow = plain_flow(tmp_path, owned(), own_devices=True)
    monkeypatch.setattr(flow.producer.sampler, "close", lambda: closed.append(True))
    assert begun.wait(HANG)
    flow.close()
    assert not closed
    goes_on.set()
    monkeypatch.setattr(sampling_thread, "JOIN_SECONDS", 60.0)
    flow.close()
    assert closed
