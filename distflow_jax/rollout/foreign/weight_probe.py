"""A probe after each load of weights: an engine's log-probs are held against those of this machine.

The engine samples short responses to prompts of random ids. Their log-probs must be near those by
the weights that it was given (`gap`), and must not lie on the way from these to the weights before
(`share`): an engine that took none of a load, or a part of it, is a share of the way back. N
responses of T tokens.
"""

import collections
import dataclasses
import logging
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distflow_jax.rollout.foreign.engine_protocol import (
    Answer,
    EngineError,
    EngineRequest,
    Failure,
    ForeignEngine,
    checked_columns,
)
from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.rollout.response_checks import RefusedAnswer, ResponseLimits

PROMPTS, PROMPT_TOKENS, TOKENS = 8, 16, 16  # of a probe; TOKENS: of a response, at most
MOST_GAP = 0.1  # nats per token that an engine may be off by its first load
LEAST_GAP = 0.002  # nats per token that are no fault, however close the engine was before, unless
# they are MOST_SHARE of the step that the weights have made
MOST_TIMES = 4.0  # the usual gap of an engine
MOST_SHARE = 0.05  # of the way to the weights before, beyond what noise explains
DEVIATIONS = 3.0  # of the share, that noise explains
USUAL = 16  # last probes that say what an engine's gap is
COUNTER = 1 << 30  # of the first prompt of a probe: above those of a run
MOST_TRIES = 5  # of one of its requests
ANSWER_SECONDS = 0.05  # that a look at answers waits

Columns = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens, log-probs, versions, [T] each
# (params, prompts, responses), int32 [P] and [T] each -> log-probs of the responses' tokens at the
# temperature that the run samples at, float32 [T] each
OwnLogp = Callable[[Any, Sequence[np.ndarray], Sequence[np.ndarray]], list[np.ndarray]]

log = logging.getLogger("distflow_jax")


class WrongWeights(EngineError):
    """An engine samples with other weights than it was given."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """Results of a probe.

    Attributes:
      gap: mean distance of the engine's log-probs from ours, nats per token.
      step: of ours by the weights before, nats per token; 0: these are not known.
      share: of the way to the weights before that the engine is at.
      error: standard error of the share.
    """

    gap: float
    step: float = 0.0
    share: float = 0.0
    error: float = 0.0

    @classmethod
    def of(cls, found: np.ndarray, now: np.ndarray, before: np.ndarray | None = None) -> "Reading":
        """Of an engine's log-probs, and those by the weights now and before, float [T] each."""
        off = (found - now).astype(np.float64)
        gap = float(np.abs(off).mean())
        step = np.zeros(len(off)) if before is None else (before - now).astype(np.float64)
        length = float(step @ step)
        if not length:
            return cls(gap)
        share = float(off @ step) / length
        noise = float(np.square(off - share * step).sum()) / max(1, len(off) - 1)
        return cls(gap, float(np.abs(step).mean()), share, float(np.sqrt(noise / length)))

    def fault(self, usual: Sequence[float], most_gap: float) -> str:
        """The fault, a part of a sentence; "": nothing that the probe can see. `usual`: gaps of
        earlier loads; `most_gap`: of a first one."""
        if self.share - DEVIATIONS * self.error > MOST_SHARE:
            return (
                f"its log-probs are {self.share:.0%} of the way back to the weights before: it has "
                "loaded a part of these, or none (are its embeddings tied? docs/foreign_engines.md)"
            )
        limit = most_gap
        if usual:
            least = min(LEAST_GAP, MOST_SHARE * self.step) if self.step else LEAST_GAP
            limit = min(limit, max(least, MOST_TIMES * statistics.median(usual)))
        if not self.gap <= limit:
            return (
                f"its log-probs are {self.gap:.3g} nats per token from those of these weights, "
                f"above {limit:.3g}: it has others"
            )
        return ""


