"""Schedulers over engines that are not ours: answers, swaps, and everything that goes wrong.

Nightly: a server of scripts/serve.py samples as our own engine does; an answer that drips or never
comes costs one try.
"""

import dataclasses
import logging

import numpy as np
import pytest
from support.completions_server import FAULTS, CompletionsServer
from support.foreign_engines import limits_of, loaded_folder, openai_scheduler, sampler_scheduler
from support.in_process_engine import InProcessEngine
from support.serving import STOP_IDS as SERVED_STOPS
from support.serving import Serving
from support.serving import engine as served_engine
from support.tiny_model import TINY, forward_logp, prompt_of, random_params
from support.tiny_sampler import REQUESTS, Sampler, assert_agree, assert_same, by_uid
from support.waiting import HANG, until

from distflow_jax.batch import Prompt
from distflow_jax.rollout.foreign.foreign_scheduler import ForeignScheduler, TriesEnded
from distflow_jax.rollout.requests import GroupRequest, Partial, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import run_requests
from distflow_jax.serving.access import Access

OTHER = random_params(TINY, 5)
FIRST = random_params(TINY, 2)
PLAIN = [r for r in REQUESTS if r.sampling.temperature == 1.0]
UIDS = {(r.prompt.counter, sample) for r in PLAIN for sample in r.samples}


@pytest.fixture(scope="module")
def sampler():
    return Sampler()


@pytest.fixture
def server(sampler):
    # of other weights: its answers are right only once it has loaded ours
    with CompletionsServer(sampler.engine, OTHER) as server:
        yield server


def fill(scheduler, requests=PLAIN):
    for request in requests:
        scheduler.submit(request)
    return scheduler


def drive(scheduler):
    """Steps, each of which may wait, until nothing is busy; {uid: response}."""
    found = []

    def is_done():
        found.extend(scheduler.step())
        return not scheduler.busy

    until(is_done, pause=0.0)
    assert len(by_uid(found)) == len(found)
    return by_uid(found)


def assert_ours(found, params=FIRST, version=0):
    """All log-probs are those of the trainer's forward pass by these weights."""
    assert found.keys() == UIDS
    responses = [found[uid] for uid in sorted(found)]
    for mine, ours in zip(responses, forward_logp(TINY, params, responses), strict=True):
        np.testing.assert_allclose(mine.logp, ours, atol=1e-4)
        assert (mine.version == version).all()
        assert len(mine.tokens) == len(mine.version) == len(mine.margin)


# -- three adapters ---------------------------------------------------------------------------


def test_our_engine_in_process(sampler):
    engine = InProcessEngine(sampler.engine)
    scheduler = fill(ForeignScheduler(engine, FIRST, limits_of(sampler.engine)), REQUESTS)
    assert_same(drive(scheduler), by_uid(sampler.run(REQUESTS)))
    assert scheduler.stats.tokens and not scheduler.busy
    engine.close()


def test_openai_compatible_server(sampler, server, tmp_path):
    with openai_scheduler(server, FIRST, tmp_path) as scheduler:
        assert_ours(drive(fill(scheduler)))
    assert 1 < server.most_running <= 8
    assert server.loaded == ["version-0"] and server.answered == len(UIDS)


@pytest.mark.slow
def test_distflow_sampler(tmp_path):
    """The same tokens as this process samples: the server has the seed of the run."""
    own = served_engine()
    access = Access(load_folders=(str(tmp_path),))
    with Serving(load=lambda path: (served_or_folder(own, path), 0), access=access) as serving:
        with sampler_scheduler(serving.address, own, FIRST, tmp_path) as scheduler:
            found = drive(fill(scheduler))
    state, wanted, _ = run_requests(own, own.load_params(FIRST), own.init_decode_state(), PLAIN)
    assert_agree(list(found.values()), wanted)
    assert set(SERVED_STOPS) == set(own.stop_ids)


def served_or_folder(own, path):
    return Serving.load(path)[0] if str(path).isdigit() else loaded_folder(own, path)


# -- swaps ------------------------------------------------------------------------------------


