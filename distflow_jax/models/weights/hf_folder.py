"""Export of a model as a Hugging Face folder: weights, config, tokenizer, generation config.

transformers and open_model read the folder; SHA256SUMS has hashes of its files. A scalar model
(critic, reward model) becomes the family's sequence classifier with one label and the scalar head
as `score`: transformers' score of a text is then the scalar at its last token.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from distflow_jax.models.decoder_config import DecoderConfig, ScalarModel, decoder_of
from distflow_jax.models.families.name_map import unstacked_arrays
from distflow_jax.models.families.tower_config import PREPROCESSOR, preprocessor_to_hf
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.models.weights.atomic_folder import check_new_folder, new_folder
from distflow_jax.models.weights.file_hashes import write_hashes
from distflow_jax.models.weights.random_tower import SEEING
from distflow_jax.models.weights.safetensors_writer import (
    Lost,
    SafetensorsWriter,
    num_bytes,
)
from distflow_jax.models.weights.source import FAMILIES

# files of a tokenizer
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
GENERATION_FILE = "generation_config.json"
# settings of transformers' processors of images
PICTURE_FILES = (
    f"{PREPROCESSOR}.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_SCORE = "score.weight"
# transformers' sequence classifiers with irregular names
_CLASSIFIERS = {"Gemma3ForCausalLM": "Gemma3TextForSequenceClassification"}
_OTHER_FILES = 64 << 20  # bytes; an upper bound for config and tokenizer


@dataclasses.dataclass(frozen=True)
class Export:
    """A model to export.

    `params` starts a stream of (path, whole stacked array), with the paths of param_specs(network).
    `tokenizer_folder` has the tokenizer as Hugging Face's files; None: new files are written.
    """

    network: DecoderConfig | ScalarModel
    tokenizer: Tokenizer
    params: Callable[[], Iterator[tuple[str, np.ndarray]]]
    tokenizer_folder: Path | None = None

    @property
    def decoder(self) -> DecoderConfig:
        """The network without a scalar head."""
        return decoder_of(self.network)


@dataclasses.dataclass(frozen=True)
class Written:
    """Result of an export: bytes of each file, and values out of the dtype's range."""

    files: dict[str, int]
    num_params: int
    lost: Lost


