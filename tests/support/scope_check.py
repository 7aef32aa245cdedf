"""A check of nodes of a user's own: do their results need more than their scope says?

A node of scope `group` may run on any groups of a step, in any order: those of a wave, or one alone
as soon as it is there. So on random fields its results for a response must not change when groups
are permuted and divided; of a node of scope `sample`, not when responses are.

N responses, G groups, R rows, L tokens and S sequences per row.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from distflow_jax.batch import (
    Placement,
    Prompt,
    Sequences,
    from_sequence_field,
    from_token_field,
    sequence_field,
    to_rows,
    token_field,
)
from distflow_jax.coordinator.assignment import PackingPlan, Shares, StepLengths
from distflow_jax.coordinator.field_store import take
from distflow_jax.dag.graph import Node
from distflow_jax.dag.plan import Task
from distflow_jax.data.step_columns import given_columns
from distflow_jax.layout import ROUTED_EXPERTS, ROWS, STEP, VERSION, Layout
from distflow_jax.planning.field_specs import Value, per_token_values
from distflow_jax.planning.plan_run import RunPlan
from distflow_jax.user_functions import errors_of_file, load_function

SCOPES = ("sample", "group", "batch")  # from the narrowest
GROUPS, DRAWS = 8, 20
TOLERANCE = 1e-4  # of the largest result: sums in another order round otherwise
_LONGEST = 64  # tokens of a random response
_LAYOUT = Layout("mesh", (("fsdp", 1),))

Results = dict[str, list[Any]]  # by field, an entry for each response


@dataclasses.dataclass(frozen=True)
class Finding:
    """The narrowest scope that a node's results agree with, beside the one that it says."""

    node: Node
    needs: str
    why: str  # a result that speaks against the next narrower scope

    @property
    def is_wrong(self) -> bool:
        """Whether the node says a scope that is too narrow."""
        return SCOPES.index(self.node.scope) < SCOPES.index(self.needs)

    def describe(self) -> str:
        """One line about the node."""
        said = f"node {self.node.id!r} ({self.node.fn}) has scope {self.node.scope}"
        if self.is_wrong:
            return f"{said}, but {self.why}: give it scope {self.needs}"
        if self.node.scope != SCOPES[-1]:
            return f"{said}, which holds"
        if self.needs == SCOPES[-1]:
            return f"{said}, which it needs: {self.why}"
        return f"{said}; scope {self.needs} would do, and let it stream"


def check_scopes(run: RunPlan, prompt: Callable[[int], Prompt], *, seed: int = 0) -> list[Finding]:
    """Runs the functions of a plan's own nodes of type COMPUTE on random fields, in its order.

    `prompt(counter)`: of the run's data. Raises ValueError for a plan without such a node, and for
    a function that fails, gives other results for the same fields, or keeps a state while its scope
    is not "batch".
    """
    own = [t for t in run.plan.tasks if t.node.type == "COMPUTE" and ":" in (t.node.fn or "")]
    if not own:
        raise ValueError(
            f"dag {run.plan.name!r} has no node of type COMPUTE with a function of your own, whose "
            "scope could be checked"
        )
    fields = RandomFields(run, prompt, seed)
    return [_Check(task, fields, seed).find() for task in own]


