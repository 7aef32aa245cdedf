"""The state that a run carries from step to step: made, saved in checkpoints, restored."""

import dataclasses
import logging
import pathlib
from typing import Any

from distflow_jax.checkpoint.adapters import adapters_info, changed_adapters
from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.checkpoint.node_states import encoded, from_json, to_json
from distflow_jax.cluster import processes
from distflow_jax.config.training_config import TrainingConfig
from distflow_jax.layout import KEPT_WEIGHT, Metrics
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.planning.run_models import States, starting_weights
from distflow_jax.runtime.build import Runtime
from distflow_jax.runtime.place import Place
from distflow_jax.training.state import TrainState

log = logging.getLogger("distflow_jax")


@dataclasses.dataclass
class RunState:
    """State after `step` steps; while a step runs, `step` is its number."""

    models: dict[str, Any]  # of models, samplers and nodes with a state of their own, by state key
    step: int = 0
    starting_weights: dict[str, str] = dataclasses.field(default_factory=dict)  # digests, by model
    nonfinite: int = 0  # steps in a row whose loss or gradient was not finite
    rejected: int = 0  # steps in a row of which corrections and rejections left nothing
    over: bool = False  # no start is to go on: its last step has ended, with all that follows it

    def count_lost(self, metrics: Metrics) -> None:
        """Counts the step if it trained on nothing, and replaces the updates that each node skipped
        by their sum.

        A step that was wholly rejected has a largest weight of exactly 0.
        """
        of_nodes = [name for name in metrics if name.startswith("training/nonfinite/")]
        metrics["training/nonfinite"] = nonfinite = sum(metrics.pop(name) for name in of_nodes)
        kept = [value for name, value in metrics.items() if name.endswith(KEPT_WEIGHT)]
        self.nonfinite = self.nonfinite + 1 if nonfinite else 0
        self.rejected = self.rejected + 1 if 0 in kept else 0

    def policy_params(self, key: str) -> Any:
        """Parameters of the policy of this state key, trained or frozen."""
        state = self.models[key]
        return state.params if isinstance(state, TrainState) else state


def first_or_restored_state(
    prepared: PreparedRun, runtime: Runtime, checkpointer: Checkpointer
) -> tuple[RunState, Place]:
    """State and place of the newest checkpoint, to which the loader is set too, or of step 0.

    Samplers have no state yet, see run_sampler.load_samplers.
    """
    dtype = prepared.sizes.forward.compute_dtype
    states = States(prepared.models, prepared.source, prepared.config, runtime.meshes, dtype)
    offload, digests = runtime.offload, starting_weights(prepared.models, prepared.source)
    if checkpointer.latest() is None:
        first = states.initial({}, offload.adopt) | runtime.first_states
        place = Place(prepared.config.data.prompts_per_step)
        return RunState(first, starting_weights=digests), place
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
    place = Place.restored(info, step, prepared.config, prepared.loader)
    here = (processes.process_index(), processes.process_count())
    of_nodes = {key: from_json(key, value, *here) for key, value in info["nodes"].items()}
    state = RunState(
        models=states.initial(restored, offload.adopt) | runtime.first_states | of_nodes,
        step=step,
        starting_weights=digests,
        nonfinite=info["nonfinite"],
        rejected=info.get("rejected", 0),  # older checkpoints have none
    )
    return state, place


_DIGESTS = {"starting_weights", "model"}  # keys of a checkpoint's info; the second: version 0.1
_UNKNOWN_START = "it does not say which weights the run was started from, and continues with"


def check_lost(state: RunState, config: TrainingConfig) -> None:
    """Warns of a step that trained on nothing; RuntimeError after too many of them in a row."""
    if state.nonfinite > config.max_nonfinite:
        raise RuntimeError(
            f"loss or gradient was not finite in {state.nonfinite} steps in a row, the "
            f"last being {state.step}; samples/nonfinite-* of the run's folder have the batches. "
            "Lower training.optimizer.lr, or raise training.max_nonfinite"
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
    prepared: PreparedRun,
    state: RunState,
    place: Place,
    checkpointer: Checkpointer,
    *,
    added_to: bool,
) -> None:
    """Starts a checkpoint: the trained models, the place in the data, and the nodes' own states.
    Collective.

    `added_to`: whether each process adds to it, see Checkpointer.save.
    """
    own = node_states(prepared, state)
    states = processes.all_gather_json(own) if own else []
    info = place.facts(prepared.loader) | {
        "nonfinite": state.nonfinite,
        "starting_weights": state.starting_weights,
        "rejected": state.rejected,
        "nodes": {key: to_json([theirs[key] for theirs in states]) for key in own},
    }
    info |= adapters_info(prepared.config.lora)
    trained = {key: state.models[key] for key, m in prepared.models.items() if m.trained}
    checkpointer.save(state.step, trained, info, added_to=added_to)


def node_states(prepared: PreparedRun, state: RunState) -> dict[str, Any]:
    """This process's states of nodes as JSON: what is neither a model's nor a sampler's.

    ValueError for one that checkpoints cannot keep.
    """
    others = prepared.models.keys() | prepared.own_samplers.keys()
    own = {key: x for key, x in state.models.items() if key not in others}
    return {key: encoded(key.removeprefix("node:"), x) for key, x in own.items()}
