"""Which models of a checkpoint have low-rank adapters, and of what kind."""

import json
import pathlib

from distflow_jax.checkpoint.checkpointer import ArrayTable
from distflow_jax.models.decoder_config import LoraConfig
from distflow_jax.models.lora import is_adapter


def adapters_of(table: ArrayTable, key: str, workdir: pathlib.Path) -> LoraConfig | None:
    """The adapters of the model `key` in a checkpoint of `workdir`; None where it has none.

    `table` is Checkpointer.contents'. How they are scaled stands in the run's config.json: raises
    FileNotFoundError or ValueError where that cannot be read.
    """
    start = f"{key}.params."
    if not any(name.startswith(start) and is_adapter(name) for name in table):
        return None
    path = workdir / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"model {key!r} of {workdir} has adapters, and {path}, which says how they are scaled, "
            "is not there"
        )
    try:
        given = json.loads(path.read_text("utf-8"))["lora"]
        return LoraConfig(int(given["rank"]), float(given["alpha"]), tuple(given["targets"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} says nothing of the adapters of {key!r}: {error}") from error
