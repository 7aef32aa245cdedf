"""FLOPs that a network's passes over a batch need: the numerator of model FLOPs utilisation.

Chowdhery et al. 2022 (PaLM, arxiv.org/abs/2204.02311), appendix B: what the mathematics asks for
and no more, so that recomputing, masking and padding do not count as use. Two FLOPs a weight and
token forward, of matrices alone; four a pair of tokens that attention lets see each other, head and
dim of it (half of what a full square has). Twice that backward: once for what went in, which only
stops at the embeddings, once for the weights, which is left out where they are frozen.
"""

import dataclasses
import math

from distflow_jax.models.decoder_config import DecoderConfig, ScalarModel
from distflow_jax.models.lora import is_adapter
from distflow_jax.models.parameters import EXPERT_PATHS, param_specs


@dataclasses.dataclass(frozen=True)
class Work:
    """A batch as it is stored, in numbers; a prompt that responses of a row share counts once."""

    tokens: int  # that go through the layers
    scored: int  # whose log-probs are asked for: they need the vocabulary's matrix
    pairs: int  # (token, token that it sees), itself included
    near_pairs: int = 0  # the same in layers with a window


def causal_pairs(length: int, window: int = 0) -> int:
    """Pairs (token, token that it sees) of one sequence; `window` 0: all before it."""
    near = min(length, window) if window else length
    return near * (near + 1) // 2 + (length - near) * near


def forward_flops(network: DecoderConfig | ScalarModel, work: Work) -> float:
    """2 (weights x tokens + head x scored) + 4 heads x dims x pairs, summed over the layers."""
    frozen, adapters, head = _weights(network)
    return 2.0 * ((frozen + adapters) * work.tokens + head * work.scored) + _attention(
        network, work
    )


def training_flops(network: DecoderConfig | ScalarModel, work: Work) -> float:
    """Forward and backward: three times the forward; of weights frozen beside adapters twice.

    Without adapters 6 (weights x tokens + head x scored) + 12 heads x dims x pairs.
    """
    frozen, adapters, head = _weights(network)
    passes = 3 if _decoder(network).lora is None else 2
    of_frozen = 2.0 * (frozen * work.tokens + head * work.scored)
    return passes * of_frozen + 3 * (2.0 * adapters * work.tokens + _attention(network, work))


def _decoder(network: DecoderConfig | ScalarModel) -> DecoderConfig:
    return network.trunk if isinstance(network, ScalarModel) else network


def _weights(network: DecoderConfig | ScalarModel) -> tuple[float, float, int]:
    """(weights that a token meets without adapters, those of adapters, the vocabulary's matrix).

    Of experts a token meets those it goes through. A scalar head is one column, and not counted.
    """
    c = _decoder(network)
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


def _attention(network: DecoderConfig | ScalarModel, work: Work) -> float:
    c = _decoder(network)
    near = sum(c.windowed)
    seen = (c.num_layers - near) * work.pairs + near * work.near_pairs
    return 4.0 * c.num_heads * c.head_dim * seen