class RandomFields:
    """Fields of some groups, drawn at random, in the forms that nodes read."""

    def __init__(self, run: RunPlan, prompt: Callable[[int], Prompt], seed: int):
        self._run, self._rng = run, np.random.default_rng(seed)
        groups = max(2, min(GROUPS, run.config.data.prompts_per_step))
        given = given_columns([prompt(c) for c in range(groups)], run.config.rollout.num_samples)
        self.uid = np.asarray(given["uid"])
        longest = min(_LONGEST, run.config.rollout.max_response_length)
        vocab = run.source.tokenizer.vocab_size
        lengths = self._rng.integers(1, longest, len(self.uid), endpoint=True)
        drawn = {
            "response": [self._rng.integers(0, vocab, n).astype(np.int32) for n in lengths],
            "response_mask": [self._rng.random(n) < 0.9 for n in lengths],
            "finished": self._rng.random(len(self.uid)) < 0.8,
            STEP: np.ones(len(self.uid), np.int64),
            VERSION: [np.zeros(n, np.int32) for n in lengths],
        }
        self._columns: dict[str, Any] = {**drawn, **given}
        self._packing = PackingPlan(
            limits=run.sizes.packing.limits,
            mini_batches=1,
            prompts_per_step=groups,
            rows={_LAYOUT: len(self.uid)},  # one each is the worst
            primary=_LAYOUT,
        )
        self._per_token = {value: True for value in per_token_values(run.plan, run.sizes.routed)}

    def note(self, value: Value, *, per_token: bool) -> None:
        """Notes the shape of a field that a node writes."""
        self._per_token[value] = per_token

    def host(self, task: Task, chosen: np.ndarray) -> dict[str, Any]:
        """A node's columns of the responses `chosen`, int [n], in their order; copies."""
        return {
            inside: _copied(take(self._column(task, field), chosen))
            for inside, field in task.node.reads.items()
        }

    def packed(self, task: Task, chosen: np.ndarray) -> tuple[dict[str, Any], Sequences, Placement]:
        """A node's fields [1, R, L] and [1, R, S] of the responses `chosen`, int [n]."""
        counter = self.uid[chosen, 0]
        starts = np.flatnonzero(np.diff(counter, prepend=-1))
        group = np.cumsum(np.diff(counter, prepend=-1) != 0) - 1
        columns = {n: take(self._columns[n], chosen) for n in ("prompt", "response")}
        sequences = Sequences(
            group=group.tolist(),
            member=(np.arange(len(chosen)) - starts[group]).tolist(),
            prompt=[p.tokens for p in columns["prompt"]],
            response=columns["response"],
            response_mask=take(self._columns["response_mask"], chosen),
        )
        lengths = [
            np.array([len(x) for x in part]) for part in (sequences.prompt, sequences.response)
        ]
        home = np.zeros(len(chosen), np.int64)
        shares = Shares.make(self._packing, StepLengths(group, home, *lengths), processes=1)
        placement = shares.placement(_LAYOUT, 0)
        fields: dict[str, Any] = {}
        for inside, field in task.node.reads.items():
            if field == ROWS:
                fields[inside] = to_rows(sequences, placement)
                continue
            column = take(self._column(task, field), chosen)
            if self._has_tokens(task, field):
                fields[inside] = token_field(sequences, placement, column)
            else:
                fields[inside] = sequence_field(placement, column)
        return fields, sequences, placement

    def _has_tokens(self, task: Task, field: str) -> bool:
        """Whether a field that a node reads has a number for each token."""
        source = next((e.source for e in task.edges_in if e.field == field), None)
        if (source, field) in self._per_token:
            return self._per_token[source, field]
        writer = next((t for t in self._run.plan.tasks if t.node.id == source), None)
        if writer is None or writer.layout.kind == "host":
            return field in ("response", "response_mask")
        inside = next(name for name, found in writer.node.writes.items() if found == field)
        return inside != "score"  # of a built-in stage: log-probs, values, advantages

    def _column(self, task: Task, field: str) -> Any:
        if field == ROUTED_EXPERTS:
            raise ValueError(f"node {task.node.id!r} reads {field}, which this check cannot draw")
        if field not in self._columns:
            draw = self._rng.random
            lengths = [len(response) for response in self._columns["response"]]
            if self._has_tokens(task, field):
                self._columns[field] = [draw(n).astype(np.float32) for n in lengths]
            else:
                self._columns[field] = draw(len(lengths)).astype(np.float32)
        return self._columns[field]


