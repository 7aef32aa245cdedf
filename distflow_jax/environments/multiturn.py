"""Responses in turns: the model writes, its environment answers, and the model goes on.

Token in, token out: a response is the ids that were sampled and the ids of observations, one after
the other, and nothing that was sampled is ever encoded again. While environments are at work, the
sampler decodes other responses. Which tokens are sampled depends on (seed, uid, place in the
response) and on what the environments answered, never on when they did.
"""

import collections
import dataclasses
import functools
import math
import queue
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.environments.episodes import Episode
from distflow_jax.environments.registry import (
    Answer,
    Environments,
    EnvironmentThread,
    Failure,
    Observed,
)
from distflow_jax.images.turn_images import TurnImages, joined, of_prompt
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.requests import (
    GroupRequest,
    Response,
    RolloutStats,
    SamplingParams,
)
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.rollout.scheduling.scheduler import Scheduler


@dataclasses.dataclass(frozen=True)
class TurnLimits:
    """The longest a response may become."""

    response: int  # tokens, end tokens and observations included
    turn: int  # sampled tokens of one turn, the end token included
    turns: int  # turns of the model

    @classmethod
    def of(cls, environments: Environments, response: int) -> "TurnLimits":
        """The limits of a run's environments, for responses of up to so many tokens."""
        turn = min(environments.turn_length or response, response)
        return cls(response, turn, environments.max_turns)


def sample_turns(
    engine: RolloutEngine,
    state: SamplerState,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    environments: Environments,
    *,
    on_response: Callable[[Response], None] | None = None,
) -> tuple[SamplerState, list[Episode], RolloutStats]:
    """Samples responses in turns to each prompt; they are ordered by (prompt, sample).

    The limit of `sampling` holds for all turns of a response together. `on_response` is called in
    this thread as soon as a response ends.
    """
    limits = TurnLimits.of(environments, sampling.limit)
    requests = [GroupRequest(p, sampling, hold=True).with_limit(limits.turn) for p in prompts]
    scheduler = Scheduler(engine, state.params, version=state.version, state=state.decode)
    # a response keeps its slot while its environment is at work
    most = engine.max_concurrent_decodes
    episodes = run_turns(
        scheduler, requests, environments, limits, most=most, on_response=on_response
    )
    return dataclasses.replace(state, decode=scheduler.close()), episodes, scheduler.stats


class _Part(NamedTuple):
    """Tokens of a response that were sampled or observed together, [T] each."""

    tokens: np.ndarray
    logp: np.ndarray
    margin: np.ndarray
    version: np.ndarray
    mask: np.ndarray
    shown: TurnImages | None = None  # images among them

    @classmethod
    def of(cls, turn: Response) -> "_Part":
        """The tokens of one turn of the model."""
        mask = np.ones(len(turn.tokens), bool)
        return cls(turn.tokens, turn.logp, turn.margin, turn.version, mask)

    @classmethod
    def observed(cls, tokens: np.ndarray, shown: TurnImages | None) -> "_Part":
        """Tokens int32 [T] of an observation, with an infinite margin: none is a near-tie.

        `shown`: the images among them.
        """
        count = len(tokens)
        logp, margin = np.zeros(count, np.float32), np.full(count, np.inf, np.float32)
        version = np.zeros(count, np.int32)
        return cls(tokens, logp, margin, version, np.zeros(count, bool), shown)


