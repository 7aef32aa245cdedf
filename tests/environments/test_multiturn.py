"""Responses in turns: exact ids and masks, limits, deadlines, errors, and what must not matter."""

import dataclasses
import random
import threading
import time

import jax
import numpy as np
import pytest
from support.tiny_model import (
    TINY,
    mini_batch,
    rows_of,
    values_of,
)
from support.turn_sampler import LIMITS, PARAMS, PROMPTS, STOP_IDS, TOKENIZER, Sampler, assert_agree
from support.waiting import HANG

from distflow_jax.batch import RowShape, Samples
from distflow_jax.environments.environment import Turn
from distflow_jax.environments.episode_sampler import EpisodeSampler, Progress
from distflow_jax.environments.episodes import turn_columns, without_lone
from distflow_jax.environments.multiturn import TurnLimits
from distflow_jax.environments.registry import CallLimits, Environments
from distflow_jax.environments.sample_episodes import sample_episodes
from distflow_jax.observe.compilations import Compilations
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import run_requests
from distflow_jax.training.forward import ForwardConfig, response_logp


@pytest.fixture(scope="module")
def sampler():
    return Sampler()


class Parrot:
    """Repeats the middle of a turn, backwards; what it was told is in `heard`, by its prompt."""

    heard: list[tuple[int, list]] = []
    counts = ("tokens", "never")

    def __init__(self, tokenizer, *, delay=0.0, first=""):
        self.delay, self.first, self.turns = delay, first, []

    def reset(self, prompt):
        self.heard.append((prompt.counter, self.turns))
        return self.first

    def step(self, tokens, text):
        assert text == TOKENIZER.decode(tokens)
        time.sleep(random.random() * self.delay)
        self.turns.append(tokens)
        return Turn(tokens[-2:0:-1], reward=0.5, logged={"tokens": len(tokens)})


@pytest.fixture(scope="module")
def episodes(sampler):
    Parrot.heard.clear()
    return sampler.run("Parrot")


# -- what a response is ----------------------------------------------------------------------------


def test_a_response_is_what_was_sampled_and_what_was_observed_and_nothing_else(episodes):
    """Turn by turn: the ids that the environment was given, then those that it gave."""
    heard = {}
    for counter, turns in Parrot.heard:
        heard.setdefault(counter, []).append([t.tolist() for t in turns])
    several = 0
    for (counter, _), episode in episodes.items():
        tokens, mask = episode.response.tokens, episode.mask
        assert len(tokens) == len(mask) == len(episode.response.logp)
        assert set(episode.logged) == {*Parrot.counts} and episode.logged["never"] == 0
        # runs of sampled tokens; an observation may be empty, so that two turns touch
        told = max((t for t in heard[counter] if _is_beginning(t, tokens)), key=len, default=[])
        wanted, wanted_mask = [], []
        for i, turn in enumerate(told):
            wanted += turn
            wanted_mask += [True] * len(turn)
            if i + 1 < episode.turns:
                wanted += turn[-2:0:-1]
                wanted_mask += [False] * len(turn[-2:0:-1])
        assert tokens[: len(wanted)].tolist() == wanted
        assert mask[: len(wanted)].tolist() == wanted_mask
        assert mask[len(wanted) :].all()  # a last turn that a limit cut
        assert not episode.response.logp[~mask].any()
        assert (episode.response.logp[mask] < 0).all()
        several += episode.turns > 2
    assert several > 4


def _is_beginning(turns, tokens):
    whole = [t for turn in turns for t in [*turn, *turn[-2:0:-1]]]
    last = len(turns[-1][-2:0:-1]) if turns else 0
    return tokens.tolist()[: len(whole) - last] == whole[: len(whole) - last]


