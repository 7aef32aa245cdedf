"""Responses in turns: the model writes, its environment answers, and the model goes on.

Token in, token out: a response is the ids that were sampled and the ids of observations, one after
the other, and nothing that was sampled is ever encoded again. While environments are at work, the
sampler decodes other responses. Which tokens are sampled depends on (seed, uid, place in the
response) and on what the environments answered, never on when they did.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import queue
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.environments.episodes import INFRA, Episode
from distflow_jax.environments.failures import CallFailure
from distflow_jax.environments.handle import EnvironmentHandle, TryOutcome
from distflow_jax.environments.registry import Environments, Observed
from distflow_jax.images.turn_images import TurnImages, joined, of_prompt
from distflow_jax.rollout.requests import GroupRequest, Response
from distflow_jax.rollout.scheduling.scheduler import Scheduler

REDRAWS = 8  # times that a response is drawn anew whose environment has failed
WAIT_SECONDS = 0.1  # for an answer, before the caller can look at other things


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
    """A response that has begun.

    `sample` is its place in the group. One that is drawn anew is another request to the scheduler,
    `id`, of one response with a `key` of its own. `failed`: its environment could not even be
    reset, as often as that was tried.
    """

    group: "_Group"
    sample: int
    handle: EnvironmentHandle
    draws: int = 0  # that were lost before this one
    id: int | None = None
    key: int = 0
    first: Observed | None = None
    failed: bool = False
    parts: list["_Part"] = dataclasses.field(default_factory=list)
    routed_experts: np.ndarray | None = None  # of all of it up to the last turn
    turns: int = 0
    reward: float = 0.0
    logged: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens so far, observations included."""
        return sum(len(part.tokens) for part in self.parts)

    def count(self, name: str, value: float = 1.0) -> None:
        """Adds to a number that is logged."""
        self.logged[name] = self.logged.get(name, 0.0) + value

    def count_lost(self, lost: "_Conversation") -> None:
        """Takes over the failures of the one in whose place this one is drawn."""
        self.logged |= {name: lost.logged[name] for name in INFRA if name in lost.logged}
        self.count("infra/redrawn")


@dataclasses.dataclass(eq=False)
class _Group:
    """The responses to one prompt, which the scheduler calls by `id`.

    `first`: what all of them begin with, which the scheduler takes for part of the prompt. `heads`:
    what those began with that have ended before, int32 [M] each.
    """

    index: int
    request: GroupRequest  # of one turn
    limits: TurnLimits
    heads: list[np.ndarray]
    conversations: dict[int, _Conversation] = dataclasses.field(default_factory=dict)  # by sample
    first: Observed = dataclasses.field(default_factory=lambda: Observed(np.zeros(0, np.int32)))
    begun: bool = False  # it was handed to the scheduler


