"""Towers with random weights: of `random:` models that see images, and beside a text model."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from distflow_jax.did_you_mean import hint
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.families.tower_config import PICTURES
from distflow_jax.models.vision.vision_config import TRAITS, VisionConfig
from distflow_jax.parsing.checked_fields import MOST_INTEGER
from distflow_jax.parsing.one_line import shown

# options -> fields of VisionConfig; in a whole model's source _SIZES have the prefix vision_
_SIZES = {
    "hidden": "hidden_size",
    "layers": "num_layers",
    "heads": "num_heads",
    "mlp": "mlp_size",
    "window": "window",
}
_OWN = {"patch": "patch_size", "merge": "merge", "tiles": "longest_edge"}
_SIDE = "image"  # pixels of a side of a square picture, or of the grid of learned positions
TOWER_OPTIONS = {**_SIZES, **_OWN, _SIDE: "grid"}
MODEL_OPTIONS = {**{f"vision_{name}": field for name, field in _SIZES.items()}, **_OWN}
MODEL_OPTIONS |= {_SIDE: "grid"}
SEEING = ("smolvlm", "qwen2_5_vl", "qwen3_vl")  # families that always have a tower
# shares of a head's pairs that turn by time, row and column
_SECTIONS = {"qwen2_5_vl": (16, 24, 24), "qwen3_vl": (24, 20, 20)}
_SMALL = {"hidden_size": 64, "num_layers": 2, "num_heads": 4}


def split_options(spec: str, items: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    """Options of the text model as they are, and those of its tower by VisionConfig's fields."""
    rest, tower = [], {}
    for item in items:
        option, _, text = item.partition("=")
        if option in MODEL_OPTIONS:
            tower[option.removeprefix("vision_")] = _number(spec, option, text)
        elif option == "vision":
            tower[option] = _number(spec, option, text)
        else:
            rest.append(item)
    return rest, tower


def seeing(spec: str, config: DecoderConfig, options: Mapping[str, int]) -> DecoderConfig:
    """The random model `config` with a random tower, if its family or its options have one."""
    given = dict(options)
    wanted = given.pop("vision", int(config.family in SEEING or bool(given)))
    if not wanted:
        if config.family in SEEING or given:
            raise ValueError(f"{spec}: {config.family} with vision=0 is not supported; remove it")
        return config
    if config.family not in (*SEEING, "gemma3"):
        raise ValueError(
            f"{spec}: {config.family} has no tower of its own; use model.vision=random:siglip, or "
            f"a family of {', '.join((*SEEING, 'gemma3'))}"
        )
    tower = _tower(spec, config.family, config.hidden_size, {**_SMALL, **_by_field(given)}, given)
    last = config.vocab_size - 1
    tower = dataclasses.replace(tower, image_token=last)
    if config.family != "smolvlm":
        tower = dataclasses.replace(tower, start_token=last - 1, end_token=last - 2)
    rope: dict[str, Any] = {}
    if shares := _SECTIONS.get(config.family):
        pairs = config.head_dim // 2
        row, column = (pairs * share // sum(shares) for share in shares[1:])
        rope = {"rope_sections": (pairs - row - column, row, column)}
        rope |= {"rope_interleaved": config.family == "qwen3_vl"}
    try:
        return dataclasses.replace(config, vision=tower, **rope)
    except ValueError as error:
        raise ValueError(f"{spec}: {error}") from error


def new_tower(spec: str, text: DecoderConfig) -> VisionConfig:
    """The tower of `model.vision`, such as random:siglip?hidden=192&layers=6, for a text model.

    Raises ValueError, which begins with the setting.
    """
    place = f"model.vision={spec}"
    kind, _, rest = spec.partition(":")
    name, _, query = rest.partition("?")
    if kind != "random" or name != "siglip":
        raise ValueError(
            f'{place} is not supported: use random:siglip?hidden=192&layers=6&patch=8, "none" for '
            'Gemma 3 without its tower, or "" for the tower of the model itself'
        )
    given = {}
    for item in filter(None, query.split("&")):
        option, _, value = item.partition("=")
        if option not in TOWER_OPTIONS:
            near = hint(option, TOWER_OPTIONS)
            raise ValueError(f"{place}: unknown option {option!r}: {near}")
        given[option] = _number(place, option, value)
    tower = _tower(place, name, text.hidden_size, _by_field(given), given)
    return dataclasses.replace(tower, image_token=text.vocab_size - 1)


def _by_field(options: Mapping[str, int]) -> dict[str, Any]:
    return {TOWER_OPTIONS[name]: value for name, value in options.items() if name != _SIDE}


def _tower(
    spec: str, family: str, width: int, fields: dict[str, Any], options: Mapping[str, int]
) -> VisionConfig:
    """The tower of a family with these fields; `image` is still in pixels."""
    fields.setdefault("mlp_size", 4 * fields.get("hidden_size", VisionConfig.hidden_size))
    patch = fields.get("patch_size", VisionConfig.patch_size)
    merge = fields.get("merge", VisionConfig.merge)
    layers = fields.get("num_layers", VisionConfig.num_layers)
    pictures = dict(PICTURES[family])
    if TRAITS[family].learned:
        side = options.get(_SIDE, 8 * patch)
        if patch < 1 or side % patch:
            raise ValueError(f"{spec}: patch={patch} does not divide image={side}")
        fields["grid"] = side // patch
    elif _SIDE in options:
        raise ValueError(f"{spec}: {family} takes images of any size; remove image=")
    if family == "smolvlm":
        pictures["longest_edge"] = 0
    if family.startswith("qwen"):
        unit = (patch * merge) ** 2
        pictures |= {"least_pixels": 4 * unit, "most_pixels": 1024 * unit}
    if family == "qwen2_5_vl":
        fields.setdefault("window", 2 * merge)
        fields["full_layers"] = (layers - 1,)
    if family == "qwen3_vl":
        fields["deepstack"] = tuple(range(min(layers - 1, 3)))
    try:
        return VisionConfig(family=family, width=width, **{**pictures, **fields})
    except ValueError as error:
        raise ValueError(f"{spec}: {error}") from error


def _number(spec: str, option: str, text: str) -> int:
    if not text.isdecimal() or int(text) > MOST_INTEGER:
        raise ValueError(
            f"{spec}: {option} must be a whole number up to {MOST_INTEGER}, got {shown(text)}"
        )
    return int(text)
