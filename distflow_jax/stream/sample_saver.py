"""The samples of one process for checkpoints, and the account of its tokens."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distflow_jax.batch import Samples
from distflow_jax.checkpoint.additions import AdditionWriter
from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.parallel import processes
from distflow_jax.stream.group_records import GroupRecords
from distflow_jax.stream.host_nodes import Group
from distflow_jax.stream.producer import Producer, complete_samples
from distflow_jax.stream.saved_samples import to_arrays
from distflow_jax.stream.schedule import Cut
from distflow_jax.stream.tasks import Key
from distflow_jax.stream.token_account import TokenAccount


@dataclasses.dataclass(eq=False)
class _Owed:
    """A checkpoint to which samples are to be added."""

    step: int
    account: TokenAccount  # when it was saved
    start: int  # first counter
    end: int | None = None  # first counter after those of its steps, once it is known
    groups: dict[int, Group] = dataclasses.field(default_factory=dict)


class SampleSaver:
    """Adds the samples of groups that ran ahead to checkpoints.

    Without `steps`, at once what there is, tokens of responses under way too. With it, the whole
    groups of so many steps that follow the checkpoint's: those that older weights sample, which
    nobody has after a restart. They are added as soon as they are complete.
    """

    def __init__(
        self,
        producer: Producer,
        writer: AdditionWriter,
        records: GroupRecords,
        account: TokenAccount,
        *,
        steps: int | None,
        evaluates: Callable[[int], bool] = lambda version: False,
    ):
        """`records`: of what was trained on; `account`: this process's, when the run began;
        `evaluates(version)`: whether an evaluation is recorded some steps after its version."""
        self._evaluates, self._recorded = evaluates, producer.admission.finished - 1
        self._producer, self._writer, self._steps = producer, writer, steps
        self._records, self._start = records, account
        self._taken: dict[str, Any] = {}  # of the step that is trained
        self._trained = self._filtered = 0  # tokens, since the run began
        self._owed: list[_Owed] = []  # under the producer's lock

    @property
    def settled(self) -> bool:
        """Whether no checkpoint waits for samples."""
        return not self._owed

    def took(self, cut: Cut, groups: Sequence[Group]) -> TokenAccount:
        """Notes the groups that a step has taken; returns the token account. Under the lock."""
        kept = {group.counter for group in groups} & set(cut.kept)
        for group in groups:
            if group.counter in kept:
                self._trained += group.tokens
            else:
                self._filtered += group.tokens
        account = self.account()
        left_out = {group.counter for group in groups} - kept
        self._taken = {"step": cut.step, "counters": sorted(kept), "left_out": sorted(left_out)}
        self._taken["tokens"] = account.to_dict()
        return account

    def record(self, samples: Samples) -> None:
        """Records this process's samples that the step trained on, which was taken last."""
        self._records.write(samples, **self._taken)

    def account(self) -> TokenAccount:
        """This process's tokens so far; under the lock."""
        counts, start = self._producer.counts(), self._start
        return TokenAccount(
            sampled=start.sampled + counts.tokens,
            trained=start.trained + self._trained,
            filtered=start.filtered + self._filtered,
            lost=start.lost + self._producer.saved.left_out,
            under_way=counts.under_way,
        )

    def total_account(self) -> TokenAccount:
        """The token account of all processes together, for a checkpoint that holds no samples.
        Collective."""
        with self._producer.lock:
            mine = self.account().saved(under_way=0)
        return TokenAccount.total(processes.all_gather_json(mine.to_dict()))

    def save(self, step: int, at_rest: contextlib.AbstractContextManager[None]) -> None:
        """Adds the samples to the checkpoint of a step, now or later.

        `at_rest`: a block in which no round of the sampler runs.
        """
        producer = self._producer
        if self._steps is None:
            with at_rest, producer.lock:
                progress, account = producer.progress(), self.account()
            self._write(step, progress, account)
            return
        with producer.lock:
            self._owed.append(_Owed(step, self.account(), producer.admission.position))
        self.settle()

    def settle(self) -> None:
        """Adds the samples that are complete now. From any thread."""
        settled: list[tuple[_Owed, Sequence[Group]]] = []
        producer = self._producer
        with producer.lock:
            for owed in list(self._owed):
                before = range(self._recorded + 1, owed.step)
                unrecorded = any(self._evaluates(version) for version in before)
                owed.groups |= {c: g for c, g in producer.groups.items() if c >= owed.start}
                if owed.end is None:
                    owed.end = producer.admission.end_of(owed.step + (self._steps or 0))
                if owed.end is None or not producer.begun_up_to(owed.end):
                    continue
                groups = [group for c, group in owed.groups.items() if c < owed.end]
                if all(group.done for group in groups) and not unrecorded:
                    self._owed.remove(owed)
                    settled.append((owed, groups))
        for owed, groups in settled:
            self._write(owed.step, complete_samples(groups), owed.account)

    def recorded(self, version: int) -> None:
        """Notes that evaluations up to a version are recorded: a run that goes on from a checkpoint
        makes none of a version before it."""
        with self._producer.lock:
            self._recorded = max(self._recorded, version)
        self.settle()

    def check(self) -> None:
        """Raises the error of a disk that could not take samples."""
        self._writer.check()

    def wait(self, seconds: float) -> None:
        """Waits until what was added is written, at most so long."""
        self._writer.wait(seconds)

    def _write(self, step: int, progress: Mapping[Key, Progress], account: TokenAccount) -> None:
        arrays, facts = to_arrays(progress)
        under_way = sum(found.num_sampled for found in progress.values())
        facts["max_staleness"] = self._producer.admission.rule.max_staleness
        with self._producer.lock:
            facts |= self._producer.facts()
        self._writer.add(step, arrays, facts | {"account": account.saved(under_way).to_dict()})
