"""Low-rank adapters of the models in a checkpoint."""

import json
import pathlib

from distflow_jax.checkpoint.checkpointer import ArrayTable
from distflow_jax.models.decoder_config import LoraConfig
from distflow_jax.models.lora import is_adapter


def adapters_of(table: ArrayTable, key: str, workdir: pathlib.Path) -> LoraConfig | None:
    """The adapters of the model `key` in a checkpoint of `workdir`; None if it has none.

    `table` is that of Checkpointer.contents. The adapters' scale is read from the run's
    config.json; raises FileNotFoundError or ValueError if that fails.
    """
    start = f"{key}.params."
    if not any(name.startswith(start) and is_adapter(name) for name in table):
        return None
    path = workdir / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"model {key!r} of {workdir} has adapters, but {path}, which holds their scale, does "
            "not exist"
        )
    try:
        saved = json.loads(path.read_text("utf-8"))["lora"]
        return LoraConfig(int(saved["rank"]), float(saved["alpha"]), tuple(saved["targets"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not describe the adapters of {key!r}: {error}") from error