def test_engine_is_drained_before_a_swap(server, tmp_path):
    with openai_scheduler(server, FIRST, tmp_path, slots=4) as scheduler:
        fill(scheduler)
        done = by_uid(scheduler.step())
        scheduler.load(OTHER, 7)  # the server asserts that nothing runs
        found = done | drive(scheduler)
    versions = {uid: set(response.version.tolist()) for uid, response in found.items()}
    assert found.keys() == UIDS
    assert all(len(version) == 1 for version in versions.values())
    assert {7} in versions.values() and {0} in versions.values()
    for version, params in ((0, FIRST), (7, OTHER)):
        of = [found[uid] for uid in sorted(found) if versions[uid] == {version}]
        for mine, ours in zip(of, forward_logp(TINY, params, of), strict=True):
            np.testing.assert_allclose(mine.logp, ours, atol=1e-4)
    assert [path.partition("?")[0] for path, _ in server.calls] == 2 * [
        "/pause",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/resume",
    ]
    assert [folder.name for folder in tmp_path.iterdir()] == ["version-7"]


def test_partial_responses_go_on(server, tmp_path):
    """Exported responses begin again; with tokens of another engine they go on after these."""
    with openai_scheduler(server, FIRST, tmp_path) as scheduler:
        whole = drive(fill(scheduler, PLAIN[:1]))
        seeds = set(server.seeds)
        assert len(seeds) == len(PLAIN[0].samples)
        server.faults.extend(["hang"] * len(PLAIN[0].samples))  # none has ended below
        scheduler.submit(PLAIN[0])
        scheduler.step()
        partials = scheduler.export()
        server.faults.clear()
        server.let_go()
        assert not scheduler.busy and len(partials) == len(PLAIN[0].samples)
        uid, response = max(whole.items(), key=lambda item: len(item[1].tokens))
        (partial,) = [p for p in partials if p.sample == uid[1]]
        zeros = np.zeros(3, np.float32)
        partial.chunks.append((response.tokens[:3], response.logp[:3], zeros, zeros.astype(int)))
        server.seeds.clear()
        scheduler.restore(partials)
        found = drive(scheduler)
    # the noise of its beginning is not drawn again, and the others have theirs
    assert len(set(server.seeds) - seeds) == 1
    np.testing.assert_array_equal(found[uid].tokens[:3], response.tokens[:3])
    assert len(found[uid].tokens) <= PLAIN[0].sampling.limit
    zero = dataclasses.replace(found[uid], prompt=prompt_of(0, found[uid].prompt.tokens))
    (ours,) = forward_logp(TINY, FIRST, [zero])
    np.testing.assert_allclose(found[uid].logp, ours, atol=1e-4)


def begun(whole, count=3):
    """Responses of which another engine has sampled `count` tokens, or all but one."""
    partials = []
    for request in PLAIN:
        for sample in request.samples:
            response = whole[request.prompt.counter, sample]
            columns = response.tokens, response.logp, response.margin, response.version
            chunk = tuple(x[: min(count, len(response.tokens) - 1)] for x in columns)
            partials.append(Partial(request, sample, np.zeros(0, np.int32), [chunk]))
    return partials


def test_a_response_goes_on_by_the_noise_of_its_places(sampler):
    """A response that another engine has begun ends as it would have ended there."""
    whole = by_uid(sampler.run(PLAIN))
    engine = InProcessEngine(sampler.engine)
    scheduler = ForeignScheduler(engine, FIRST, limits_of(sampler.engine))
    scheduler.restore(begun(whole))
    assert_agree(list(drive(scheduler).values()), list(whole.values()))
    engine.close()


@pytest.mark.slow
def test_a_response_goes_on_at_a_server_by_the_noise_of_its_places(tmp_path):
    own = served_engine()
    state, wanted, _ = run_requests(own, own.load_params(FIRST), own.init_decode_state(), PLAIN)
    access = Access(load_folders=(str(tmp_path),))
    with Serving(load=lambda path: (served_or_folder(own, path), 0), access=access) as serving:
        with sampler_scheduler(serving.address, own, FIRST, tmp_path) as scheduler:
            scheduler.restore(begun(by_uid(wanted)))
            found = drive(scheduler)
    assert_agree(list(found.values()), wanted)