class WeightProbe:
    """Probes one engine."""

    def __init__(
        self,
        limits: ResponseLimits,
        own: OwnLogp,
        sampling: SamplingParams,
        *,
        most_gap: float = MOST_GAP,
    ):
        """`own`: this machine's log-probs; `sampling`: of the run; `most_gap`: see MOST_GAP."""
        self._limits, self._own, self._most_gap = limits, own, most_gap
        limit = min(TOKENS, sampling.limit)
        self._sampling = dataclasses.replace(sampling, num_samples=1, limit=limit)
        self._usual: collections.deque[float] = collections.deque(maxlen=USUAL)
        self._probes = 0

    def __call__(
        self, engine: ForeignEngine, params: Any, before: Any, version: int
    ) -> list[Answer | Failure]:
        """Holds an engine that has loaded `params` against them, and against those `before`; None:
        it is not known what it had. Returns answers to other requests that came meanwhile.

        WrongWeights with what is wrong; EngineError if one of its answers is none, several times.
        """
        requests = self._requests(engine)
        found, others = self._answers(engine, requests, version)
        prompts = [request.tokens for request in requests.values()]
        columns = [found[number] for number in requests]
        responses = [tokens for tokens, _, _ in columns]

        def own(weights: Any) -> np.ndarray:
            return np.concatenate(self._own(weights, prompts, responses))

        sampled = np.concatenate([logp for _, logp, _ in columns])
        reading = Reading.of(sampled, own(params), None if before is None else own(before))
        if fault := reading.fault(self._usual, self._most_gap):
            raise WrongWeights(f"{engine.name} did not load version {version} rightly: {fault}")
        self._usual.append(reading.gap)
        return others

    def _requests(self, engine: ForeignEngine) -> dict[int, EngineRequest]:
        """The requests of the next probe, by their ids, which are negative."""
        length = min(PROMPT_TOKENS, engine.longest_prompt or PROMPT_TOKENS)
        draw = np.random.default_rng(self._probes)
        ids = np.setdiff1d(np.arange(self._limits.vocab_size), list(self._limits.stops))
        requests = {}
        for place in range(PROMPTS):
            number = -1 - PROMPTS * self._probes - place
            tokens = draw.choice(ids, length).astype(np.int32)
            requests[number] = EngineRequest(number, COUNTER - number, 0, tokens, self._sampling)
        self._probes += 1
        return requests

    def _answers(
        self, engine: ForeignEngine, requests: dict[int, EngineRequest], version: int
    ) -> tuple[dict[int, Columns], list[Answer | Failure]]:
        """(tokens, log-probs and versions of the requests by their ids, answers to others that came
        meanwhile). A request that fails is made again."""
        for request in requests.values():
            engine.submit([request])
        found: dict[int, Columns] = {}
        others: list[Answer | Failure] = []
        tries = collections.Counter[int]()
        while len(found) < len(requests):
            for entry in engine.results(ANSWER_SECONDS):
                if entry.id not in requests:
                    others.append(entry)
                    continue
                try:
                    found[entry.id] = self._columns(entry, version)
                except RefusedAnswer as error:
                    request, tries[entry.id] = requests[entry.id], tries[entry.id] + 1
                    text = (
                        f"{engine.name}: response {request.sample} of prompt {request.counter}, "
                        f"try {tries[entry.id]} of {MOST_TRIES}: {error} (a probe of its weights)"
                    )
                    if tries[entry.id] == MOST_TRIES:
                        raise EngineError(text) from error
                    log.warning("%s", text)
                    engine.submit([request])
        return found, others

    def _columns(self, answer: Answer | Failure, version: int) -> Columns:
        """Tokens, log-probs and versions of an answer. Raises RefusedAnswer."""
        if isinstance(answer, Failure):
            raise RefusedAnswer(answer.reason)
        limit = self._sampling.limit
        return checked_columns(answer, self._limits, limit=limit, held=version, known=version)
