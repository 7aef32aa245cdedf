"""Trained weights of a run's checkpoint, with adapters merged, and which of its models is meant."""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax

from distflow_jax.checkpoint.adapters import adapters_of
from distflow_jax.checkpoint.checkpointer import ArrayTable, Checkpointer, step_of
from distflow_jax.config.training_config import LoraConfig
from distflow_jax.config.upkeep_config import CheckpointConfig
from distflow_jax.models.decoder_config import adapted
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


POLICY = "actor"  # the default model


def models_of(table: ArrayTable) -> dict[str, ArrayTable]:
    """{model's key: {parameter's path: [shape, dtype]}} of a checkpoint's arrays."""
    models: dict[str, ArrayTable] = {}
    for name, entry in table.items():
        # other arrays are `KEY.opt_state...` and `KEY.count`
        if match := re.fullmatch(r"(?P<key>(?:(?!\.opt_state\.).)+?)\.params\.(?P<path>.+)", name):
            models.setdefault(match["key"], {})[match["path"].replace(".", "/")] = entry
    return models


def is_scalar(model: ArrayTable) -> bool:
    """Whether a model of `models_of` gives numbers rather than tokens."""
    return any(path.startswith("trunk/") for path in model)


def chosen_model(model: str, models: Mapping[str, ArrayTable], where: str) -> str:
    """The key `model`; for "" the actor, or the only model.

    Raises ValueError, which names the models that there are, if it cannot be one of them.
    """
    known = ", ".join(models) or "none"
    if model and model not in models:
        raise ValueError(f"{where} holds no model {model!r}; there are: {known}")
    if model:
        return model
    if POLICY not in models and len(models) != 1:
        raise ValueError(f"{where} holds several models: name one of {known} with --model")
    return POLICY if POLICY in models else next(iter(models))


def chosen_policy(models: Mapping[str, ArrayTable], where: str) -> str:
    """The key of the policy that answers: the actor, or the only one.

    Raises ValueError, which names the models that there are, if there is no such policy.
    """
    policies = [key for key, model in models.items() if not is_scalar(model)]
    if POLICY in policies or len(policies) == 1:
        return POLICY if POLICY in policies else policies[0]
    if policies:
        raise ValueError(
            f"{where} holds several policies, {', '.join(policies)}, and none is called {POLICY}: "
            f"write one by export.py --model={policies[0]}, and name its folder with --run"
        )
    known = ", ".join(models) or "none"
    raise ValueError(f"{where} holds no policy, and nothing else answers; there are: {known}")