def test_log_probs_with_gaps_are_those_of_one_forward_pass(episodes):
    """Turns that were read again and decoded, against the trainer's packed rows and its mask."""
    columns = turn_columns(list(episodes.values()))
    responses = [episode.response for episode in episodes.values()]
    samples = Samples(
        [r.prompt for r in responses],
        np.array([(r.prompt.counter, r.sample) for r in responses], np.int64),
        columns["response"],
        columns["response_mask"],
    )
    rows, placement = rows_of(samples, RowShape(1, 16, 128, 8), shared=True)

    @jax.jit
    def logp(params):
        return response_logp(
            params, TINY, mini_batch(rows), np.float32(1.0), ForwardConfig(logp_chunk=32)
        )[0]

    trained = values_of(samples, placement, np.asarray(logp(PARAMS))[None])
    for mine, theirs in zip(columns["rollout_logp"], trained, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
    gaps = sum(int((np.diff(m.astype(int)) == 1).sum()) for m in columns["response_mask"])
    assert gaps > 10
    assert [len(v) for v in columns["version"]] == [len(m) for m in columns["response_mask"]]
    assert int(rows.length.sum()) == sum(int(e.mask.sum()) for e in episodes.values())


def test_the_first_turn_is_that_of_a_response_without_an_environment(sampler, episodes):
    requests = [GroupRequest(p, SamplingParams(4, LIMITS.turn)) for p in PROMPTS]
    decode, single, _ = run_requests(
        sampler.engine, sampler.state.params, sampler.state.decode, requests
    )
    sampler.state = dataclasses.replace(sampler.state, decode=decode)
    for response in single:
        episode = episodes[response.prompt.counter, response.sample]
        end = len(response.tokens)
        np.testing.assert_array_equal(episode.response.tokens[:end], response.tokens)


def test_noise_goes_on_with_the_place_in_the_response(sampler):
    """Nothing observed after an end token: the same as if the end token had ended nothing."""

    def tokens(limits):
        table = sampler.run("Silent", limits)
        return {uid: e.response.tokens for uid, e in table.items()}

    short, long = tokens(TurnLimits(20, 20, 2)), tokens(TurnLimits(20, 20, 9))
    longer = 0
    for uid in short:
        end = len(short[uid])
        np.testing.assert_array_equal(short[uid], long[uid][:end])
        longer += len(long[uid]) > end
    assert longer
    repeated = [t for t in long.values() if len(set(t[:5].tolist())) < 3]
    assert not repeated  # noise that began anew with each turn would repeat itself


class Silent:
    def __init__(self, tokenizer):
        pass

    def reset(self, prompt):
        return None

    def step(self, tokens, text):
        return Turn()


def test_a_first_observation_is_read_and_not_trained_on(sampler):
    episodes = sampler.run("Parrot", first="abc")
    for episode in episodes.values():
        assert TOKENIZER.decode(episode.response.tokens[:3]) == "abc"
        assert not episode.mask[:3].any() and episode.mask[3]
        assert len(episode.response.tokens) <= LIMITS.response
    again = [dataclasses.replace(p, tokens=np.append(p.tokens, TOKENIZER.encode("abc")))
             for p in PROMPTS]  # fmt: skip
    for uid, episode in sampler.run("Parrot", prompts=again[:2]).items():
        first = np.flatnonzero(~episodes[uid].mask[3:])
        turn = slice(0, first[0] if len(first) else 10)
        np.testing.assert_array_equal(
            episode.response.tokens[turn], episodes[uid].response.tokens[3:][turn]
        )


# -- limits ----------------------------------------------------------------------------------------


def test_limits(sampler):
    reasons = set()
    for limits in (LIMITS, TurnLimits(20, 20, 9), TurnLimits(60, 12, 2)):
        for episode in sampler.run("Parrot", limits).values():
            reasons.add(episode.reason)
            check_limits(episode, limits)
    assert reasons == {"max_turns", "turn_length", "response_length"}


@pytest.mark.parametrize("first", [20, 60])
def test_each_request_keeps_its_own_limit(sampler, first):
    """As on a worker with groups of a step and problems of an evaluation, whichever comes first."""
    limits = {PROMPTS[0].counter: first, PROMPTS[1].counter: 80 - first}
    how = {"turn_length": 0, "max_turns": 9}
    environments = Environments(f"{__name__}:Parrot", {}, TOKENIZER, calls=CallLimits(HANG), **how)
    both = EpisodeSampler(sampler.engine, sampler.state, environments)
    for prompt in PROMPTS[:2]:
        both.submit(prompt.counter, GroupRequest(prompt, SamplingParams(4, limits[prompt.counter])))
    found = {}
    while both.busy:
        found |= dict(both.round())
    sampler.state = both.close()
    environments.close()
    for prompt in PROMPTS[:2]:
        alone = TurnLimits(limits[prompt.counter], 0, 9)
        assert_agree(by_uid(found[prompt.counter]), sampler.run("Parrot", alone, prompts=[prompt]))


def check_limits(episode, limits):
    tokens = episode.response.tokens
    assert len(tokens) <= limits.response and episode.turns <= limits.turns
    assert episode.mask[-1]  # an observation that nobody answers is left out
    assert not episode.response.finished
    runs = np.split(episode.mask, np.flatnonzero(np.diff(episode.mask)) + 1)
    cut = tokens[-1] not in STOP_IDS
    if episode.reason == "turn_length":
        assert cut and runs[-1].sum() >= limits.turn
    elif episode.reason == "response_length":
        # cut there, or with no room for the observation and a token more
        last = 0 if cut else max(0, int(runs[-1].sum()) - 2)
        assert len(tokens) + last >= limits.response
    else:
        assert episode.turns == limits.turns and not cut
    # a turn that was cut is not shown to the environment, and earns nothing
    assert episode.reward == 0.5 * (episode.turns - cut)


def test_slots_are_free_afterwards_and_nothing_is_left_to_compile(sampler, episodes):
    counter = Compilations()
    again = sampler.run("Parrot")
    assert counter.take() == 0, counter.names()
    counter.close()
    assert_agree(again, episodes)


# -- what must not matter --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_when_environments_answer(sampler, episodes, seed):
    random.seed(seed)
    assert_agree(sampler.run("Parrot", delay=0.05), episodes)


def test_number_of_slots_and_tokens_per_call(episodes):
    other = Sampler(slots=3, tokens_per_call=7, page_size=32, group_size=2)
    assert_agree(other.run("Parrot"), episodes)


def test_order_of_prompts(sampler, episodes):
    order = [2, 0, 3, 1]
    got = sampler.run("Parrot", prompts=[PROMPTS[i] for i in order])
    assert_agree({uid: got[uid] for uid in episodes}, episodes)


def test_two_requests_for_one_prompt_are_kept_apart(sampler, episodes):
    """As of two nodes that sample at one time; their responses have the same uids."""
    how = {"turn_length": LIMITS.turn, "max_turns": LIMITS.turns}
    environments = Environments(f"{__name__}:Parrot", {}, TOKENIZER, calls=CallLimits(HANG), **how)
    greedy = SamplingParams(1, LIMITS.response, 0.0)
    sampler.state, alone, _ = sample_episodes(
        sampler.engine, sampler.state, PROMPTS, greedy, environments
    )
    both = EpisodeSampler(sampler.engine, sampler.state, environments)
    for prompt in PROMPTS:
        sampling = SamplingParams(4, LIMITS.response)
        both.submit((prompt.counter, "drawn"), GroupRequest(prompt, sampling))
        both.submit((prompt.counter, "greedy"), GroupRequest(prompt, greedy))
    found = {}
    while both.busy:
        found |= dict(both.round())
    sampler.state = both.close()
    for node, wanted in (("drawn", list(episodes.values())), ("greedy", alone)):
        got = [e for prompt in PROMPTS for e in found[prompt.counter, node]]
        assert_agree(by_uid(got), by_uid(wanted))


@pytest.mark.parametrize("first", ["", "ab"])
def test_another_sampler_draws_what_had_not_ended_and_nothing_of_what_is_dropped(sampler, first):
    """As a worker that gets requests of one that has died; dropped ones are amid their turns."""
    wanted, dropped = sampler.run("Parrot", first=first), PROMPTS[3].counter
    how = {"turn_length": LIMITS.turn, "max_turns": LIMITS.turns}
    kwargs = {"first": first}
    environments = Environments(
        f"{__name__}:Parrot", kwargs, TOKENIZER, calls=CallLimits(HANG), **how
    )
    other = EpisodeSampler(sampler.engine, sampler.state, environments)
    known = [{0, 2}, {3}, {0, 1, 2, 3}, set()]
    Parrot.heard.clear()
    for prompt, samples in reversed(list(zip(PROMPTS, known, strict=True))):
        progress = Progress({s: wanted[prompt.counter, s] for s in samples})
        request = GroupRequest(prompt, SamplingParams(4, LIMITS.response))
        other.submit(prompt.counter, request, progress)
    found = {}
    for _ in range(3):
        found |= dict(other.round())
    other.drop({dropped})
    while other.busy:
        found |= dict(other.round())
    sampler.state = other.close()
    environments.close()
    assert dropped not in found and len(found) == 3
    begun = [counter for counter, _ in Parrot.heard]
    assert [begun.count(prompt.counter) for prompt in PROMPTS] == [2, 3, 0, 4]
    for counter, episodes in found.items():
        kept = [e for e in episodes if e is wanted[counter, e.response.sample]]
        assert len(kept) == len(known[counter])
    left = {uid: episode for uid, episode in wanted.items() if uid[0] != dropped}
    assert_agree(by_uid([e for episodes in found.values() for e in episodes]), left)


def by_uid(episodes):
    return {(e.response.prompt.counter, e.response.sample): e for e in episodes}


# -- beside the sampler ----------------------------------------------------------------------------


def test_environments_work_beside_each_other_and_beside_the_sampler(sampler):
    """The first two steps wait for one another, and then until another response has ended: were
    one of them alone at work, or did the sampler wait, both would run into the deadline."""
    Meeting.both, Meeting.ended, Meeting.seats = threading.Barrier(2), threading.Event(), [0, 1]
    met = sampler.run("Meeting", prompts=PROMPTS[:1], on_response=lambda _: Meeting.ended.set())
    assert {e.reason for e in met.values()} <= {"done", "turn_length"}
    assert not Meeting.seats


class Meeting:
    def __init__(self, tokenizer):
        pass

    def reset(self, prompt):
        pass

    def step(self, tokens, text):
        try:
            self.seats.pop()
        except IndexError:
            return Turn(done=True)
        self.both.wait()
        self.ended.wait()
        return Turn(done=True)


# -- what goes wrong -------------------------------------------------------------------------------


class Whimsical:
    """Begins every response differently."""

    count = 0

    def __init__(self, tokenizer):
        pass

    def reset(self, prompt):
        Whimsical.count += 1
        return f"{Whimsical.count % 10}" if prompt.counter == 2 else "x" * 100

    def step(self, tokens, text):
        return Turn(done=True)


def test_first_observations_that_cannot_be(sampler, caplog):
    episodes = sampler.run("Whimsical", prompts=PROMPTS[1:3])
    reasons = [e.reason for e in episodes.values()]
    assert reasons[:4] == ["failed"] * 4  # longer than a response may get
    assert reasons[4] in ("done", "turn_length") and reasons[5:] == ["failed"] * 3
    assert [np.isnan(e.reward) for e in episodes.values()] == [True] * 4 + [False] + [True] * 3
    # in a step of training the only one has nothing to be compared with
    assert all(np.isnan(e.reward) for e in without_lone(list(episodes.values())[4:]))
    messages = " ".join(r.getMessage() for r in caplog.records)
    assert "100 tokens, more than the 20 that" in messages
    assert "different first observations" in messages


@pytest.mark.parametrize(
    "turn, message",
    [
        (Turn(reward=float("nan")), "a reward of nan"),
        (Turn(reward=float("-inf")), "a reward of -inf, outside ±1e.18"),
        (Turn(reward=2e18), "a reward of 2e.18, outside ±1e.18"),
        (Turn([400]), "ids from 400 to 400, the vocabulary 320"),
        (Turn([[1]]), "text, token ids"),
        (Turn([0.5]), "text, token ids"),
        (Turn(bytearray(b"ab")), "text, token ids, .* got bytearray"),
        ("text", "returned 'text' .str., not a Turn"),
        (Turn(reward="1.5"), r"a Turn of \('1.5', False, {}\) .* not of \(number, bool"),
        (Turn(reward=10**400), "a Turn of"),
        (Turn(done="False"), r"a Turn of \(0.0, 'False', {}\)"),
        (Turn(done=None), r"a Turn of \(0.0, None, {}\)"),
        (Turn(done=[False]), "a Turn of"),
        (Turn(logged={"hints": "2"}), "a Turn of .*{'hints': '2'}"),
        (Turn(logged={"infra/timeout": 1}), "logs 'infra/timeout', which the run counts"),
    ],
)
def test_turns_that_cannot_be_are_refused(turn, message):
    environments = Environments("calculator", {}, TOKENIZER, calls=CallLimits(HANG))
    with pytest.raises((TypeError, ValueError), match=message):
        environments.observed(turn)


def test_numbers_of_other_packages_are_numbers():
    environments = Environments("calculator", {}, TOKENIZER, calls=CallLimits(HANG))
    environments.observed(Turn("", np.float16(0.5), np.bool_(True), {"a": np.array(1)}))
    assert Environments(f"{__name__}:Lone", {}, TOKENIZER, calls=CallLimits(HANG)).counts == ("a1",)


class Lone(Parrot):
    counts = "a1"  # as of ("a1")
