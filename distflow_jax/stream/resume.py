"""Samples, token accounts and records that an asynchronous run keeps for its next start.

WORKDIR/groups/PROCESS.jsonl has one line per step. "counters": the prompts that the step trains.
"left_out": prompts dropped by a region's filter. "uid": [counter, number] of each response, with
"version": [lowest, highest] of its tokens, and "age": the age of its oldest token in steps.
"tokens": this process's token account. "workers": by name, the prompts for which each worker
sampled tokens, as far as this start knows. "gaps": by name, the mean gap of log-probs between
trainer and sampler over these prompts, in nats per token, where measured. Every process writes its
own file, so the whole run can be checked from its files. WORKDIR/groups/start.json has the last
"step" before the newest start, and the tokens "sampled" by all earlier starts. Samples are
additions to checkpoints (saved_samples.py).
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.batch import Samples
from distflow_jax.checkpoint.additions import AdditionWriter
from distflow_jax.cluster import processes
from distflow_jax.coordinator.batch_metrics import Gap, Gaps, mean_gap
from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.layout import VERSION, Metrics, Parts
from distflow_jax.report.json_lines import append, complete_lines, write_atomic
from distflow_jax.report.run_writer import truncate_metrics
from distflow_jax.stream.host_nodes import Group
from distflow_jax.stream.producer import Producer, complete_samples
from distflow_jax.stream.saved_samples import Arrays, to_arrays
from distflow_jax.stream.schedule import Cut
from distflow_jax.stream.tasks import Key

FOLDER, START = "groups", "start.json"
ACCOUNT = "account"  # in the place of a node's id
PREFIX = "perf/tokens/"


@dataclasses.dataclass
class TokenAccount:
    """Tokens of one process: sampled = trained + filtered + lost + under way, summed over all.

    Counts start with the run and span all restarts. Tokens that a killed process sampled after its
    last record are unknown, and not counted.
    """

    trained: int = 0  # of groups that a step took and trains on
    # of groups that a step took and leaves out, by the filter decision of a region
    filtered: int = 0
    lost: int = 0  # at restarts: sampled after the checkpoint, or not saved in it
    under_way: int = 0  # of responses that have begun, and of groups that wait for their step

    @classmethod
    def restored(cls, saved: Iterable[Mapping[str, int]], known: int) -> "TokenAccount":
        """The token account of all processes of a run that goes on.

        `saved`: of all processes, in the checkpoint; `known`: tokens that all of them had sampled
        together by their last records.
        """
        total = cls.total(saved)
        return dataclasses.replace(total, lost=total.lost + max(0, known - total.sampled))

    @classmethod
    def total(cls, accounts: Iterable[Mapping[str, int]]) -> "TokenAccount":
        """The token accounts of several processes together."""
        accounts = list(accounts)
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: sum(int(one.get(name, 0)) for one in accounts) for name in names})

    def of_all(self) -> "TokenAccount":
        """The token account of all processes together. Collective."""
        return TokenAccount.total(processes.all_gather_json(self.to_dict()))

    def saved(self, under_way: int) -> "TokenAccount":
        """The token account for a checkpoint that has so many tokens that are under way: others
        are lost, and some may have been sampled after the checkpoint began."""
        lost = self.lost + max(0, self.under_way - under_way)
        return dataclasses.replace(self, lost=lost, under_way=under_way)

    @property
    def sampled(self) -> int:
        """All tokens."""
        return self.trained + self.filtered + self.lost + self.under_way

    def to_dict(self) -> dict[str, int]:
        """JSON values."""
        return {"sampled": self.sampled, **dataclasses.asdict(self)}

    def metrics(self) -> Metrics:
        """`perf/tokens/*`, to be merged with those of other processes."""
        return {ACCOUNT: Parts((self.to_dict(),), _merged)}


def _merged(accounts: Sequence[Mapping[str, int]]) -> dict[str, float]:
    total = TokenAccount.total(accounts).to_dict()
    return {PREFIX + name: float(count) for name, count in total.items()}


class GroupRecords:
    """This process's record file of one start of a run.

    Attributes:
      known: tokens sampled by all processes together, as of their last records.
    """

    def __init__(self, folder: pathlib.Path, resume_step: int):
        """Collective. Of all files, of earlier starts with more processes too, the steps after
        `resume_step` are dropped."""
        place, index, known = folder / FOLDER, processes.process_index(), 0
        if index == 0:
            place.mkdir(exist_ok=True)
            known = _known(place)
            # first: a start that is killed before the files are cut changes nothing
            write_atomic(place / START, json.dumps({"step": resume_step, "sampled": known}))
            for path in place.glob("*.jsonl"):
                truncate_metrics(path, resume_step)
        self.known = int(processes.all_gather_ints(np.int64(known))[0])  # and the files are cut
        self._path = place / f"{index}.jsonl"

    def write(self, samples: Samples, step: int, **facts: Any) -> None:
        """Appends a step that trained on this process's `samples`; `facts`: JSON values."""
        spans: list[list[int]] = []
        for version, mask in zip(samples.fields[VERSION], samples.response_mask, strict=True):
            found = np.broadcast_to(version, mask.shape)[mask]
            spans.append([int(found.min()), int(found.max())] if found.size else [])
        ages = [step - 1 - span[0] if span else 0 for span in spans]
        rows = {"uid": samples.uid.tolist(), "version": spans, "age": ages}
        append(self._path, json.dumps({"step": step, **facts, **rows}) + "\n")


