"""Export of adapters as a PEFT folder: adapter_config.json and one safetensors file.

Format: huggingface.co/docs/peft/developer_guides/checkpoint. A linear layer of transformers has
weight [out, in]; PEFT's lora_A is [rank, in], its lora_B [out, rank], and the layer computes
W x + (lora_alpha / r) B A x. `peft.PeftModel.from_pretrained(base, folder)` reads the folder.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from distflow_jax.config.training_config import LoraConfig
from distflow_jax.models import lora
from distflow_jax.models.decoder_config import DecoderConfig, ScalarModel
from distflow_jax.models.families.name_map import Weight
from distflow_jax.models.weights.atomic_folder import check_new_folder, new_folder
from distflow_jax.models.weights.file_hashes import write_hashes
from distflow_jax.models.weights.hf_folder import Written
from distflow_jax.models.weights.safetensors_writer import SafetensorsWriter, num_bytes
from distflow_jax.models.weights.source import FAMILIES

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of PEFT's wrapper, before the name of the layer in transformers
_ONE_FILE = 1 << 62  # bytes; PEFT reads one file
# the text model inside a model that sees, as transformers names its module since 4.52; released
# files have older names, which PEFT does not convert in all families
_TEXT_MODULES = {"smolvlm": "model.text_model."}
_TEXT_MODULES |= dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "gemma3"), "model.language_model.")


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Adapters to export.

    `network` is the model with the adapters, `base` the name of its base model. `arrays` starts a
    stream of (path, stacked array) of all adapters.
    """

    network: DecoderConfig | ScalarModel
    base: str
    arrays: Callable[[], Iterator[tuple[str, np.ndarray]]]


def write_peft_folder(
    out: Path, adapters: Adapters, *, dtype: str = "float32", overwrite: bool = False
) -> Written:
    """Writes the folder; raises ValueError, and leaves nothing behind, if that is not possible.

    `dtype` is one of safetensors_writer.DTYPES. Only policies are supported: the folder has no
    place for a scalar model's head.
    """
    network = adapters.network
    if isinstance(network, ScalarModel):
        raise ValueError(
            "the adapters of a critic or reward model cannot be exported without its head: export "
            "it merged, without --adapter"
        )
    assert network.lora is not None, "Adapters needs a network with adapters"
    weights = _targets(network, network.lora)
    shapes = {
        name: shape
        for weight in weights.values()
        for layer in range(network.num_layers)
        for name, shape in zip(
            _names(network, weight, layer), _shapes(weight, network.lora.rank), strict=True
        )
    }
    needed = sum(num_bytes(shape, dtype) for shape in shapes.values())
    check_new_folder(out, overwrite=overwrite, needed=needed, mark=CONFIG_FILE)
    with new_folder(out) as folder:
        with SafetensorsWriter(folder, shapes, dtype, _ONE_FILE) as writer:
            for path, array in adapters.arrays():
                which = (lora.A, lora.B).index(path[-len(lora.A) :])
                weight = weights[path[: -len(lora.A)]]
                for layer, matrix in enumerate(_matrices(array, which)):
                    writer.write(_names(network, weight, layer)[which], matrix)
        # the writer names a single file as a model's
        (written,) = folder.glob("*.safetensors")
        written.rename(folder / WEIGHTS_FILE)
        config = json.dumps(_config(adapters, weights), indent=2)
        (folder / CONFIG_FILE).write_text(config + "\n", "utf-8")
        write_hashes(folder)
        files = {entry.name: entry.stat().st_size for entry in sorted(folder.iterdir())}
    return Written(files, sum(math.prod(shape) for shape in shapes.values()), writer.lost)


def _targets(network: DecoderConfig, config: LoraConfig) -> dict[str, Weight]:
    """{path: tensor in Hugging Face's files} of the parameters with adapters."""
    paths = {f"layers/{name}" for name in config.targets}
    weights = FAMILIES[network.family].hf_weights(network)
    return {weight.path: weight for weight in weights if weight.path in paths}


def _text_module(network: DecoderConfig) -> str:
    """Start of the names of transformers' modules in the text model."""
    return "model." if network.vision is None else _TEXT_MODULES.get(network.family, "model.")


def _names(network: DecoderConfig, weight: Weight, layer: int) -> tuple[str, str]:
    name = weight.source.format(layer=layer).removesuffix(".weight")
    module = _text_module(network) + name[name.index("layers.") :]
    return tuple(f"{_PREFIX}{module}.lora_{which}.weight" for which in "AB")


def _shapes(weight: Weight, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    outputs, inputs = weight.source_shape
    return (rank, inputs), (outputs, rank)


def _matrices(array: np.ndarray, which: int) -> np.ndarray:
    """PEFT's matrices of all layers, for which=0 those of A, for which=1 those of B.

    A [layers, *inputs, rank] -> [layers, rank, in], B [layers, rank, *outputs] ->
    [layers, out, rank].
    """
    layers = len(array)
    rank = array.shape[-1] if which == 0 else array.shape[1]
    flat = array.reshape(layers, -1, rank) if which == 0 else array.reshape(layers, rank, -1)
    return flat.transpose(0, 2, 1)


def _config(adapters: Adapters, weights: dict[str, Weight]) -> dict[str, Any]:
    config, text = adapters.network.lora, _text_module(adapters.network)
    names = (w.source.removesuffix(".weight").rpartition(".")[-1] for w in weights.values())
    modules: list[str] | str = sorted(names)
    if text != "model.":  # a list of last names would select those of the tower, too
        modules = rf".*{re.escape(text)}.*\.({'|'.join(modules)})"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapters.base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_rslora": False,
    }
