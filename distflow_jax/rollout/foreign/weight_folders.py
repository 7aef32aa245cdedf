"""Weights as Hugging Face folders, for engines that read them from a disk."""

import dataclasses
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.models.weights.hf_folder import Export, write_hf_folder


@dataclasses.dataclass(frozen=True)
class WeightFolders:
    """Folders `root`/version-N, complete when they have their name; the newest one is kept.

    `network`: without adapters. `seen_as`: the path of `root` on the engine's machine, where it
    differs.
    """

    root: pathlib.Path
    network: DecoderConfig
    tokenizer: Tokenizer
    tokenizer_folder: pathlib.Path | None = None
    dtype: str = "float32"  # of the files
    seen_as: str = ""

    def write(self, params: Any, version: int) -> str:
        """Writes parameters in the form of training; returns the folder as the engine sees it.

        ValueError or OSError if it cannot be written.
        """
        name = f"version-{version}"

        def stream() -> Iterator[tuple[str, np.ndarray]]:
            for path, array in flatten_dict(params, sep="/").items():
                yield path, np.asarray(array, np.float32)

        export = Export(self.network, self.tokenizer, stream, self.tokenizer_folder)
        write_hf_folder(self.root / name, export, dtype=self.dtype, overwrite=True)
        return str(pathlib.Path(self.seen_as or self.root.absolute()) / name)

    def keep_only(self, version: int) -> None:
        """Deletes all other versions, once the engine has read this one."""
        for folder in self.root.glob("version-*"):
            if folder.name != f"version-{version}":
                shutil.rmtree(folder, ignore_errors=True)