def write_hf_folder(
    out: Path,
    model: Export,
    *,
    dtype: str = "float32",
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> Written:
    """Writes the folder, with one parameter in memory at a time.

    `dtype` is one of safetensors_writer.DTYPES. The folder gets its name when it is complete.
    Raises ValueError, and leaves nothing behind, if it cannot be written.
    """
    shapes = tensor_shapes(model.network)
    needed = sum(num_bytes(shape, dtype) for shape in shapes.values()) + _OTHER_FILES
    settings = config_json(model, dtype)
    check_new_folder(out, overwrite=overwrite, needed=needed)
    with new_folder(out) as folder:
        with SafetensorsWriter(folder, shapes, dtype, max_shard_bytes) as writer:
            for path, array in model.params():
                for name, tensor in _tensors(model.network, path, array):
                    writer.write(name, tensor)
                del array  # before the stream makes the next one
        write_tokenizer(folder, model)
        _write_json(folder / "config.json", settings)
        if model.decoder.vision is not None:
            _write_pictures(folder, model)
        write_hashes(folder)
        files = {entry.name: entry.stat().st_size for entry in sorted(folder.iterdir())}
    count = sum(int(np.prod(shape)) for shape in shapes.values())
    return Written(files, count, writer.lost)


def tensor_shapes(network: DecoderConfig | ScalarModel) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in Hugging Face's form by name, in the order of the parameters."""
    scalar = isinstance(network, ScalarModel)
    decoder = network.trunk if scalar else network
    if decoder.vision is not None and decoder.family not in (*SEEING, "gemma3"):
        raise ValueError(
            f"a {decoder.family} model with a {decoder.vision.family} tower has no form in Hugging "
            "Face's files; only Llama models can be exported with such a tower, as SmolVLM"
        )
    shapes = {
        name: weight.source_shape
        for weight in _family(decoder).hf_weights(decoder)
        for name in weight.names(decoder.num_layers)
    }
    return shapes | ({_SCORE: (1, decoder.hidden_size)} if scalar else {})


def _tensors(
    network: DecoderConfig | ScalarModel, path: str, array: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    if not isinstance(network, ScalarModel):
        yield from unstacked_arrays(_family(network).hf_weights(network), path, array)
    elif path == "head":
        yield _SCORE, array[None]
    else:
        trunk = network.trunk
        weights = _family(trunk).hf_weights(trunk)
        yield from unstacked_arrays(weights, path.removeprefix("trunk/"), array)


def config_json(model: Export, dtype: str) -> dict[str, Any]:
    """Content of config.json: the family's config and the special ids.

    Raises ValueError for a scalar model of a family without a sequence classifier.
    """
    settings = dict(_family(model.decoder).config_to_hf(model.decoder)) | _special_ids(model)
    settings["torch_dtype"] = dtype  # all releases of transformers read this key
    if not isinstance(model.network, ScalarModel):
        return settings
    decoders = [name for name in settings["architectures"] if name.endswith("ForCausalLM")]
    if not decoders:
        raise ValueError(
            f"transformers has no sequence classifier for the family {model.decoder.family!r}: its "
            "policies can be exported, its critics and reward models cannot"
        )
    name = decoders[0].removesuffix("ForCausalLM") + "ForSequenceClassification"
    name = _CLASSIFIERS.get(decoders[0], name)
    settings |= {"architectures": [name], "id2label": {"0": "score"}, "label2id": {"score": 0}}
    if model.tokenizer.pad_id in model.tokenizer.stop_ids:
        # transformers scores the last token that is not padding; with an end token as padding that
        # would be the token before the end
        settings["pad_token_id"] = None
    return settings


def write_tokenizer(folder: Path, model: Export) -> None:
    """Copies the tokenizer's files, or writes the files that AutoTokenizer needs."""
    if model.tokenizer_folder is None:
        _write_new_tokenizer(folder, model.tokenizer, model.decoder.max_position)
    else:
        for name in (*TOKENIZER_FILES, GENERATION_FILE):
            if (model.tokenizer_folder / name).is_file():
                # without permissions: files of a cache may be read-only
                shutil.copyfile(model.tokenizer_folder / name, folder / name)
    if not (folder / GENERATION_FILE).exists():
        _write_json(folder / GENERATION_FILE, _special_ids(model))


def _write_pictures(folder: Path, model: Export) -> None:
    """Copies the settings of transformers' image processor, or writes them."""
    assert model.decoder.vision is not None, "a model without a tower has no pictures"
    for name in PICTURE_FILES:
        if model.tokenizer_folder is not None and (model.tokenizer_folder / name).is_file():
            shutil.copyfile(model.tokenizer_folder / name, folder / name)
    if not (folder / PICTURE_FILES[0]).exists():
        _write_json(folder / PICTURE_FILES[0], preprocessor_to_hf(model.decoder.vision))


def _write_new_tokenizer(folder: Path, tokenizer: Tokenizer, max_length: int) -> None:
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    special = {"eos_token": tokenizer.backend.id_to_token(tokenizer.stop_ids[0])}
    settings = special | dict(tokenizer.special_tokens)
    # this class loads tokenizer.json unchanged for all model families
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["model_max_length"] = max_length
    settings["clean_up_tokenization_spaces"] = False
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    _write_json(folder / "tokenizer_config.json", settings)


def _special_ids(model: Export) -> dict[str, Any]:
    tokenizer = model.tokenizer
    stop = list(tokenizer.stop_ids)
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": stop if len(stop) > 1 else stop[0],
        "pad_token_id": tokenizer.pad_id,
    }


def _family(decoder: DecoderConfig) -> ModuleType:
    return FAMILIES[decoder.family]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
