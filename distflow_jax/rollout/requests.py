"""Requests to the sampler and its responses. T tokens."""

import dataclasses

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.config.rollout_config import TEMPERATURE, TOP_P, EvalConfig, RolloutConfig
from distflow_jax.images.turn_images import TurnImages
from distflow_jax.parsing.checked_fields import at_least
from distflow_jax.parsing.setting_checks import Section, needed, setting
from distflow_jax.rollout.occupancy import Occupancy


@dataclasses.dataclass(frozen=True)
class SamplingParams(Section):
    """How the responses to a prompt are sampled: the host's record.

    A new option of sampling touches three places: the config that sets it (RolloutConfig,
    EvalConfig), this record, and the column of the decode state that holds it for each slot
    (DecodeState, SlotRequest.columns, and engine.sampling.SlotSampling where tokens are drawn).

    Raises ValueError for values that no response can be sampled with.
    """

    num_samples: int = needed(at_least(1))  # responses to each prompt
    # longest response in tokens, the end token included
    limit: int = needed(at_least(1))
    temperature: float = setting(1.0, TEMPERATURE)  # 0: greedy
    top_k: int = setting(0, at_least(0))  # likeliest tokens that are drawn from; 0: off
    top_p: float = setting(1.0, TOP_P)  # probability of the likeliest tokens that are drawn from
    record: bool = True  # with the experts of the tokens, where the engine records them

    @classmethod
    def of_training(cls, config: RolloutConfig) -> "SamplingParams":
        """How the responses that a policy is trained on are sampled."""
        limit, temperature = config.max_response_length, config.temperature
        return cls(config.num_samples, limit, temperature, config.top_k, config.top_p)

    @classmethod
    def of_evaluation(cls, config: EvalConfig, longest: int) -> "SamplingParams":
        """How the responses of an evaluation are sampled, on which nothing is trained.

        `longest`: tokens, where max_response_length is 0.
        """
        limit = config.max_response_length or longest
        return cls(config.num_samples, limit, config.temperature, 0, config.top_p, record=False)


@dataclasses.dataclass(frozen=True)
class GroupRequest:
    """One prompt and how its responses are sampled."""

    prompt: Prompt
    sampling: SamplingParams
    hold: bool = False  # a finished response keeps its slot, for HeldSequences.extend
    first_sample: int = 0  # sample number of the first response: (counter, number) keys the noise
    begun: int = 0  # tokens of the responses that the prompt ends with: noise goes on after theirs
    turn: int = 0  # requests of a lower turn take slots first
    # among those of a turn, lowest first; None: as scheduling/sampling_order.py's `longest`
    rank: tuple[float, ...] | None = None
    version: int | None = None  # of the weights, which alone may answer it; None: any

    @property
    def samples(self) -> range:
        """The sample numbers of the responses."""
        return range(self.first_sample, self.first_sample + self.sampling.num_samples)

    def with_limit(self, limit: int) -> "GroupRequest":
        """The request with another longest response, in tokens."""
        return dataclasses.replace(self, sampling=dataclasses.replace(self.sampling, limit=limit))


@dataclasses.dataclass
class Response:
    """The tokens sampled for one response since it was last resumed. Arrays are [T]."""

    prompt: Prompt
    sample: int
    tokens: np.ndarray  # int32; the end token is part of it
    logp: np.ndarray  # float32, at the sampling temperature, before top-k and top-p
    margin: np.ndarray  # float32: lead over the runner-up in perturbed logits
    finished: bool  # False: cut by the limit
    version: np.ndarray  # int32: of the weights that each token was sampled by
    # int8 or int16 [prompt + all of the response, layers, experts of a token]: the experts that the
    # sampler routed each token to, -1 for the last one, which was not fed; None where they are not
    # recorded (EngineConfig.record_experts) or not wanted (SamplingParams.record)
    routed_experts: np.ndarray | None = None
    shown: TurnImages | None = None  # images that an environment showed among its tokens


@dataclasses.dataclass
class RolloutStats:
    """Counters of a rollout."""

    generate_calls: int = 0
    prefills: int = 0  # rows of prompts, or chunks of one
    prompts: int = 0  # read, one for all responses to it
    images: int = 0  # encoded, one for all responses to its prompt
    prefix_hits: int = 0  # of these, after a shared prefix that was read before
    prefix_tokens: int = 0  # of these shared prefixes
    tokens: int = 0  # sampled
    preempted: int = 0  # sequences that lost their slot because the cache was full
    parked: int = 0  # held sequences that lost theirs because others needed it, or its pages
    occupancy: Occupancy = Occupancy()
    proposed: int = 0  # tokens guessed and tried: EngineConfig.speculative_tokens
    accepted: int = 0  # of these, those that were drawn too


@dataclasses.dataclass
class Partial:
    """A sequence without a slot: its request and its tokens so far, all that `restore` needs."""

    request: GroupRequest
    sample: int
    fed: np.ndarray  # int32 [t]: tokens before `chunks`: earlier turns, tools' answers
    # tokens, log-probs, margins and weight versions of each decode call, each [tokens of the call]
    chunks: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)
    shown: TurnImages | None = None  # images among `fed`

    @property
    def tokens(self) -> np.ndarray:
        """The response so far, int32 [T]."""
        return np.concatenate([self.fed, *(chunk[0] for chunk in self.chunks)])

    def response(self, stops: frozenset[int], routed_experts: np.ndarray | None = None) -> Response:
        """The tokens sampled since the sequence was last resumed.

        `stops`: ids that end a response. `routed_experts`: as Response has them, of n tokens,
        [n, layers, experts of a token], with any number of rows behind the response's own.
        """
        columns = [np.zeros(0, t) for t in (np.int32, np.float32, np.float32, np.int32)]
        tokens, logp, margin, version = (
            np.concatenate([empty, *(chunk[i] for chunk in self.chunks)])
            for i, empty in enumerate(columns)
        )
        finished = len(tokens) > 0 and int(tokens[-1]) in stops
        prompt = self.request.prompt
        if routed_experts is not None:  # a copy: the others are of all slots, and padded
            whole = len(prompt.tokens) + len(self.fed) + len(tokens)
            routed_experts = routed_experts[:whole].copy()
        return Response(
            prompt, self.sample, tokens, logp, margin, finished, version, routed_experts
        )