@dataclasses.dataclass(eq=False)
class _Conversation:
    """A response that has begun. `failed` is set where its environment could not even be reset."""

    group: "_Group"
    sample: int
    thread: EnvironmentThread
    first: Observed | None = None
    failed: str = ""
    parts: list["_Part"] = dataclasses.field(default_factory=list)
    routed_experts: np.ndarray | None = None  # of all of it up to the last turn
    turns: int = 0
    reward: float = 0.0
    logged: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens so far, observations included."""
        return sum(len(part.tokens) for part in self.parts)


@dataclasses.dataclass(eq=False)
class _Group:
    """The responses to one prompt, which the scheduler calls by `id`.

    `first`: what all of them begin with, which the scheduler takes for part of the prompt.
    """

    index: int
    request: GroupRequest
    conversations: dict[int, _Conversation] = dataclasses.field(default_factory=dict)  # by sample
    first: Observed = dataclasses.field(default_factory=lambda: Observed(np.zeros(0, np.int32)))
    id: int | None = None


def run_turns(
    scheduler: Scheduler,
    requests: Sequence[GroupRequest],
    environments: Environments,
    limits: TurnLimits,
    *,
    most: int,
    on_response: Callable[[Response], None] | None = None,
) -> list[Episode]:
    """Answers all requests; episodes in (request, sample) order.

    At most `most` responses run at a time, or one group if that is more; prompts with the longest
    expected responses come first.
    """
    driver = TurnDriver(scheduler, environments, limits, on_response)
    order = sorted(range(len(requests)), key=lambda i: (-requests[i].prompt.expected_length, i))
    pending = collections.deque(order)
    try:
        while pending or driver.live:
            while pending and (
                not driver.live or driver.live + requests[pending[0]].sampling.num_samples <= most
            ):
                index = pending.popleft()
                driver.begin(index, requests[index])
            driver.take_answers(wait=not scheduler.busy or scheduler.stalled)
            driver.step()
    finally:
        driver.close()
    return [driver.done[key] for key in sorted(driver.done)]


class TurnDriver:
    """The responses at work, between the scheduler and the threads of their environments.

    Attributes:
      done: episodes that have ended, by (request, sample).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        environments: Environments,
        limits: TurnLimits,
        on_response: Callable[[Response], None] | None,
    ):
        self.done: dict[tuple[int, int], Episode] = {}
        self._scheduler, self._environments, self._limits = scheduler, environments, limits
        self._on_response = on_response
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._by_thread: dict[int, _Conversation] = {}
        self._turns: list[tuple[_Group, Response]] = []  # that have ended in this round

    @property
    def live(self) -> int:
        """Responses that have begun and not ended."""
        return len(self._by_thread)

    @property
    def num_sampled(self) -> int:
        """Tokens in turns that the scheduler has ended, of responses that `done` has or that are
        at work."""
        parts = [part for c in self._by_thread.values() for part in c.parts]
        ended = sum(episode.num_sampled for episode in self.done.values())
        return ended + sum(int(part.mask.sum()) for part in parts)

    def begin(self, index: int, request: GroupRequest) -> None:
        """Resets the environments of one prompt's responses."""
        group = _Group(index, request)
        for sample in request.samples:
            thread = EnvironmentThread(self._environments, self._answers)
            conversation = _Conversation(group, sample, thread)
            group.conversations[sample] = conversation
            self._by_thread[thread.number] = conversation
            thread.reset(request.prompt)

    def take_answers(self, *, wait: bool) -> None:
        """Continues responses whose environments have answered; ends those that are too late.

        With `wait` it sleeps until there is something to do.
        """
        deadline = min((c.thread.deadline for c in self._by_thread.values()), default=math.inf)
        if wait and deadline < math.inf:
            try:
                self._take(self._answers.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                pass
        # deadlines are looked at last: what has come while a decode call ran has come in time
        while not self._answers.empty():
            self._take(self._answers.get())
        now = time.monotonic()
        for conversation in list(self._by_thread.values()):
            if conversation.thread.deadline <= now:
                self._too_late(conversation)

    def step(self) -> None:
        """A round of the scheduler, if it is busy; goes on with the turns that have ended."""
        if self._scheduler.busy:
            self._scheduler.step()
        turns, self._turns = self._turns, []
        for group, turn in turns:
            self._turn_ended(group.conversations[turn.sample], turn)

    def close(self) -> None:
        """Ends all threads that are left; does not wait for them."""
        for conversation in self._by_thread.values():
            conversation.thread.close()

    # -- turns and answers ------------------------------------------------------------------------

    def _keep_turn(self, group: _Group, turn: Response) -> None:
        """Keeps a turn until the scheduler's round is over, as none is extended within one.

        The group tells whose it is: uids of two nodes that sample to one prompt are alike.
        """
        self._turns.append((group, turn))

    def _turn_ended(self, conversation: _Conversation, turn: Response) -> None:
        """Hands a turn of the model to its environment, or ends the response."""
        conversation.parts.append(_Part.of(turn))
        conversation.routed_experts = turn.routed_experts
        conversation.turns += 1
        if not turn.finished:
            full = conversation.length >= self._limits.response
            reason = "response_length" if full else "turn_length"
            self._end(conversation, conversation.failed or reason)
        elif conversation.failed:
            self._end(conversation, conversation.failed)
        else:
            conversation.thread.step(turn.tokens)

    def _take(self, answer: Answer) -> None:
        conversation = self._by_thread.get(answer.thread)
        if conversation is None or not conversation.thread.is_answer(answer):
            return  # it came too late
        outcome = answer.outcome
        if isinstance(outcome, Failure):
            self._environments.log_once(outcome.place, outcome.error)
            self._fail(conversation, "error")
        elif conversation.group.id is None:
            conversation.first = outcome
            self._submit_if_ready(conversation.group)
        else:
            self._go_on(conversation, outcome)

    def _too_late(self, conversation: _Conversation) -> None:
        seconds = self._environments.seconds
        self._environments.log_once(
            "deadline", f"gave no answer within rollout.environment_seconds={seconds:g}"
        )
        conversation.thread.close()
        self._fail(conversation, "deadline")

    def _fail(self, conversation: _Conversation, reason: str) -> None:
        if conversation.group.id is None:
            # the scheduler samples all responses to a prompt: this one gets a single turn
            conversation.failed = reason
            self._submit_if_ready(conversation.group)
        else:
            self._end(conversation, reason)

    def _go_on(self, conversation: _Conversation, observed: Observed) -> None:
        """Adds the environment's answer to a turn, and has the model write the next one."""
        conversation.reward += observed.reward
        for name, value in observed.logged.items():
            conversation.logged[name] = conversation.logged.get(name, 0.0) + value
        length = conversation.length + len(observed.tokens)
        if observed.done:
            self._end(conversation, "done")
        elif conversation.turns == self._limits.turns:
            self._end(conversation, "max_turns")
        elif length >= self._limits.response:
            self._end(conversation, "response_length")
        else:
            conversation.parts.append(_Part.observed(observed.tokens, observed.shown))
            group = conversation.group
            limit = min(length + self._limits.turn, self._limits.response) - len(group.first.tokens)
            self._scheduler.held.extend(
                group.id, conversation.sample, observed.tokens, limit, observed.shown
            )

    def _submit_if_ready(self, group: _Group) -> None:
        """Hands a prompt to the scheduler once the environments of all its responses are reset."""
        conversations = group.conversations.values()
        if not all(c.first or c.failed for c in conversations):
            return
        reset = [c for c in conversations if not c.failed]
        if reset:
            group.first = self._common_observation(reset)
        request, first = group.request, group.first
        if len(first.tokens):
            for conversation in conversations:
                conversation.parts.append(_Part.observed(first.tokens, first.shown))
            limit = min(request.sampling.limit, self._limits.response - len(first.tokens))
            prompt = _with_first(request.prompt, first)
            request = dataclasses.replace(request, prompt=prompt).with_limit(limit)
        group.id = self._scheduler.submit(request, functools.partial(self._keep_turn, group))

    def _common_observation(self, reset: list[_Conversation]) -> Observed:
        """The first observation of all responses to a prompt; those with another one fail."""
        first = reset[0].first
        room = self._scheduler.engine.config.max_prompt
        room = min(self._limits.response - 1, room - len(reset[0].group.request.prompt.tokens))
        if len(first.tokens) > room:
            what = (
                f"the first observation has {len(first.tokens)} tokens, more than the {room} that "
                "data.max_prompt_length and rollout.max_response_length leave to it"
            )
            self._environments.log_once("first observation too long", what)
            for conversation in reset:
                conversation.failed = "error"
            return Observed(np.zeros(0, np.int32))
        for conversation in reset:
            if not _same(conversation.first, first):
                conversation.failed = "error"
                self._environments.log_once(
                    "first observations differ",
                    "reset() gave different first observations for the responses to one prompt; "
                    "let them follow from the prompt",
                )
        return first

    def _end(self, conversation: _Conversation, reason: str) -> None:
        group, sample = conversation.group, conversation.sample
        self._scheduler.held.release(group.id, sample)
        conversation.thread.close()
        del self._by_thread[conversation.thread.number]
        *columns, _ = zip(*conversation.parts, strict=True)
        tokens, logp, margin, version, mask = (np.concatenate(x) for x in columns)
        shown = joined((len(part.tokens), part.shown) for part in conversation.parts)
        prompt = group.request.prompt
        # a turn is what a response ends with: nothing was added since they were read
        experts = conversation.routed_experts
        whole = Response(
            prompt, sample, tokens, logp, margin, reason == "done", version, experts, shown
        )
        self.done[group.index, sample] = Episode(
            whole, mask, conversation.reward, conversation.turns, reason, conversation.logged
        )
        if self._on_response is not None:
            self._on_response(whole)


def _same(one: Observed, other: Observed) -> bool:
    """Whether two observations have the same tokens and images."""
    if not np.array_equal(one.tokens, other.tokens):
        return False
    return other.shown is None if one.shown is None else one.shown.same_as(other.shown)


def _with_first(prompt: Prompt, first: Observed) -> Prompt:
    """The prompt with the observation that all responses to it begin with."""
    tokens = np.concatenate([prompt.tokens, first.tokens])
    before = of_prompt(prompt.images, prompt.patch)
    seen = joined([(len(prompt.tokens), before), (len(first.tokens), first.shown)])
    if seen is None:
        return dataclasses.replace(prompt, tokens=tokens)
    return dataclasses.replace(prompt, tokens=tokens, images=seen.images, patch=seen.patch)
