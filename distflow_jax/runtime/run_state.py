"""The state that a run carries from step to step: made, saved in checkpoints, restored."""

import dataclasses
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.checkpoint.adapters import adapters_info, changed_adapters
from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.config.run_config import Config
from distflow_jax.flow.budgets.deadline_rule import in_order
from distflow_jax.flow.flow_config import FlowConfig
from distflow_jax.parallel import processes
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.planning.run_models import States, starting_weights
from distflow_jax.runtime.build import Runtime
from distflow_jax.training.state import TrainState
from distflow_jax.training.training_config import TrainingConfig

MOST_NUMBERS = 10_000  # of an array: a state that is larger is a model's
log = logging.getLogger("distflow_jax")


@dataclasses.dataclass
class RunState:
    """State after `step` steps; while a step runs, `step` is its number."""

    models: dict[str, Any]  # of models, samplers and nodes with a state of their own, by state key
    step: int = 0
    batches: int = 0  # of the loader that were used: one a step, or as many as a region took
    # first prompt that no step looked at, where samplers run ahead; None: all of `batches` were
    counter: int | None = None
    # groups that have begun and are not trained on, where rollouts have a budget of tokens: see
    # Deadlines.begun; None: all from `counter` on are to begin
    begun: dict[str, Any] | None = None
    # account of tokens over all processes, see Ledger, where no samples are saved that bring one;
    # None: samplers never ran ahead
    ledger: dict[str, int] | None = None
    starting_weights: dict[str, str] = dataclasses.field(default_factory=dict)  # digests, by model
    nonfinite: int = 0  # steps in a row whose loss or gradient was not finite
    rejected: int = 0  # steps in a row of which corrections and rejections left nothing

    def count_lost(self, metrics: Mapping[str, Any], nonfinite: float) -> None:
        """Counts the step if it trained on nothing; `nonfinite` is its number of skipped updates.

        A step that was wholly rejected has a largest weight of exactly 0.
        """
        kept = [value for name, value in metrics.items() if name.endswith(_KEPT)]
        self.nonfinite = self.nonfinite + 1 if nonfinite else 0
        self.rejected = self.rejected + 1 if 0 in kept else 0

    def look_at(self, counter: int, batch: int) -> None:
        """Notes the first prompt that no step has looked at; `batch`: prompts of a step."""
        self.counter, self.batches = counter, -(-counter // batch)

    def position(self, batch: int) -> int:
        """Counter of the first prompt that no step looked at; `batch`: prompts of a step."""
        return self.batches * batch if self.counter is None else self.counter

    def policy_params(self, key: str) -> Any:
        """Parameters of the policy of this state key, trained or frozen."""
        state = self.models[key]
        return state.params if isinstance(state, TrainState) else state


def first_or_restored_state(
    prepared: PreparedRun, runtime: Runtime, checkpointer: Checkpointer
) -> RunState:
    """The state of the newest checkpoint, to which the loader is set too, or that of step 0.

    Samplers have no state yet, see run_sampler.start_samplers.
    """
    states = States(prepared.models, prepared.source, prepared.config, runtime.meshes)
    offload, digests = runtime.offload, starting_weights(prepared.models, prepared.source)
    if checkpointer.latest() is None:
        first = states.initial({}, offload.adopt) | runtime.first_states
        return RunState(first, starting_weights=digests)
    step, restored, info = checkpointer.restore(
        None,
        offload.abstract(states.abstract()),
        lacking=lambda info: (
            "" if info.keys() & _DIGESTS else f"{_UNKNOWN_START} {prepared.source.spec}"
        ),
        differing=lambda contents: changed_adapters(
            contents, prepared.config.lora, pathlib.Path(checkpointer.folder.parent)
        ),
    )
    _check_starting_weights(info, digests, prepared)
    check_order(info, step, prepared.config.flow)
    check_batches(info, step, prepared.config)
    prepared.loader.restore(info["loader"])
    place = (processes.process_index(), processes.process_count())
    of_nodes = {key: from_json(key, value, *place) for key, value in info["nodes"].items()}
    return RunState(
        models=states.initial(restored, offload.adopt) | runtime.first_states | of_nodes,
        step=step,
        batches=prepared.loader.position // prepared.config.data.prompts_per_step,
        starting_weights=digests,
        # otherwise steps take whole batches, as the loader gives them
        counter=info.get("counter") if prepared.config.flow.ahead else None,
        begun=info.get("begun") if prepared.config.flow.round_tokens else None,
        ledger=info.get("ledger"),
        nonfinite=info["nonfinite"],
        rejected=info.get("rejected", 0),  # older checkpoints have none
    )


def check_order(info: Mapping[str, Any], step: int, config: FlowConfig) -> None:
    """Raises ValueError if the run would train prompts again that a step before their turn took."""
    begun = info.get("begun")
    if begun is not None and not config.round_tokens and not in_order(begun):
        raise ValueError(
            f"the checkpoint of step {step} has trained prompts before others with lower counters, "
            "as flow.round_tokens does: with flow.round_tokens=0 some would be trained twice; give "
            "flow.round_tokens and flow.max_lag again, or start in a new --workdir"
        )


def check_batches(info: Mapping[str, Any], step: int, config: Config) -> None:
    """Raises ValueError if the next batch would not begin where the checkpoint's did.

    Steps of a region, or of a budget of tokens, end amid a batch.
    """
    counter, batch = info.get("counter"), config.data.prompts_per_step
    position = int(info["loader"]["position"])
    if counter is None or not config.flow.ahead:
        if position % batch:
            raise ValueError(
                f"data.prompts_per_step={batch}: the checkpoint of step {step} has trained on "
                f"{position} prompts, which are no whole number of such batches, so some would be "
                "trained on twice; give the number of before, or start in a new --workdir"
            )
    if counter is None:
        return
    first = counter // batch * batch
    if not config.flow.ahead and counter > first:
        raise ValueError(
            f"the checkpoint of step {step} stands amid a batch, before prompt {counter}: with "
            f"flow.max_lag=0 steps take whole batches, so prompts from {first} on would be trained "
            "on twice; give flow.max_lag again, or start in a new --workdir"
        )
    if config.flow.ahead and position != first:
        raise ValueError(
            f"data.prompts_per_step={batch}: the checkpoint of step {step} had another number, "
            f"by which its batch began at prompt {position}; give that again, or start in a new "
            "--workdir"
        )


_KEPT = "rollout_corr/kept_weight_max"
_DIGESTS = {"starting_weights", "model"}  # keys of a checkpoint's info; the second: version 0.1
_UNKNOWN_START = "it does not say which weights the run was started from, and continues with"


def check_lost(state: RunState, config: TrainingConfig, folder: pathlib.Path) -> None:
    """Warns of a step that trained on nothing; RuntimeError after too many of them in a row."""
    if state.nonfinite > config.max_nonfinite:
        raise RuntimeError(
            f"loss or gradient was not finite in {state.nonfinite} steps in a row, the "
            f"last being {state.step}; the batches are in {folder / 'samples'} as "
            "nonfinite-*. Lower training.optimizer.lr, or raise training.max_nonfinite"
        )
    if not state.rejected:
        return
    fix = (
        "widen algorithm.correction_low, correction_high, rejection_low and rejection_high, or see "
        "rollout_corr/log_ratio_abs_mean for why sampler and trainer differ"
    )
    if state.rejected > config.max_rejected:
        raise RuntimeError(
            f"algorithm.correction or rejection left no token in {state.rejected} steps in a row, "
            f"the last being {state.step}: {fix}, or raise training.max_rejected"
        )
    log.warning(
        "step %d: algorithm.correction or rejection left no token, and nothing was learned: %s",
        state.step,
        fix,
    )


def _check_starting_weights(
    info: dict[str, Any], now: dict[str, str], prepared: PreparedRun
) -> None:
    """Raises ValueError if a model of the run would no longer start from the same weights."""
    before = info.get("starting_weights", {})
    if "model" in info:  # of version 0.1: the source's digest alone
        before = {
            key: info["model"] for key, model in prepared.models.items() if not model.checkpoint
        }
    for key, digest in now.items():
        if before.get(key, digest) != digest:
            place = prepared.models[key].checkpoint or prepared.source.spec
            raise ValueError(
                f"the run was started from other weights of model {key!r}: their digest was "
                f"{before[key]!r} and is {digest!r} for {place!r}; restore these, or start in a "
                "new --workdir"
            )


def save_state(
    prepared: PreparedRun, state: RunState, checkpointer: Checkpointer, *, added_to: bool
) -> None:
    """Starts a checkpoint: the trained models, the loader's place, and the nodes' own states.
    Collective.

    `added_to`: whether each process adds to it, see Checkpointer.save.
    """
    own = node_states(prepared, state)
    states = processes.all_gather_json(own) if own else []
    info = {
        "loader": prepared.loader.state(loader_position(prepared, state)),
        "nonfinite": state.nonfinite,
        "starting_weights": state.starting_weights,
        "rejected": state.rejected,
        "counter": state.counter,
        "begun": state.begun,
        "ledger": state.ledger,
        "nodes": {key: to_json([theirs[key] for theirs in states]) for key in own},
    }
    info |= adapters_info(prepared.config.lora)
    trained = {key: state.models[key] for key, m in prepared.models.items() if m.trained}
    checkpointer.save(state.step, trained, info, added_to=added_to)


def node_states(prepared: PreparedRun, state: RunState) -> dict[str, Any]:
    """This process's states of nodes as JSON: what is neither a model's nor a sampler's.

    ValueError for one that checkpoints cannot keep.
    """
    others = prepared.models.keys() | prepared.samplers.keys()
    own = {key: x for key, x in state.models.items() if key not in others}
    return {key: encoded(key.removeprefix("node:"), x) for key, x in own.items()}


def loader_position(prepared: PreparedRun, state: RunState) -> int:
    """Counter after the last prompt that the run trained on."""
    batch = prepared.config.data.prompts_per_step
    return state.position(batch) // batch * batch


def to_json(states: Sequence[Any]) -> dict[str, Any]:
    """A node's states on all processes, each as `encoded` gives it, for a checkpoint."""
    alike = all(repr(state) == repr(states[0]) for state in states)  # NaN is no exception
    return {"same": states[0]} if alike else {"by_process": list(states)}


def encoded(key: str, value: Any) -> Any:
    """A process's own value as JSON. ValueError for what is none of the values above."""
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {"map": {name: encoded(key, entry) for name, entry in value.items()}}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encoded(key, entry) for entry in value]}
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        whole = not isinstance(value, jax.Array) or value.is_fully_replicated
        if whole and value.size <= MOST_NUMBERS and value.dtype != object:
            array = np.asarray(value)
            numbers = array if array.dtype.kind in "biuf" else array.astype(np.float32)
            return {"dtype": array.dtype.name, "array": numbers.tolist()}
    raise ValueError(
        f"node {key!r} returned a state of type {type(value).__name__}"
        f"{list(value.shape) if isinstance(value, jax.Array | np.ndarray) else ''}, which a "
        "checkpoint cannot keep: return numbers, texts, arrays of at most "
        f"{MOST_NUMBERS:,} numbers that every device has whole, or maps and lists of these"
    )


def from_json(key: str, value: Any, process: int, processes: int) -> Any:
    """Inverse of `to_json`, for one process. ValueError where a checkpoint has the states of
    another number of processes."""
    if not isinstance(value, Mapping):  # a number of version 0.2 and before
        return np.float32(value)
    if "same" in value:
        return _decoded(value["same"])
    states = value["by_process"]
    if len(states) != processes:
        raise ValueError(
            f"node {key!r} keeps a state of its own on each process, and the checkpoint is of "
            f"{len(states)} processes: go on with so many, not {processes}, or start in a new "
            "--workdir"
        )
    return _decoded(states[process])


def _decoded(value: Any) -> Any:
    ((kind, content), *more) = value.items() if "dtype" not in value else [("array", value)]
    assert not more, "one kind each"
    if kind == "array":
        return np.array(content["array"], jnp.dtype(content["dtype"]))[()]
    if kind == "map":
        return {name: _decoded(entry) for name, entry in content.items()}
    if kind in ("list", "tuple"):
        entries = [_decoded(entry) for entry in content]
        return tuple(entries) if kind == "tuple" else entries
    return content
