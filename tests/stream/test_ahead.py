"""The groups of steps on one process, where something is missing: it is waited for, or named."""

import contextlib
import dataclasses
import sys
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
from support.plain_stream import BATCH, SAMPLES, TOKENS, owned, plain_stream, train
from support.waiting import HANG

from distflow_jax.cluster.background_gather import BackgroundGather
from distflow_jax.stream import driver, sampling_side
from distflow_jax.stream.driver import ALL, TrainerCalls
from distflow_jax.stream.evaluations import NOTHING_EVALUATED, Evaluator
from distflow_jax.stream.links.local_link import OrderedLink
from distflow_jax.stream.producer import Producer
from distflow_jax.stream.region_rounds import RegionRounds
from distflow_jax.stream.resume import TokenAccount


def in_few_batches(counter):
    """One prompt of a batch: of the second one 9, of the third one 22."""
    return counter in (1, 9, 22)


@pytest.fixture
def beside_another(monkeypatch):
    """Another process has all prompts that this one has not, and is done with them."""
    rows = [[c, 0, [], 0, 0, True] for c in range(4 * BATCH) if not in_few_batches(c)]
    begin = BackgroundGather.begin

    def with_another(self, value):
        begun = begin(self, value)
        both = Future()
        both.set_result([*begun.result(), [False, [], rows]])
        return both

    monkeypatch.setattr(BackgroundGather, "begin", with_another)


def test_a_first_step_amid_a_batch_that_has_no_group_of_this_process(tmp_path, beside_another):
    """After a restart steps need not begin with a batch: a process may own none of 13 to 20. A
    group of the next step says which fields there are."""
    draw = owned(first=13, mine=in_few_batches)
    stream = plain_stream(tmp_path, draw, step=3, counter=13, steps=5)
    store, metrics, end = train(stream, 4)
    assert store.uid.shape == (0, 2) and store.columns["response"] == []
    assert {"prompt", "response", "response_mask"} <= store.columns.keys()
    assert metrics["account"].values and end == 13 + BATCH
    stream.update_weights(4)
    store, *_ = train(stream, 5)
    assert store.uid[:, 0].tolist() == [22] * SAMPLES
    stream.close()


@pytest.mark.parametrize("bounds", [{"steps": 4}, {"last": 2 * BATCH}], ids=str)
def test_a_process_without_a_group_in_all_that_is_left(tmp_path, beside_another, bounds):
    """It does not wait for a step that will not come: the error names what would help."""
    draw = owned(first=13, mine=in_few_batches, last=bounds.get("last"))
    stream = plain_stream(tmp_path, draw, step=3, counter=13, **bounds)
    with pytest.raises(ValueError, match="no group of step 4, and none follows .* training.steps"):
        train(stream, 4)
    stream.close()


def test_a_checkpoint_without_samples_has_the_account_of_all_tokens(tmp_path):
    """The account after a run's last step goes on as if the run had not ended there."""
    stream, whole = plain_stream(tmp_path, owned(), steps=2), BATCH * SAMPLES * TOKENS
    for step in (1, 2):
        train(stream, step)
        stream.update_weights(step)
    assert stream.saver.total_account() == TokenAccount(trained=2 * whole)
    stream.close()


def test_samples_that_such_a_checkpoint_lacks_are_lost(tmp_path):
    stream, whole = plain_stream(tmp_path, owned(), steps=9), BATCH * SAMPLES * TOKENS
    train(stream, 1)
    stream.driver.wait_until(lambda: stream.producer.under_way == whole)
    assert stream.saver.total_account() == TokenAccount(trained=whole, lost=whole)
    stream.close()


def owing(folder, evaluator=NOTHING_EVALUATED, until=None):
    """A source with weight updates at boundaries that has trained step 1; its checkpoint waits for
    step 2."""
    how = {"weight_update": "boundary", "own_devices": True, "until": until}
    stream = plain_stream(
        folder, owned(), steps=9, trainer=TrainerCalls(evaluator=evaluator), **how
    )
    train(stream, 1)
    stream.update_weights(1)
    stream.save(1)
    return stream


def evaluator(answer):
    return Evaluator(lambda version: True, answer, lambda answers: [], contextlib.nullcontext)


def test_an_error_of_a_group_that_a_checkpoint_waits_for(tmp_path):
    """It ends the wait of a run that was told to end: the time is not spent in vain."""

    def until(columns):
        if columns["uid"][0, 0] >= BATCH:
            raise RuntimeError("no filter decision today")
        return np.ones(len(columns["uid"]), bool)

    stream = owing(tmp_path, until=until)
    with pytest.raises(RuntimeError, match="no filter decision today"):
        stream.end_saving(time.monotonic() + HANG)
    stream.close()


def test_an_error_of_the_sampler_ends_the_wait_for_a_step(tmp_path, monkeypatch):
    """Filter decisions of its groups come from the sampler's thread: without it none is known."""

    def broken(self, end):
        raise RuntimeError("no filter decision today")

    monkeypatch.setattr(RegionRounds, "known", broken)
    how = {"weight_update": "boundary", "own_devices": True}
    stream = plain_stream(tmp_path, owned(), until=lambda columns: columns["uid"][:, 0] >= 0, **how)
    with pytest.raises(RuntimeError, match="no filter decision today"):
        train(stream, 1)
    stream.close()


