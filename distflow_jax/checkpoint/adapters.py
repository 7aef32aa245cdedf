"""Low-rank adapters of the models in a checkpoint."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from distflow_jax.checkpoint.checkpointer import Contents
from distflow_jax.config.training_config import LoraConfig
from distflow_jax.models.lora import is_adapter
from distflow_jax.parsing.json_text import read_json_object

LORA = "lora"  # key of a checkpoint's info


def adapters_info(lora: LoraConfig) -> dict[str, Any]:
    """The entry of a checkpoint's info that describes a run's adapters."""
    return {LORA: dataclasses.asdict(lora) | {"targets": list(lora.targets)}}


def adapters_of(contents: Contents, key: str, workdir: pathlib.Path) -> LoraConfig | None:
    """The adapters of the model `key` in a checkpoint of `workdir`; None if it has none.

    A checkpoint of an older version does not say their scale: it is read from the run's
    config.json. Raises ValueError if that fails.
    """
    if not _has_adapters(contents, f"{key}.params."):
        return None
    path = workdir / "config.json"
    try:
        return _saved(contents, path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not describe the adapters of {key!r}: {error}") from error


def changed_adapters(contents: Contents, now: LoraConfig, workdir: pathlib.Path) -> str:
    """The keys of `lora` by which a run would not go on as the checkpoint's did; "" for none.

    Shapes do not depend on alpha, but weights do. Where the checkpoint is of an older version, and
    config.json says nothing either, nothing is known.
    """
    try:
        before = _saved(contents, workdir / "config.json")
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if not (before.rank or now.rank):
        return ""
    then, ours = (
        dataclasses.asdict(x) | {"targets": tuple(sorted(x.targets))} for x in (before, now)
    )
    names = ["rank"] if not (before.rank and now.rank) else list(then)
    return "; ".join(
        f"lora.{name} was {then[name]!r} and is {ours[name]!r}"
        for name in names
        if then[name] != ours[name]
    )


def _has_adapters(contents: Contents, start: str) -> bool:
    return any(name.startswith(start) and is_adapter(name) for name in contents.arrays)


def _saved(contents: Contents, path: pathlib.Path) -> LoraConfig:
    """The adapters by the checkpoint's record, or else by config.json at `path`."""
    saved: Mapping[str, Any] = contents.info.get(LORA) or read_json_object(path)[LORA]
    rank, alpha, targets = int(saved["rank"]), float(saved["alpha"]), tuple(saved["targets"])
    # earlier versions took settings of adapters that there are not
    return LoraConfig(rank, alpha, targets) if rank else LoraConfig()