def _known(place: pathlib.Path) -> int:
    """Tokens that all processes had sampled by the last records of the newest start.

    Its process 0 counts those of earlier starts too, so that their lines do not count again: of
    processes that the newest start no longer has, or that have recorded no step in it.
    """
    start = {"step": 0, "sampled": 0}
    if (place / START).exists():
        start = json.loads((place / START).read_text())
    sampled = {}
    for path in place.glob("*.jsonl"):
        if lines := complete_lines(path.read_text()):
            last = json.loads(lines[-1])
            if last["step"] > start["step"]:
                sampled[path.stem] = last["tokens"]["sampled"]
    return sum(sampled.values()) + (0 if "0" in sampled else start["sampled"])


@dataclasses.dataclass(eq=False)
class _Pending:
    """A checkpoint to which samples are to be added."""

    step: int
    account: TokenAccount  # when it was saved
    start: int  # first counter
    addition: tuple[Arrays, dict[str, Any]] | None = None  # None: whole groups, once they are there
    end: int | None = None  # first counter after those of its steps, as far as it is known
    groups: dict[int, Group] = dataclasses.field(default_factory=dict)


class SampleSaver:
    """Adds the samples of asynchronous groups to checkpoints, and accounts for tokens.

    Without `steps`, saves everything that exists, including tokens of unfinished responses. With
    `steps`, saves the complete groups of that many steps after the checkpoint's, which older
    weights sample that a restart no longer has. They are added once complete, and once evaluations
    of versions before the checkpoint's are recorded, because a restart no longer has these weights
    either.
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
        """`records`: of what was trained on; `account`: of this process, before the run began;
        `evaluates(version)`: whether an evaluation is recorded some steps after its version."""
        self._evaluates, self._recorded = evaluates, producer.admission.finished - 1
        self._producer, self._writer, self._steps = producer, writer, steps
        self._records, self._start = records, account
        self._taken: dict[str, Any] = {}  # of the step that is trained
        self._trained = self._filtered = 0  # tokens, since the run began
        self._pending: list[_Pending] = []  # under the producer's lock
        self._ends = False  # no prompt takes the place of one that is given up any more

    @property
    def settled(self) -> bool:
        """Whether no checkpoint waits for samples."""
        return not self._pending

    def took(self, cut: Cut, groups: Sequence[Group]) -> TokenAccount:
        """Notes the groups that a step has taken; returns the token account. Under the lock."""
        tokens = {group.counter: group.tokens for group in groups}
        kept = {counter: tokens[counter] for counter in cut.kept if counter in tokens}
        left_out = {counter: n for counter, n in tokens.items() if counter not in kept}
        self._trained += sum(kept.values())
        self._filtered += sum(left_out.values())
        account = self.account()
        self._taken = {"step": cut.step, "counters": sorted(kept), "left_out": sorted(left_out)}
        self._taken["tokens"] = account.to_dict()
        workers: dict[str, list[int]] = {}
        for group in groups:
            for worker in group.workers if group.counter in kept else ():
                workers.setdefault(worker, []).append(group.counter)
        self._taken["workers"] = {name: sorted(workers[name]) for name in sorted(workers)}
        return account

    def write_groups_line(self, samples: Samples, gaps: Gaps) -> dict[str, list[Gap]]:
        """Records this process's samples that the step trained on, which was taken last; returns
        the gaps of the prompts of each worker."""
        found = {
            worker: [gaps[counter] for counter in counters if counter in gaps]
            for worker, counters in self._taken["workers"].items()
        }
        means = {name: mean_gap(one) for name, one in found.items() if one}
        self._records.write(samples, **self._taken, gaps=means)
        return found

    def account(self) -> TokenAccount:
        """This process's tokens so far; under the lock."""
        start = self._start
        return TokenAccount(
            trained=start.trained + self._trained,
            filtered=start.filtered + self._filtered,
            lost=start.lost + self._producer.saved.left_out,
            under_way=self._producer.under_way,
        )

    def total_account(self) -> TokenAccount:
        """The token account of all processes together, for a checkpoint that holds no samples.
        Collective."""
        with self._producer.lock:
            mine = self.account().saved(under_way=0)
        return mine.of_all()

    def save(self, step: int, at_rest: contextlib.AbstractContextManager[None]) -> None:
        """Adds the samples to the checkpoint of a step, now or later.

        `at_rest`: a block in which no round of the sampler runs.
        """
        producer, addition = self._producer, None
        if self._steps is None:
            with at_rest, producer.lock:
                progress, account = producer.progress(), self.account()
            addition = _addition(progress, producer, account)
        with producer.lock:
            start = producer.admission.position
            self._pending.append(_Pending(step, self.account(), start, addition))
        self.add_complete()

    def add_complete(self) -> None:
        """Adds the samples that are complete now. From any thread."""
        complete: list[tuple[_Pending, Sequence[Group]]] = []
        with self._producer.lock:
            for pending in list(self._pending):
                groups = [] if pending.addition else self._groups_of(pending)
                unrecorded = any(map(self._evaluates, range(self._recorded + 1, pending.step)))
                if groups is not None and not unrecorded and all(group.done for group in groups):
                    self._pending.remove(pending)
                    complete.append((pending, groups))
        for pending, groups in complete:
            addition = pending.addition or _addition(
                complete_samples(groups), self._producer, pending.account
            )
            self._writer.add(pending.step, *addition)

    def end(self) -> None:
        """Adds samples that wait for evaluations alone, or for a group in the place of one that is
        given up: nobody makes these any more."""
        with self._producer.lock:
            self._ends = True
            late = [(one.step, one.addition) for one in self._pending if one.addition]
            self._pending = [pending for pending in self._pending if not pending.addition]
        for step, addition in late:
            self._writer.add(step, *addition)
        self.add_complete()

    def _groups_of(self, pending: _Pending) -> list[Group] | None:
        """The groups of a checkpoint; None while some have not begun."""
        producer, last = self._producer, pending.step + (self._steps or 0)
        pending.groups |= {c: g for c, g in producer.groups.items() if c >= pending.start}
        if pending.end is None or last > producer.admission.finished:  # given-up prompts move it
            pending.end = producer.admission.end_of(last)
        if pending.end is None or not producer.begun_up_to(pending.end):
            return None
        found = [group for c, group in pending.groups.items() if c < pending.end]
        # one that is given up leaves the producer once all know it, and the next takes its place
        left = any(g.given_up and g.counter in producer.groups for g in found)
        return None if left and not (producer.admission.judged or self._ends) else found

    def recorded(self, version: int) -> None:
        """Notes that evaluations up to a version are recorded: a run that goes on from a checkpoint
        makes none of a version before it."""
        with self._producer.lock:
            self._recorded = max(self._recorded, version)
        self.add_complete()

    def check(self) -> None:
        """Raises the error of a disk that could not take samples."""
        self._writer.check()

    def wait(self, seconds: float) -> None:
        """Waits until what was added is written, at most so long."""
        self._writer.wait(seconds)


def _addition(
    progress: Mapping[Key, Progress], producer: Producer, account: TokenAccount
) -> tuple[Arrays, dict[str, Any]]:
    """The addition of a process to a checkpoint; `account`: when that was saved."""
    arrays, facts = to_arrays(progress)
    under_way = sum(found.num_sampled for found in progress.values())
    facts["max_staleness"] = producer.admission.rule.max_staleness
    with producer.lock:
        facts |= producer.facts()
    return arrays, facts | {"account": account.saved(under_way).to_dict()}
