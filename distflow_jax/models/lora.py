"""Low-rank adapters: division of parameters into trained and frozen ones, and merging.

Hu et al. 2021, arxiv.org/abs/2106.09685. An adapter is two parameters beside its projection, A at
PATH_lora_a [layers, *inputs, rank] and B at PATH_lora_b [layers, rank, *outputs]; transformer.py
applies them. Parameters are nested dicts of arrays.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from distflow_jax.config.training_config import LoraConfig
from distflow_jax.models.decoder_config import DecoderConfig, ScalarModel, decoder_of
from distflow_jax.models.vision.vision_config import VISION

A, B = "_lora_a", "_lora_b"


def lora_of(network: DecoderConfig | ScalarModel) -> LoraConfig | None:
    """The network's adapters; None if it has none, and all of its parameters are trained."""
    return decoder_of(network).lora


def is_trained(network: DecoderConfig | ScalarModel, path: str) -> bool:
    """Whether an update changes the parameter at `path`.

    With adapters only these are trained, and the head of a scalar model, which starts untrained. A
    vision tower is trained with the whole model, unless it is frozen, or alone.
    """
    decoder = decoder_of(network)
    if decoder.vision is not None and path.removeprefix("trunk/").startswith(f"{VISION}/"):
        return decoder.lora is None and not decoder.vision.frozen
    if decoder.lora is None and not text_frozen(network):
        return True
    return is_adapter(path) or (isinstance(network, ScalarModel) and path == "head")


def text_frozen(network: DecoderConfig | ScalarModel) -> bool:
    """Whether the text model is not trained, nor adapters of it: training.freeze=language."""
    decoder = decoder_of(network)
    return decoder.vision is not None and decoder.vision.alone


def divide(network: DecoderConfig | ScalarModel, params: Any) -> tuple[Any, Any]:
    """Divides parameters, or any tree of the same structure, into (trained, frozen)."""
    flat = flatten_dict(params, sep="/")
    trained = {path: x for path, x in flat.items() if is_trained(network, path)}
    frozen = {path: x for path, x in flat.items() if path not in trained}
    return unflatten_dict(trained, sep="/"), unflatten_dict(frozen, sep="/")


def join(trained: Any, frozen: Any) -> Any:
    """Inverse of `divide`."""
    return unflatten_dict(flatten_dict(frozen, sep="/") | flatten_dict(trained, sep="/"), sep="/")


def is_adapter(path: str) -> bool:
    """Whether the parameter is the A or B of an adapter."""
    return path.endswith((A, B))


def merged(params: Any, scale: float) -> Any:
    """Replaces W, A and B by W + scale B A; parameters without an adapter are unchanged.

    `params` are a decoder's or a scalar model's, with adapters or without. Traceable.
    """
    flat = flatten_dict(params, sep="/")
    # the sampler's weights must equal the trainer's sum: no bfloat16 products on TPUs
    matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    plain = [path for path in flat if not is_adapter(path)]
    return unflatten_dict(
        {path: merged_one(flat.get, path, scale, matmul) for path in plain}, sep="/"
    )


def merged_one(
    read: Callable[[str], Any],
    path: str,
    scale: float,
    matmul: Callable[[Any, Any], Any] = np.matmul,
) -> Any:
    """The merged parameter at `path`, see `merged`.

    `read(path)` returns a parameter, or None if it does not exist. Arrays are NumPy's, or JAX's if
    `matmul` is.
    """
    weight, a, b = (read(path + end) for end in ("", A, B))
    if a is None or b is None:
        return weight
    layers, rank = b.shape[:2]
    product = matmul(a.reshape(layers, -1, rank), b.reshape(layers, rank, -1))
    # a frozen weight may be stored in the dtype of the activations
    return weight.astype(product.dtype) + scale * product.reshape(weight.shape)
