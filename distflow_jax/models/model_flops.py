"""FLOPs of a network's passes over a batch: the numerator of model FLOPs utilisation.

Chowdhery et al. 2022 (PaLM, arxiv.org/abs/2204.02311), appendix B. Only necessary operations count:
recomputation, masked scores and padding do not. The forward pass takes two FLOPs per weight of a
matrix and token, and four per (query, key) pair that attention allows, head and head dim (half of a
full square). The backward pass takes twice that: once for the gradient of inputs, which stops only
at the embeddings, once for the gradient of weights, which frozen weights do not need.
"""

import dataclasses
import math

import numpy as np

from distflow_jax.models.decoder_config import DecoderConfig, ScalarModel, decoder_of
from distflow_jax.models.lora import is_adapter, text_frozen
from distflow_jax.models.parameters import EXPERT_PATHS, param_specs
from distflow_jax.models.vision.tower_params import tower_params
from distflow_jax.models.vision.vision_config import VisionConfig


@dataclasses.dataclass(frozen=True)
class BatchWork:
    """Sizes of a packed batch; a prompt that responses of a row share counts once."""

    tokens: int  # processed by the layers
    scored: int  # with log-probs, which need the vocabulary's matrix
    pairs: int  # (query, key) pairs that attention allows, a token with itself included
    near_pairs: int = 0  # the same in layers with a window
    patches: int = 0  # of images, which the vision tower processes
    patch_pairs: int = 0  # pairs of patches of one image, both ways
    window_pairs: int = 0  # the same in layers with windows


def causal_pairs(length: int, window: int = 0) -> int:
    """Number of (query, key) pairs of one causal sequence; `window` 0 stands for no window."""
    near = min(length, window) if window else length
    return near * (near + 1) // 2 + (length - near) * near


def with_patches(
    work: BatchWork, window: int, positions: np.ndarray, segments: np.ndarray
) -> BatchWork:
    """The work with the patches of images added: positions int32 [N, 2], segments int32 [N].

    Segment 0 is padding. Numbers are those of one prompt, row or chunk; call it for each. `window`
    is that of the tower.
    """
    positions, segments = positions[segments > 0], segments[segments > 0]
    places = np.column_stack([segments, positions // max(window, 1)])

    def pairs(numbers: np.ndarray) -> int:
        counts = np.unique(numbers, axis=0, return_counts=True)[1]
        return int(np.sum(np.square(counts, dtype=np.int64)))

    return dataclasses.replace(
        work,
        patches=work.patches + len(segments),
        patch_pairs=work.patch_pairs + pairs(segments),
        window_pairs=work.window_pairs + (pairs(places) if window else 0),
    )


def forward_flops(network: DecoderConfig | ScalarModel, work: BatchWork) -> float:
    """FLOPs of a forward pass, summed over the layers.

    2 (weights x tokens + head x scored) + 4 heads x dims x pairs.
    """
    frozen, adapters, head = _weights(network)
    text = 2.0 * ((frozen + adapters) * work.tokens + head * work.scored)
    return text + _attention(network, work) + tower_flops(decoder_of(network).vision, work)


def training_flops(network: DecoderConfig | ScalarModel, work: BatchWork) -> float:
    """FLOPs of a forward and backward pass: three times the forward pass, for frozen weights twice.

    Without adapters 6 (weights x tokens + head x scored) + 12 heads x dims x pairs.
    """
    frozen, adapters, head = _weights(network)
    passes = 2 if decoder_of(network).lora is not None or text_frozen(network) else 3
    of_frozen = 2.0 * (frozen * work.tokens + head * work.scored)
    text = passes * of_frozen + 3 * (2.0 * adapters * work.tokens + _attention(network, work))
    tower = decoder_of(network).vision
    # a tower that is not trained needs no backward pass: images have no gradient
    trained = tower is not None and not tower.frozen and decoder_of(network).lora is None
    return text + (3 if trained else 1) * tower_flops(tower, work)


def tower_flops(tower: VisionConfig | None, work: BatchWork) -> float:
    """FLOPs of the tower's forward pass over the batch's patches.

    2 (weights x patches + projector x features) + 4 hidden x pairs, summed over the layers.
    """
    if tower is None:
        return 0.0
    per_patch = per_feature = 0.0
    for path, param in tower_params(tower).items():
        size = math.prod(param.shape)
        if path.endswith(("_bias", "norm")) or path == "position":
            continue
        if path.startswith(("merger/", "deepstack/")):
            per_feature += size
        else:  # both frames of a kernel see one image: their sum is one product
            per_patch += size / (tower.traits.frames if path == "patch" else 1)
    near = tower.num_layers - len(tower.full_layers) if tower.window else 0
    pairs = (tower.num_layers - near) * work.patch_pairs + near * work.window_pairs
    features = work.patches / tower.patches_per_feature
    return 2.0 * (per_patch * work.patches + per_feature * features) + (
        4.0 * tower.hidden_size * pairs
    )


def _weights(network: DecoderConfig | ScalarModel) -> tuple[float, float, int]:
    """Weights applied to a token: (without adapters, of adapters, of the vocabulary's matrix).

    Only the experts chosen for a token count. A scalar head is one column and does not count.
    """
    c = decoder_of(network)
    own, adapters = float(c.num_layers * c.hidden_size * c.num_experts), 0.0  # the router
    for path, spec in param_specs(c).items():
        size = math.prod(spec.shape) if path.startswith("layers/") and spec.inputs else 0
        if is_adapter(path):
            adapters += size
        elif c.num_experts and path in EXPERT_PATHS:
            own += size * c.experts_per_token / c.num_experts
        else:
            own += size
    return own, adapters, 0 if isinstance(network, ScalarModel) else c.vocab_size * c.hidden_size


def _attention(network: DecoderConfig | ScalarModel, work: BatchWork) -> float:
    c = decoder_of(network)
    near = sum(c.windowed)
    seen = (c.num_layers - near) * work.pairs + near * work.near_pairs
    return 4.0 * c.num_heads * c.head_dim * seen