# -- faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [pytest.param(x, marks=[pytest.mark.slow] * (x in ("slow bytes", "hang"))) for x in FAULTS],
)
def test_fault_costs_one_try(server, tmp_path, caplog, fault):
    caplog.set_level(logging.WARNING, "distflow_jax")
    # what hangs is waited for so long, and nothing else is near it
    seconds = 12.0 if fault in ("hang", "slow bytes") else HANG
    with openai_scheduler(server, FIRST, tmp_path, try_seconds=seconds) as scheduler:
        fill(scheduler)
        server.faults.extend([fault, "", fault])
        assert_ours(drive(scheduler))
    tries = [r.getMessage() for r in caplog.records if ", try " in r.getMessage()]
    least = 0 if fault == "no end token" else 1  # it may have found responses without
    assert least <= len(tries) <= 2
    for text in tries:
        assert server.url in text and "of prompt" in text and "try 1 of 5" in text, text
    assert server.loaded == ["version-0"]  # the engine was never taken for another one


def test_engine_that_is_killed_gets_its_weights_again(sampler, tmp_path, caplog):
    with CompletionsServer(sampler.engine, OTHER) as first:
        with openai_scheduler(first, FIRST, tmp_path, slots=4) as scheduler:
            first.faults.append("hang")  # however late the kill, one response is under way
            fill(scheduler)
            found = by_uid(scheduler.step())
            first.kill()
            with CompletionsServer(sampler.engine, OTHER, port=first.port) as second:
                found |= drive(scheduler)
                assert second.loaded == ["version-0"]
                # and between two requests, where no connection breaks
                second.started += 1
                drive(fill(scheduler))
                assert second.loaded == 2 * ["version-0"]
    assert_ours(found)
    assert "is back, with version 0" in caplog.text


def test_engine_that_stays_away_ends_the_run(server, tmp_path):
    limits = {"lost_seconds": 0.5}
    with openai_scheduler(server, FIRST, tmp_path, limits=limits) as scheduler:
        fill(scheduler)
        server.kill()
        with pytest.raises(RuntimeError, match="was away for 0.5 s"):
            drive(scheduler)


def test_response_that_always_fails_is_named(server, tmp_path):
    with openai_scheduler(server, FIRST, tmp_path, limits={"most_tries": 2}) as scheduler:
        fill(scheduler)
        server.faults.extend(["no log-probs"] * (2 * len(UIDS)))
        with pytest.raises(
            TriesEnded, match="failed 2 times at response .*: no log-probs"
        ) as error:
            drive(scheduler)
        server.faults.clear()
        scheduler.abort(error.value.group)
        found = {}
        while scheduler.busy:  # the others go on
            try:
                found |= by_uid(scheduler.step())
            except TriesEnded as more:
                scheduler.abort(more.group)
        assert all(len(response.tokens) for response in found.values())


def test_engine_that_is_not_there_is_named(sampler, tmp_path):
    server = CompletionsServer(sampler.engine, OTHER)
    server._http.server_close()
    with pytest.raises(RuntimeError, match=f"{server.url} does not answer: .*refused"):
        with openai_scheduler(server, FIRST, tmp_path):
            pass


@pytest.mark.parametrize("models", [5, [5], None, "tiny"])
def test_an_engine_that_lists_no_models_is_named(server, tmp_path, models):
    server.models = models
    with pytest.raises(RuntimeError, match="serves no model"):
        with openai_scheduler(server, FIRST, tmp_path):
            pass


def test_requests_that_no_engine_takes(server, tmp_path):
    prompt = prompt_of(1, [5, 6])
    with openai_scheduler(server, FIRST, tmp_path) as scheduler:
        with pytest.raises(ValueError, match="cannot hold responses between turns"):
            scheduler.submit(GroupRequest(prompt, SamplingParams(1, 4), hold=True))
        with pytest.raises(ValueError, match="at least 1 token"):
            empty = Prompt(1, 1, np.zeros(0, np.int32), "", "", None, {})
            scheduler.submit(GroupRequest(empty, SamplingParams(1, 4)))
        with pytest.raises(ValueError, match="sample at 1"):
            scheduler.submit(GroupRequest(prompt, SamplingParams(1, 4, 0.5)))
            scheduler.step()