class TurnDriver:
    """The responses at work, between the scheduler and their environments.

    A response whose environment fails is drawn anew, with a sample number of its own: the number in
    its group plus a multiple of the group's size. One that was lost REDRAWS times more ends with
    the reward nan, and leaves its group.

    Attributes:
      done: episodes that have ended, by (request, sample).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        environments: Environments,
        on_response: Callable[[Response], None] | None,
    ):
        self.done: dict[tuple[int, int], Episode] = {}
        self._scheduler, self._environments = scheduler, environments
        self._on_response = on_response
        self._answers: queue.SimpleQueue[TryOutcome] = queue.SimpleQueue()
        self._by_handle: dict[int, _Conversation] = {}
        self._turns: list[tuple[_Conversation, Response]] = []  # that have ended in this round

    @property
    def live(self) -> int:
        """Responses that have begun and not ended."""
        return len(self._by_handle)

    @property
    def num_sampled(self) -> int:
        """Tokens in turns that the scheduler has ended, of responses that `done` has or that are
        at work."""
        parts = [part for c in self._by_handle.values() for part in c.parts]
        ended = sum(episode.num_sampled for episode in self.done.values())
        return ended + sum(int(part.mask.sum()) for part in parts)

    def begin(self, index: int, request: GroupRequest, ended: Mapping[int, Episode]) -> None:
        """Resets the environments of one prompt's responses but for those that have `ended`.

        The request's limit is that of whole responses, with all their turns.
        """
        limits = TurnLimits.of(self._environments, request.sampling.limit)
        request = dataclasses.replace(request, hold=True).with_limit(limits.turn)
        read = [e for e in ended.values() if e.reason != "failed"]
        heads = [e.response.tokens[: int(e.mask.argmax())] for e in read]
        group = _Group(index, request, limits, heads)
        for sample in request.samples:
            if sample not in ended:
                self._reset(group, sample)

    def take_answers(self, *, wait: bool) -> None:
        """Continues responses whose environments have answered; draws those anew whose environment
        has failed.

        With `wait` it sleeps until there is something to do, at most for WAIT_SECONDS.
        EnvironmentsFailed where too many calls fail, or hang.
        """
        if wait and self._by_handle:
            with contextlib.suppress(queue.Empty):
                self._take(self._environments.loop.take(self._answers, WAIT_SECONDS))
        while not self._answers.empty():
            self._take(self._answers.get())

    def step(self) -> None:
        """A round of the scheduler, if it is busy; goes on with the turns that have ended."""
        if self._scheduler.busy:
            self._scheduler.step()
        turns, self._turns = self._turns, []
        for conversation, turn in turns:
            self._turn_ended(conversation, turn)

    def cancel(self, index: int) -> None:
        """Ends a request, whatever its responses are at; nothing of it is in `done` then."""
        for conversation in [c for c in self._by_handle.values() if c.group.index == index]:
            self._forget(conversation)
            if conversation.id is not None:
                self._scheduler.abort(conversation.id)
        self._turns = [entry for entry in self._turns if entry[0].group.index != index]
        self.done = {key: episode for key, episode in self.done.items() if key[0] != index}

    def close(self) -> None:
        """Ends all environments that are left; does not wait for them."""
        for conversation in list(self._by_handle.values()):
            self._forget(conversation)

    # -- turns and answers ------------------------------------------------------------------------

    def _reset(self, group: _Group, sample: int, draws: int = 0) -> _Conversation:
        handle = EnvironmentHandle(self._environments, group.request.prompt, self._answers)
        counts = dict.fromkeys(self._environments.counts, 0.0)
        conversation = _Conversation(group, sample, handle, draws, key=sample, logged=counts)
        group.conversations[sample] = self._by_handle[handle.number] = conversation
        handle.reset()
        return conversation

    def _forget(self, conversation: _Conversation) -> None:
        conversation.handle.close()
        del self._by_handle[conversation.handle.number]

    def _keep_turn(self, conversations: Mapping[int, _Conversation], turn: Response) -> None:
        """Keeps a turn until the scheduler's round is over, as none is extended within one.

        The request's conversations, by key, tell whose it is: uids of two nodes that sample to one
        prompt are alike.
        """
        self._turns.append((conversations[turn.sample], turn))

    def _turn_ended(self, conversation: _Conversation, turn: Response) -> None:
        """Hands a turn of the model to its environment, or ends the response."""
        conversation.parts.append(_Part.of(turn))
        conversation.routed_experts = turn.routed_experts
        conversation.turns += 1
        if conversation.failed:
            self._end(conversation, "failed")
        elif not turn.finished:
            full = conversation.length >= conversation.group.limits.response
            self._end(conversation, "response_length" if full else "turn_length")
        else:
            conversation.handle.step(turn.tokens)

    def _take(self, answer: TryOutcome) -> None:
        conversation = self._by_handle.get(answer.handle)
        if conversation is None:
            return  # its response has ended
        outcome, method = answer.outcome, "reset" if conversation.id is None else "step"
        if isinstance(outcome, CallFailure):
            conversation.count(f"infra/{outcome.cause}")
            self._environments.failures.count(method, outcome)
            self._environments.loop.check_hung()
            if answer.last:
                self._fail(conversation)
            return
        self._environments.failures.count(method, None)
        if conversation.id is None:
            conversation.first = outcome
            self._submit_if_ready(conversation)
        else:
            self._go_on(conversation, outcome)

    def _fail(self, conversation: _Conversation) -> None:
        """Draws a response anew whose environment has failed, or has it leave its group."""
        if conversation.draws < REDRAWS:
            self._forget(conversation)
            if conversation.id is not None:
                self._scheduler.held.release(conversation.id, conversation.key)
            anew = self._reset(conversation.group, conversation.sample, conversation.draws + 1)
            anew.count_lost(conversation)
        elif conversation.id is None:
            conversation.failed = True  # the scheduler samples a turn of it, which fills its place
            self._submit_if_ready(conversation)
        else:
            self._end(conversation, "failed")

    def _go_on(self, conversation: _Conversation, observed: Observed) -> None:
        """Adds the environment's answer to a turn, and has the model write the next one."""
        conversation.reward += observed.reward
        for name, value in observed.logged.items():
            conversation.count(name, value)
        length, limits = conversation.length + len(observed.tokens), conversation.group.limits
        if observed.done:
            self._end(conversation, "done")
        elif conversation.turns == limits.turns:
            self._end(conversation, "max_turns")
        elif length >= limits.response:
            self._end(conversation, "response_length")
        else:
            conversation.parts.append(_Part.observed(observed.tokens, observed.shown))
            limit = min(length + limits.turn, limits.response)
            limit -= len(conversation.group.first.tokens)
            self._scheduler.held.extend(
                conversation.id, conversation.key, observed.tokens, limit, observed.shown
            )

    def _submit_if_ready(self, conversation: _Conversation) -> None:
        """Hands a prompt to the scheduler once the environments of all its responses are reset, or
        once more for a response that is drawn anew."""
        group = conversation.group
        if group.begun:
            self._compare_first(conversation)
            size = len(group.request.samples)
            conversation.key = conversation.sample + size * conversation.draws
            self._submit({conversation.key: conversation}, group)
        elif all(c.first or c.failed for c in group.conversations.values()):
            group.begun = True
            self._find_first(group)
            for run in _runs(group.conversations):
                self._submit({sample: group.conversations[sample] for sample in run}, group)

    def _submit(self, conversations: Mapping[int, _Conversation], group: _Group) -> None:
        """Has the responses of consecutive keys sampled, behind the group's first observation."""
        request, first = group.request, group.first
        if len(first.tokens):
            for conversation in conversations.values():
                conversation.parts.append(_Part.observed(first.tokens, first.shown))
            limit = min(request.sampling.limit, group.limits.response - len(first.tokens))
            prompt = _with_first(request.prompt, first)
            request = dataclasses.replace(request, prompt=prompt).with_limit(limit)
        sampling = dataclasses.replace(request.sampling, num_samples=len(conversations))
        request = dataclasses.replace(request, sampling=sampling, first_sample=min(conversations))
        keep = functools.partial(self._keep_turn, dict(conversations))
        identity = self._scheduler.submit(request, keep)
        for conversation in conversations.values():
            conversation.id = identity

    def _find_first(self, group: _Group) -> None:
        """Finds the first observation of all responses to a prompt; those with another one fail."""
        reset = [c for c in group.conversations.values() if not c.failed]
        if not reset:
            return
        tokens = len(reset[0].first.tokens)
        room = self._scheduler.engine.config.max_prompt - len(group.request.prompt.tokens)
        room = min(group.limits.response - 1, room)
        if tokens <= room:
            group.first = reset[0].first
            for conversation in reset:
                self._compare_first(conversation)
            return
        what = (
            f"the first observation has {tokens} tokens, more than the {room} that "
            "data.max_prompt_length and rollout.max_response_length leave to it"
        )
        self._environments.failures.tell("first observation too long", what)
        for conversation in reset:
            conversation.failed = True

    def _compare_first(self, conversation: _Conversation) -> None:
        """Fails a response that begins with another observation than its group."""
        group, first = conversation.group, conversation.first
        if conversation.failed:
            return
        alike = all(np.array_equal(first.tokens, head) for head in group.heads)
        if not (alike and first.looks_like(group.first)):
            conversation.failed = True
            self._environments.failures.tell(
                "first observations differ",
                "reset() gave different first observations for the responses to one prompt; let "
                "them follow from the prompt",
            )

    def _end(self, conversation: _Conversation, reason: str) -> None:
        group, sample = conversation.group, conversation.sample
        self._scheduler.held.release(conversation.id, conversation.key)
        self._forget(conversation)
        *columns, _ = zip(*conversation.parts, strict=True)
        tokens, logp, margin, version, mask = (np.concatenate(x) for x in columns)
        shown = joined((len(part.tokens), part.shown) for part in conversation.parts)
        prompt = group.request.prompt
        # a turn is what a response ends with: nothing was added since they were read
        experts = conversation.routed_experts
        whole = Response(
            prompt, sample, tokens, logp, margin, reason == "done", version, experts, shown
        )
        reward = math.nan if reason == "failed" else conversation.reward
        episode = Episode(whole, mask, reward, conversation.turns, reason, conversation.logged)
        self.done[group.index, sample] = episode
        if self._on_response is not None:
            self._on_response(whole)


def _runs(samples: Iterable[int]) -> list[list[int]]:
    """Numbers as runs of consecutive ones."""
    places = itertools.groupby(enumerate(sorted(samples)), lambda entry: entry[1] - entry[0])
    return [[sample for _, sample in run] for _, run in places]


def _with_first(prompt: Prompt, first: Observed) -> Prompt:
    """The prompt with the observation that all responses to it begin with."""
    tokens = np.concatenate([prompt.tokens, first.tokens])
    before = of_prompt(prompt.images, prompt.patch)
    seen = joined([(len(prompt.tokens), before), (len(first.tokens), first.shown)])
    if seen is None:
        return dataclasses.replace(prompt, tokens=tokens)
    return dataclasses.replace(prompt, tokens=tokens, images=seen.images, patch=seen.patch)
