"""A sampler of responses in turns, by environments of test_multiturn.py."""

import contextlib
import dataclasses
import math

import numpy as np

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.environments.multiturn import TurnLimits
from distflow_jax.environments.registry import CallLimits, Environments
from distflow_jax.environments.sample_episodes import sample_episodes
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.rollout.decode_state import EngineConfig
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.response_checks import ResponseLimits
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.stream.border import check_samples
from support.tiny_model import TINY, mesh_of, prompt_of, random_params
from support.waiting import HANG

PARAMS = random_params(TINY, 2)
TOKENIZER = Tokenizer.byte_level(TINY.vocab_size)
STOP_IDS = (258, *range(16))  # a turn ends after some ten tokens
LIMITS = TurnLimits(response=90, turn=40, turns=4)
CONFIG = EngineConfig(
    slots=8,
    max_prompt=36,
    max_response=90,
    max_read=32 + 89,
    tokens_per_call=4,
    page_size=16,
    group_size=4,
)
NEAR_TIE = 1e-4  # lead of the best over the second-best perturbed logit
PROMPTS = [
    prompt_of(i, np.random.default_rng(i).integers(0, TINY.vocab_size, length))
    for i, length in enumerate((3, 16, 32, 9))
]


class Sampler:
    """An engine with weights and slots, all compiled."""

    def __init__(self, **changes):
        config = dataclasses.replace(CONFIG, **changes)
        mesh = mesh_of(1, 1, names=("data", "tensor"))
        self.engine = RolloutEngine(TINY, config, mesh, stop_ids=STOP_IDS, seed=3)
        params = self.engine.load_params(PARAMS)
        self.engine.compile(params)
        self.state = SamplerState(params, 0, self.engine.init_decode_state())

    @staticmethod
    def emptied(state, scheduler):
        """The state after a scheduler that is closed now, whatever it was at."""
        return dataclasses.replace(state, decode=scheduler.close())

    def run(
        self, name, limits=LIMITS, *, prompts=PROMPTS, on_response=None, settings=None, **kwargs
    ):
        """Episodes of 4 responses to each prompt, by uid; `settings`: arguments of Environments."""
        module = "" if ":" in name else "test_multiturn:"
        environments = Environments(
            f"{module}{name}",
            kwargs,
            TOKENIZER,
            **{
                "calls": CallLimits(HANG),
                "turn_length": limits.turn,
                "max_turns": limits.turns,
                **(settings or {}),
            },
        )
        with contextlib.closing(environments):
            self.state, episodes, self.stats = sample_episodes(
                self.engine,
                self.state,
                prompts,
                SamplingParams(4, limits.response),
                environments,
                on_response=on_response,
            )
        table = {(e.response.prompt.counter, e.response.sample): e for e in episodes}
        assert list(table) == [(p.counter, s) for p in prompts for s in range(4)]
        self._check_border(table, environments, limits)
        return table

    def _check_border(self, table, environments, limits):
        """All that a sampler of turns makes may come from a worker."""
        turn = environments.turn_length
        stops, most = self.engine.stop_ids, environments.max_turns
        border = ResponseLimits(TINY.vocab_size, stops, max_turns=most, turn_length=turn)
        sampling = SamplingParams(4, limits.response)
        for (counter, sample), episode in table.items():
            if episode.reason == "failed" or not math.isnan(episode.reward):  # not left alone
                key, request = (counter, "gen"), GroupRequest(episode.response.prompt, sampling)
                check_samples({key: Progress({sample: episode})}, {key: request}, border, 0)


def assert_agree(got, wanted):
    """Same tokens up to each response's first near-tie, and most of them before it."""
    assert got.keys() == wanted.keys()
    compared = 0
    for uid, episode in got.items():
        mine, theirs = episode.response, wanted[uid].response
        ties = np.flatnonzero(theirs.margin < NEAR_TIE)
        end = ties[0] if len(ties) else max(len(theirs.tokens), len(mine.tokens))
        np.testing.assert_array_equal(mine.tokens[:end], theirs.tokens[:end], err_msg=str(uid))
        np.testing.assert_allclose(mine.logp[:end], theirs.logp[:end], atol=1e-4)
        np.testing.assert_array_equal(episode.mask[:end], wanted[uid].mask[:end])
        compared += end
    assert compared > 0.8 * sum(len(e.response.tokens) for e in wanted.values())
