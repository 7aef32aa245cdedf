"""Requests to the sampler and its responses. T tokens."""

import dataclasses

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.images.turn_images import TurnImages
from distflow_jax.rollout.occupancy import Occupancy

LEAST_TOP_P = 2.0**-126  # the least float32 that no device rounds to 0
LEAST_TEMPERATURE = 1e-30  # below it logits / temperature may be infinite


def check_sampling(
    *,
    num_samples: int = 1,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    section: str = "",
) -> None:
    """Raises ValueError for values that no response can be sampled with.

    `section`: printed before the name of the value, e.g. "rollout.".
    """
    if num_samples < 1:
        raise ValueError(f"{section}num_samples must be at least 1, got {num_samples}")
    if not temperature >= 0:  # true of nan too
        raise ValueError(
            f"{section}temperature must not be negative, got {temperature:g}; 0 is greedy"
        )
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"{section}temperature must be at least {LEAST_TEMPERATURE:g}, got {temperature:g}; "
            "0 is greedy"
        )
    if top_k < 0:
        raise ValueError(f"{section}top_k must not be negative, got {top_k}; 0 is off")
    if not 0 < top_p <= 1:
        raise ValueError(f"{section}top_p must be above 0 and at most 1, got {top_p:g}; 1 is off")
    if top_p < LEAST_TOP_P:  # 0 as a float32 of a device
        raise ValueError(
            f"{section}top_p must be above 0 in float32, at least {LEAST_TOP_P:g}, got {top_p:g}; "
            "temperature 0 is greedy"
        )


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the responses to a prompt are sampled: the host's record.

    A new option of sampling touches three places: the config that sets it (RolloutConfig,
    EvalConfig), this record, and the column of the decode state that holds it for each slot
    (DecodeState, SlotRequest.columns, and engine.sampling.SlotSampling where tokens are drawn).

    Raises ValueError for values that no response can be sampled with.
    """

    num_samples: int  # responses to each prompt
    limit: int  # longest response in tokens, the end token included
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # likeliest tokens that are drawn from; 0: off
    top_p: float = 1.0  # probability of the likeliest tokens that are drawn from; 1: off
    record: bool = True  # with the experts of the tokens, where the engine records them

    def __post_init__(self):
        if self.limit < 1:
            raise ValueError(f"the limit of a response must be at least 1 token, got {self.limit}")
        check_sampling(
            num_samples=self.num_samples,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
        )


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
