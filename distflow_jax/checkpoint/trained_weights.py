"""Trained weights of a run's checkpoint, with adapters merged."""

import pathlib
from typing import Any

import jax

from distflow_jax.checkpoint.adapters import adapters_of
from distflow_jax.checkpoint.checkpointer import CheckpointConfig, Checkpointer, step_of
from distflow_jax.checkpoint.model_choice import chosen_policy, models_of
from distflow_jax.models.decoder_config import LoraConfig, adapted
from distflow_jax.models.lora import merged
from distflow_jax.models.parameters import Network, param_shardings
from distflow_jax.training.state import sharded_params


def read_trained(
    run: pathlib.Path, key: str, network: Network, mesh: jax.sharding.Mesh
) -> tuple[int, Any]:
    """Reads (training step, parameters on `mesh`) of a run's model. Collective.

    Args:
      run: the run's --workdir, for its newest checkpoint, or WORKDIR/checkpoints/STEP.
      key: the model's state key; "" is the policy that answers: the actor, or the only one.
      network: the model without adapters.
      mesh: where the parameters are placed, by the network's sharding rules.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: the checkpoint holds another model or no such policy, or cannot be read.
    """
    folder, step = _place(run)
    checkpointer = Checkpointer(folder, CheckpointConfig())
    try:
        contents = checkpointer.contents(step)
        if not key:
            where = f"checkpoint {contents.step} of {folder.parent}"
            key = chosen_policy(models_of(contents.arrays), where)
        lora = adapters_of(contents, key, folder.parent) or LoraConfig()
        wanted = {key: {"params": sharded_params(adapted(network, lora), mesh)}}
        step, arrays, _ = checkpointer.restore(contents.step, wanted, partial=True)
    finally:
        checkpointer.close()
    params = arrays[key]["params"]
    if lora.rank:
        merge = jax.jit(merged, static_argnums=1, out_shardings=param_shardings(network, mesh))
        params = merge(params, lora.scale)
    return step, params


def trained_weights_digest(run: pathlib.Path) -> str:
    """Step and hex digest of the checkpoint that `read_trained` would read. Collective.

    Raises FileNotFoundError as that does.
    """
    folder, step = _place(run)
    checkpointer = Checkpointer(folder, CheckpointConfig())
    try:
        step = checkpointer.contents(step).step
        return f"step {step}, {checkpointer.digest(step)}"
    finally:
        checkpointer.close()


def _place(run: pathlib.Path) -> tuple[pathlib.Path, int | None]:
    """(folder of checkpoints, step or None for the newest) of `read_trained`'s `run`."""
    folder = run / "checkpoints"
    if folder.is_dir():
        return folder, None
    if (step := step_of(run.name)) is not None and run.is_dir():
        return run.parent, step
    raise FileNotFoundError(f"{run} holds no checkpoints/: is it the --workdir of a run?")
