"""The state that a run carries from step to step: made, saved in checkpoints, restored."""

import dataclasses
from typing import Any

import numpy as np

from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.planning.run_models import States
from distflow_jax.runtime.build import Runtime
from distflow_jax.training.state import TrainState


@dataclasses.dataclass
class RunState:
    """State after `step` steps; while a step runs, `step` is its number."""

    models: dict[str, Any]  # of models, samplers and nodes with a state of their own, by state key
    step: int = 0
    batches: int = 0  # of the loader that were used: one a step, or as many as a region took
    nonfinite: int = 0  # steps in a row whose loss or gradient was not finite

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
    offload = runtime.offload
    if checkpointer.latest() is None:
        return RunState(states.initial({}, offload.adopt) | runtime.first_states)
    step, restored, info = checkpointer.restore(None, offload.abstract(states.abstract()))
    prepared.loader.restore(info["loader"])
    of_nodes = {key: np.float32(value) for key, value in info["nodes"].items()}
    return RunState(
        models=states.initial(restored, offload.adopt) | runtime.first_states | of_nodes,
        step=step,
        batches=prepared.loader.position // prepared.config.data.prompts_per_step,
        nonfinite=info["nonfinite"],
    )


def save_state(prepared: PreparedRun, state: RunState, checkpointer: Checkpointer) -> None:
    """Starts a checkpoint: the trained models, the loader's place, and the nodes' own states."""
    # what is neither a model nor a sampler is one number of a node, an adaptive coefficient
    of_nodes = state.models.keys() - prepared.models.keys() - prepared.samplers.keys()
    info = {
        "loader": prepared.loader.state(loader_position(prepared, state)),
        "nonfinite": state.nonfinite,
        "model": prepared.source.fingerprint,
        "nodes": {key: float(state.models[key]) for key in state.models if key in of_nodes},
    }
    trained = {key: state.models[key] for key, m in prepared.models.items() if m.trained}
    checkpointer.save(state.step, trained, info)


def loader_position(prepared: PreparedRun, state: RunState) -> int:
    """Counter after the last prompt that the run trained on."""
    return state.batches * prepared.config.data.prompts_per_step