class _Check:
    """The check of one node."""

    def __init__(self, task: Task, fields: RandomFields, seed: int):
        self._task, self._node, self._fields = task, task.node, fields
        self._stage = load_function(task.node.fn, f"stage of node {task.node.id!r}")
        self._rng, self._keeps_state = np.random.default_rng(seed), False

    def find(self) -> Finding:
        """The narrowest scope that holds. Raises ValueError, see check_scopes."""
        everything = np.arange(len(self._fields.uid))
        whole = self._run(everything)
        if self._keeps_state:
            return Finding(self._node, SCOPES[-1], "it keeps a state")
        if self._difference(whole, everything, self._run(everything)):
            raise ValueError(
                f"node {self._node.id!r} ({self._node.fn}) gives other results for the same fields "
                "a second time: it draws at random, or keeps something between two calls"
            )
        why = ""
        for scope in SCOPES[:-1]:
            found = self._against(scope, whole)
            if not found:
                return Finding(self._node, scope, why)
            why = found
        return Finding(self._node, SCOPES[-1], why)

    def _against(self, scope: str, whole: Results) -> str:
        """A result that changes when what the scope does not need is left out; "": none does."""
        counter = self._fields.uid[:, 0]
        unit = counter if scope == "group" else np.arange(len(counter))  # stays together
        for draw in range(DRAWS):
            parts = 1 + draw % int(counter.max() + 1)  # one: all of it, in another order
            part_of = self._rng.integers(0, parts, unit.max() + 1)[unit]
            order = self._rng.permutation(counter.max() + 1)[counter]
            for part in range(parts):
                chosen = np.flatnonzero(part_of == part)
                chosen = chosen[np.argsort(order[chosen], kind="stable")]
                if len(chosen) and (found := self._difference(whole, chosen, self._run(chosen))):
                    others = "groups" if scope == "group" else "responses"
                    return f"{found} with the other {others} of the batch"
        return ""

    def _difference(self, whole: Results, chosen: np.ndarray, results: Results) -> str:
        """A result for one of the responses `chosen`, int [n], that is another one than among all
        of them; "": there is none."""
        for field, entries in results.items():
            largest = max((_largest(entry) for entry in whole[field]), default=0.0)
            for i, entry in zip(chosen.tolist(), entries, strict=True):
                if not _near(entry, whole[field][i], TOLERANCE * largest):
                    prompt = self._fields.uid[i, 0]
                    return f"{field!r} of a response to prompt {prompt} changes"
        return ""

    def _run(self, chosen: np.ndarray) -> Results:
        """The fields that the node writes for the responses `chosen`, int [n]."""
        code = getattr(self._stage, "__code__", None)
        with errors_of_file(code and code.co_filename, f"node {self._node.id!r}"):
            if self._task.layout.kind == "host":
                return self._on_host(chosen)
            return self._on_mesh(chosen)

    def _on_host(self, chosen: np.ndarray) -> Results:
        fields = self._fields.host(self._task, chosen)
        state, written, _ = self._stage(None, fields, dict(self._node.options))
        self._check_written(state, written)
        for field, column in written.items():
            if len(column) != len(chosen):
                raise ValueError(
                    f"node {self._node.id!r}: {field!r} has {len(column)} entries for "
                    f"{len(chosen)} responses"
                )
        return {self._node.writes[inside]: list(column) for inside, column in written.items()}

    def _on_mesh(self, chosen: np.ndarray) -> Results:
        fields, sequences, placement = self._fields.packed(self._task, chosen)
        state, written, _ = self._compiled(fields)
        self._check_written(state, written)
        shape, found = placement.shape, {}
        tokens = (shape.mini_batches, shape.rows, shape.tokens)
        for inside, value in written.items():
            array, field = np.asarray(value), self._node.writes[inside]
            if array.shape not in (tokens, (*tokens[:2], shape.sequences)):
                continue  # only nodes on the same mesh read it
            per_token = array.shape == tokens
            self._fields.note((self._node.id, field), per_token=per_token)
            entries = (
                from_token_field(sequences, placement, array)
                if per_token
                else from_sequence_field(placement, array)
            )
            found[field] = [entries[i] for i in range(len(chosen))]
        return found

    @functools.cached_property
    def _compiled(self) -> Any:
        options = dict(self._node.options)
        return jax.jit(lambda fields: self._stage(None, fields, options))

    def _check_written(self, state: Any, written: Any) -> None:
        self._keeps_state = state is not None
        if self._keeps_state and self._node.scope != SCOPES[-1]:
            raise ValueError(
                f"node {self._node.id!r} ({self._node.fn}) keeps a state: give it scope batch"
            )
        if set(written) != set(self._node.writes):
            raise ValueError(
                f"node {self._node.id!r}: it wrote {sorted(written)}, and says that it writes "
                f"{sorted(self._node.writes)}"
            )


def _copied(column: Any) -> Any:
    """A column that a function may change."""
    if isinstance(column, np.ndarray):
        return column.copy()
    return [entry.copy() if isinstance(entry, np.ndarray) else entry for entry in column]


def _largest(entry: Any) -> float:
    array = np.asarray(entry)
    if array.dtype.kind not in "iuf" or not array.size:
        return 0.0
    return float(np.max(np.abs(array), initial=0.0, where=np.isfinite(array)))


def _near(one: Any, other: Any, tolerance: float) -> bool:
    a, b = np.asarray(one), np.asarray(other)
    if a.shape != b.shape:
        return False
    if a.dtype.kind not in "iuf" or b.dtype.kind not in "iuf":
        return bool(np.array_equal(a, b))
    return bool(np.allclose(a, b, rtol=0, atol=tolerance, equal_nan=True))
