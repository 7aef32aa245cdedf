"""Implementations of attention and of grouped products: where each runs, serves, and can do.

training.attention, rollout.attention and model.grouped_product name one, and `auto` takes the first
that can do what a run needs. The functions themselves: models/block_attention.py, models/kernels/
and models/grouped_matmul.py. docs/reference/implementations.md is made from this table.
"""

import dataclasses
import importlib.util
from collections.abc import Collection, Iterator
from typing import NamedTuple

from distflow_jax.parsing.setting_checks import listed

ROWS, PREFILL, DECODE, PRODUCTS = "rows", "prefill", "decode", "grouped products"
PLACES = {
    ROWS: "Rows of the trainer (training.attention)",
    PREFILL: "Prefill (rollout.attention)",
    DECODE: "Decode steps (rollout.attention)",
    PRODUCTS: "Grouped products of a mixture's experts (model.grouped_product)",
}
# what a run may need of attention -> what makes it need that
FEATURES = {
    "packed rows": "several sequences in a row",
    "shared prompts": "training.share_prompts=True",
    "windows": "the model's sliding window",
    "image tokens": "images whose tokens see each other both ways",
    "divided rows": "mesh.context above 1",
    "sinks": "a learned logit per head",
    "soft caps": "capped scores",
}
_ALL = frozenset(FEATURES)
_TILES = _ALL - {"soft caps"}
_MASK = _ALL - {"sinks", "soft caps"}
_CACHE = frozenset({"shared prompts", "windows"})
_NOTHING: frozenset[str] = frozenset()  # grouped products are needed as they are
_EXACT = ("float32", "bfloat16")
_CPU, _GPU, _TPU = "cpu", "gpu", "tpu"
_EVERYWHERE = (_CPU, _GPU, _TPU)
_BFLOAT16 = ("bfloat16",)
_CUDNN_DIMS = range(8, 129, 8)  # on Hopper and later cuDNN has more
_TRITON_DIMS = (16, 32, 64, 128, 256)
_COMPILED = "interpreted; compiled by libtpu"
_BY_TRITON = "interpreted; compiled by Triton and ptxas"


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An implementation, as far as the choice needs it."""

    name: str
    serves: tuple[str, ...]  # of PLACES
    platforms: tuple[str, ...]
    by: str  # what computes it
    can: frozenset[str]  # of FEATURES
    auto: tuple[str, ...] = ()  # platforms on which auto may choose it
    dtypes: tuple[str, ...] = _EXACT
    head_dims: Collection[int] = ()  # rising; (): all
    packages: tuple[str, ...] = ()  # of which it needs one
    install: str = ""
    checked: str = ""  # how far; none has been measured on a GPU or TPU


class Need(NamedTuple):
    """A place for an implementation, and the needs of a run there."""

    where: str  # of PLACES
    platform: str  # of jax.Device
    head_dim: int  # of attention
    dtype: str
    features: frozenset[str] = frozenset()

    @property
    def on(self) -> str:
        """The platform, by its name in IMPLEMENTATIONS; XLA alone serves unknown ones, as a CPU."""
        known = {"cuda": _GPU, "rocm": _GPU} | dict(zip(_EVERYWHERE, _EVERYWHERE, strict=True))
        return known.get(self.platform, _CPU)


# fmt: off
IMPLEMENTATIONS = (  # auto takes an earlier one first
    Implementation("kernel", (ROWS,), (_TPU,), "our Pallas kernels over tiles, Mosaic", _TILES,
              auto=(_TPU,), head_dims=range(16, 513, 16), checked=_COMPILED),
    Implementation("cudnn", (ROWS, PREFILL), (_GPU,),
              "`jax.nn.dot_product_attention`, which adds the mask as a bias", _MASK,
              auto=(_GPU,), dtypes=_BFLOAT16, head_dims=_CUDNN_DIMS,
              packages=("jax_cuda13_plugin", "jax_cuda12_plugin"),
              install="pip install jax[cuda13]",
              checked="its arguments, by XLA; lowered for CUDA"),
    Implementation("splash", (ROWS,), (_TPU,),
              "splash attention of `jax.experimental.pallas`, by segment ids",
              frozenset({"packed rows", "windows", "sinks", "soft caps"}),
              auto=(_TPU,), dtypes=_BFLOAT16, checked=_COMPILED),
    Implementation("transformer_engine", (ROWS,), (_GPU,),
              "`transformer_engine.jax`, cuDNN over packed segments",
              frozenset({"packed rows", "windows", "sinks"}),
              auto=(_GPU,), dtypes=_BFLOAT16, head_dims=_CUDNN_DIMS,
              packages=("transformer_engine",),
              install="pip install --no-build-isolation transformer_engine[jax]",
              checked="not run: written against release 2.20.2"),
    Implementation("tokamax", (ROWS,), (_GPU, _TPU), "`tokamax.dot_product_attention`, by a mask",
              _MASK | {"soft caps"}, auto=(_GPU, _TPU), dtypes=_BFLOAT16, packages=("tokamax",),
              install="pip install tokamax", checked="its XLA form on a CPU, release 0.0.12"),
    Implementation("blocks", (ROWS,), _EVERYWHERE, "tiles in loops of XLA", _TILES,
              auto=(_CPU, _GPU), checked="on CPUs"),
    Implementation("masked", (ROWS, PREFILL), _EVERYWHERE, "all scores of a row at once", _ALL,
              auto=_EVERYWHERE, checked="on CPUs"),
    Implementation("kernel", (ROWS,), (_GPU,),
              "our Pallas kernels over tiles, Triton, a backend that jax deprecates", _TILES,
              dtypes=_BFLOAT16, head_dims=_TRITON_DIMS, checked=_BY_TRITON),
    Implementation("tpu", (DECODE,), (_TPU,), "our Pallas kernel over KV pages, Mosaic", _CACHE,
              auto=(_TPU,), head_dims=range(16, 513, 16), checked=_COMPILED),
    Implementation("pages", (DECODE,), _EVERYWHERE,
              "a walk over KV pages in the order of memory, in XLA", _CACHE, auto=(_CPU,),
              checked="on CPUs"),
    Implementation("reference", (DECODE,), _EVERYWHERE,
              "a loop over the pages of every sequence, in XLA", _CACHE, auto=(_GPU, _TPU),
              checked="on CPUs"),
    Implementation("gpu", (DECODE,), (_GPU,),
              "our Pallas kernel over KV pages, Triton, a backend that jax deprecates", _CACHE,
              head_dims=_TRITON_DIMS, checked=_BY_TRITON),
    Implementation("ragged_dot", (PRODUCTS,), (_TPU,), "`jax.lax.ragged_dot_general`", _NOTHING,
              auto=(_TPU,), checked="compiled by libtpu"),
    Implementation("blocks", (PRODUCTS,), _EVERYWHERE,
              "blocks of rows of one group, in a loop of XLA", _NOTHING, auto=(_CPU, _GPU),
              checked="on CPUs"),
    Implementation("ragged_dot", (PRODUCTS,), (_CPU, _GPU),
              "`jax.lax.ragged_dot_general`; XLA may copy all rows for each expert", _NOTHING,
              auto=(_GPU,), checked="on CPUs"),
    Implementation("tokamax", (PRODUCTS,), (_GPU, _TPU), "`tokamax.ragged_dot_general`", _NOTHING,
              auto=(_GPU, _TPU), dtypes=_BFLOAT16, packages=("tokamax",),
              install="pip install tokamax", checked="its XLA form on a CPU, release 0.0.12"),
)
# fmt: on


def names(*where: str) -> tuple[str, ...]:
    """The names that a setting may have whose implementation serves any of `where`, auto first."""
    found = (one.name for one in IMPLEMENTATIONS if set(where) & set(one.serves))
    return ("auto", *dict.fromkeys(found))


def lacks(one: Implementation, need: Need) -> str:
    """A reason, in words, for which an implementation cannot serve a need; "" if it can."""
    missing = [name for name in FEATURES if name in need.features - one.can]
    if need.where not in one.serves:
        return f"it does not serve {need.where}"
    if need.on not in one.platforms:
        return _elsewhere(one.platforms, need)
    if missing:
        return f"it does not support {missing[0]} ({FEATURES[missing[0]]})"
    if need.dtype not in one.dtypes:
        return f"it computes in {listed(one.dtypes)}, and the compute dtype is {need.dtype}"
    if one.head_dims and need.head_dim not in one.head_dims:
        return f"it supports head dims {shown_dims(one)}, and the model's is {need.head_dim}"
    if one.packages and not any(map(importlib.util.find_spec, one.packages)):
        return f"it needs {one.packages[0]}, which is not installed: {one.install}"
    return ""


def candidates(need: Need) -> Iterator[Implementation]:
    """The implementations that auto may choose for a need, the preferred one first."""
    return (one for one in IMPLEMENTATIONS if need.on in one.auto and not lacks(one, need))


def preferred_lacks(need: Need) -> str:
    """The reason for which the implementation that auto prefers is no candidate; "" if it is."""
    first = next(x for x in IMPLEMENTATIONS if need.on in x.auto and need.where in x.serves)
    lack = lacks(first, need)
    return lack and f"not {first.name}: {lack}"


def named(setting: str, name: str, need: Need) -> Implementation:
    """The implementation that `setting`=`name` forces.

    Raises ValueError, in one line with what it lacks and the names that can be used, if it cannot
    do what is needed.
    """
    found = [one for one in IMPLEMENTATIONS if one.name == name and need.where in one.serves]
    fits = [one for one in found if not lacks(one, need)]
    if fits:
        return fits[0]
    here = [lacks(one, need) for one in found if need.on in one.platforms]
    lack = here[0] if here else _elsewhere([p for one in found for p in one.platforms], need)
    others = (one.name for one in IMPLEMENTATIONS if not lacks(one, need))
    use = listed(map(repr, ("auto", *dict.fromkeys(others))))
    raise ValueError(f"{setting}={name!r}: {lack}; use {use}")


def _elsewhere(platforms: Collection[str], need: Need) -> str:
    runs = listed(name.upper() + "s" for name in platforms)
    return f"it runs on {runs}, and the devices here are of platform {need.platform!r}"


def shown_dims(one: Implementation) -> str:
    """The head dims of an implementation, in words."""
    if isinstance(one.head_dims, range):
        return f"divisible by {one.head_dims.step} up to {one.head_dims[-1]}"
    return listed(map(str, one.head_dims or ("all",)))