def test_a_run_that_ends_waits_for_its_evaluations_until_its_time_is_over(tmp_path):
    """One that is late is not recorded, and ends when one of its responses has ended."""
    begun = threading.Event()

    def answer(state, heard):
        begun.set()
        for _ in range(100 * int(HANG)):
            time.sleep(0.01)
            heard(None)
        raise AssertionError("the evaluation went on")

    stream = owing(tmp_path, evaluator(answer))
    assert begun.wait(HANG)
    assert stream.evaluated(0, end=time.monotonic()) == []
    stream.end_saving(time.monotonic())
    assert not stream.saver.settled
    thread = stream._sampling
    stream.close()
    thread.raise_error()


def test_a_run_that_ends_begins_no_later_evaluation(tmp_path, monkeypatch):
    """The checkpoint of step 1 waits for the evaluation of version 0, then for step 2."""
    made, ends, end_with = [], threading.Event(), OrderedLink.end_with

    def told(self, version):
        end_with(self, version)
        ends.set()

    def answer(state, heard):
        made.append(state)
        assert ends.wait(HANG)
        return state, []

    monkeypatch.setattr(OrderedLink, "end_with", told)
    stream = owing(tmp_path, evaluator(answer))
    (found,) = stream.evaluated(0, end=time.monotonic() + HANG)
    assert found.version == 0
    stream.saver.recorded(0)
    stream.driver.wait_until(lambda: stream.saver.settled, needs=ALL)
    stream.close()
    stream.saver._writer.close()  # its thread waits for the checkpoint, which nobody writes here
    assert len(made) == 1


@pytest.mark.parametrize("made", [True, False])
def test_samples_wait_for_evaluations_of_older_weights_until_the_run_ends(tmp_path, made):
    """In flight, where others evaluate: a restart has the checkpoint's weights alone."""
    trainer = TrainerCalls(evaluator=evaluator(None))
    stream = plain_stream(tmp_path, owned(), steps=9, trainer=trainer)
    train(stream, 1)
    stream.update_weights(1)
    stream.save(1)
    assert not stream.saver.settled
    if made:
        stream.saver.recorded(0)
    else:
        assert stream.evaluated(0, end=time.monotonic()) == []
        assert stream.not_evaluated(1) == [0, 1]
    assert stream.saver.settled
    stream.close()


def test_what_a_wait_for_evaluations_is_told_of(tmp_path, monkeypatch):
    """The watchdog hears which one is missing; of groups behind it in the thread of rewards too."""
    monkeypatch.setattr(driver, "NOTE_SECONDS", HANG)  # it is told once
    goes_on, scoring, notes = threading.Event(), threading.Event(), []

    def score(answers):
        scoring.set()
        assert goes_on.wait(HANG)
        return []

    def note(text):
        notes.append(text)
        goes_on.set()

    made = dataclasses.replace(evaluator(lambda state, heard: (state, [])), score=score)
    stream = plain_stream(
        tmp_path,
        owned(),
        weight_update="boundary",
        own_devices=True,
        trainer=TrainerCalls(note=note, evaluator=made),
    )
    assert scoring.wait(HANG)
    stream.evaluated(0)
    assert notes == ["evaluation of step 0"]
    stream.close()


@contextlib.contextmanager
def eager_threads():
    """A block in which threads switch at each chance."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("weight_update", ["in_flight", "boundary"])
def test_no_round_runs_while_a_sampler_rests(tmp_path, monkeypatch, weight_update):
    """With an order too: the arrays of the sampler are those of the thread that rests it."""
    resting, caught, begun, whole = threading.Event(), [], threading.Event(), Producer.collect

    def round(self):
        begun.set()
        time.sleep(0.002)
        caught.extend([1] if resting.is_set() else [])
        return whole(self)

    monkeypatch.setattr(Producer, "collect", round)
    with eager_threads():
        stream = plain_stream(
            tmp_path, owned(), own_devices=True, staleness=9, weight_update=weight_update
        )
        assert begun.wait(HANG)
        for _ in range(4):  # amid 80 rounds
            with stream.at_rest():
                resting.set()
                time.sleep(0.02)  # for ten rounds of one that does not rest
                resting.clear()
    stream.close()
    assert not caught


def test_a_sampler_is_left_to_a_thread_that_does_not_end(tmp_path, monkeypatch):
    """It has the sampler's arrays as long as it is amid a round."""
    begun, goes_on, closed, whole = threading.Event(), threading.Event(), [], Producer.collect

    def round(self):
        begun.set()
        assert goes_on.wait(HANG)
        return whole(self)

    monkeypatch.setattr(Producer, "collect", round)
    monkeypatch.setattr(sampling_side, "JOIN_SECONDS", 0.0)
    stream = plain_stream(tmp_path, owned(), own_devices=True)
    monkeypatch.setattr(stream._sampling._worker.sampler, "close", lambda: closed.append(True))
    assert begun.wait(HANG)
    stream.close()
    assert not closed
    goes_on.set()
    monkeypatch.setattr(sampling_side, "JOIN_SECONDS", 60.0)
    stream.close()
    assert closed
