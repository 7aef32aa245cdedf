"""The models in a checkpoint, and the one that is meant where none is named."""

import re
from collections.abc import Mapping

from distflow_jax.checkpoint.checkpointer import ArrayTable

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
