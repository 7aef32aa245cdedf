"""Configuration of a decoder, common to all model families."""

import dataclasses
import math

from distflow_jax.config.training_config import LoraConfig
from distflow_jax.models.vision.vision_config import VisionConfig
from distflow_jax.parsing.checked_fields import (
    COUNT,
    POSITIVE,
    SIZE,
    above,
    at_least,
    integer_up_to,
    one_of,
)
from distflow_jax.parsing.setting_checks import Section, setting


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's frequency scaling (Grattafiori et al. 2024, arxiv.org/abs/2407.21783, sec. 3.2)."""

    factor: float = 8.0  # long wavelengths are stretched by this
    low_freq_factor: float = 1.0  # wavelengths above original / low are stretched in full
    high_freq_factor: float = 4.0  # wavelengths below original / high are unchanged
    original_max_position: int = 8192  # context length of pretraining

    def __post_init__(self):
        if self.factor < 1 or self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope scaling needs factor >= 1 and high_freq_factor > low_freq_factor, got {self}"
            )


@dataclasses.dataclass(frozen=True)
class YarnScaling(Section, name="yarn rope scaling "):
    """YaRN's frequency scaling, for positions beyond those of pretraining.

    High frequencies are unchanged, low frequencies are stretched, and scores are sharpened. Peng et
    al. 2023 (arxiv.org/abs/2309.00071), sec. 3.
    """

    # longest sequence, in multiples of original_max_position
    factor: float = setting(4.0, at_least(1))
    original_max_position: int = setting(32_768, COUNT)  # context length of pretraining
    beta_fast: float = 32.0  # pairs with more turns over the original length are unchanged
    beta_slow: float = 1.0  # pairs with fewer turns are stretched in full
    # of cosines and sines; None: 0.1 ln(factor) + 1
    attention_factor: float | None = setting(None, above(0))
    truncate: bool = True  # round both ends of the ramp outwards to whole pairs

    def __post_init__(self):
        super().__post_init__()
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(f"yarn rope scaling needs beta_fast > beta_slow > 0, got {self}")

    @property
    def table_scale(self) -> float:
        """Factor of cosines and sines; scores grow by its square."""
        if self.attention_factor is not None:
            return self.attention_factor
        return yarn_table_scale(self.factor)

    @property
    def max_position(self) -> int:
        """The longest supported sequence, in tokens."""
        return int(self.factor * self.original_max_position)


def yarn_table_scale(factor: float, weight: float = 1.0) -> float:
    """0.1 weight ln(factor) + 1; its square divides the softmax's temperature.

    Peng et al. 2023, eq. 22.
    """
    return 0.1 * weight * math.log(factor) + 1.0


RopeScaling = Llama3Scaling | YarnScaling

# Activations of the MLP's gate: Shazeer 2020 (arxiv.org/abs/2002.05202), SwiGLU and GEGLU.
ACTIVATIONS = ("silu", "gelu_tanh")

MOST_LAYERS = 4096  # of a model; the deepest published one has 1,000

_OF_EXPERTS = ("gate", "up", "down")  # once per expert in a mixture


@dataclasses.dataclass(frozen=True)
class DecoderConfig(Section, name="model "):
    """A pre-norm decoder with grouped-query attention, rotary positions and a gated MLP.

    With `num_experts`, a layer has that many MLPs, of which `experts_per_token` process each token.
    With `sliding_window`, all layers but every `full_every`-th limit a token to the last
    `sliding_window` tokens of its sequence, itself included; these layers rotate by
    `rope_local_theta`, the others by `rope_theta`.

    With `rope_sections` positions have three numbers (time, row, column; three times the same for
    text), and a pair of channels turns by one of them: of H/2 pairs the first section by time, the
    next by row, the last by column; interleaved: by time, row and column in turn, until a section
    is used up, and the rest by time.

    Parameters are a nested dict of arrays; `layers` arrays are stacked over the layers:

        embed/embedding            [vocab_size, hidden_size]
        layers/attention_norm      [num_layers, hidden_size]
        layers/query               [num_layers, hidden_size, num_heads, head_dim]
        layers/key                 [num_layers, hidden_size, num_kv_heads, head_dim]
        layers/value               [num_layers, hidden_size, num_kv_heads, head_dim]
        layers/query_bias          [num_layers, num_heads, head_dim]      (with attention_bias)
        layers/key_bias            [num_layers, num_kv_heads, head_dim]   (with attention_bias)
        layers/value_bias          [num_layers, num_kv_heads, head_dim]   (with attention_bias)
        layers/query_norm          [num_layers, head_dim]                 (with qk_norm)
        layers/key_norm            [num_layers, head_dim]                 (with qk_norm)
        layers/output              [num_layers, num_heads, head_dim, hidden_size]
        layers/attention_post_norm [num_layers, hidden_size]              (with post_norms)
        layers/NAME_lora_a         [num_layers, *inputs of NAME, rank]    (with lora)
        layers/NAME_lora_b         [num_layers, rank, *outputs of NAME]   (with lora)
        layers/mlp_norm            [num_layers, hidden_size]
        layers/gate                [num_layers, hidden_size, mlp_size]
        layers/up                  [num_layers, hidden_size, mlp_size]
        layers/down                [num_layers, mlp_size, hidden_size]
        layers/mlp_post_norm       [num_layers, hidden_size]              (with post_norms)
        layers/router              [num_layers, hidden_size, num_experts]     (with num_experts)
        final_norm                 [hidden_size]
        head                       [hidden_size, vocab_size]     (absent with tie_embeddings)

    The parameters of `vision` stand under that name, see VisionConfig.

    query and key are in Hugging Face's split-half rotary form. With num_experts gate, up and down
    have a dim of experts after that of layers. Norms multiply by their parameter, with norm_offset
    by 1 + their parameter.
    """

    family: str = "llama"
    vocab_size: int = setting(512, COUNT)
    hidden_size: int = setting(256, COUNT)
    num_layers: int = setting(6, integer_up_to(MOST_LAYERS))
    num_heads: int = setting(4, COUNT)
    num_kv_heads: int = setting(2, COUNT)
    head_dim: int = setting(64, COUNT)
    mlp_size: int = setting(768, COUNT)  # of one expert in a mixture
    rope_theta: float = setting(10_000.0, POSITIVE)
    rope_scaling: RopeScaling | None = None
    norm_eps: float = setting(1e-5, POSITIVE)
    tie_embeddings: bool = True
    max_position: int = setting(8192, COUNT)  # longest sequence, in tokens
    attention_bias: bool = False  # of query, key and value: Qwen2
    qk_norm: bool = False  # RMS norm of each head's query and key before rotation: Qwen3
    lora: LoraConfig | None = None  # adapters; None: all parameters are trained
    # MLPs of a layer that its router chooses from; 0: one, for all tokens
    num_experts: int = setting(0, SIZE)
    experts_per_token: int = setting(0, SIZE)  # experts that process a token
    norm_topk: bool = True  # scale the chosen experts' probabilities to sum to 1
    activation: str = setting("silu", one_of(ACTIVATIONS))  # of the MLP's gate
    post_norms: bool = False  # norms of the outputs of attention and MLP, before the sum: Gemma
    norm_offset: bool = False  # norms multiply by 1 + their parameter
    embed_scale: bool = False  # multiply embeddings by sqrt(hidden_size)
    query_scalar: int = setting(0, SIZE)  # scores q k are divided by its square root; 0: head_dim
    # divides positions, except in layers with a window
    rope_factor: float = setting(1.0, at_least(1))
    # tokens that a layer with a window attends to; 0: no such layer
    sliding_window: int = setting(0, SIZE)
    # layers n, 2 n, ... (counted from 1) have no window; 0: all have one
    full_every: int = setting(0, SIZE, needs={"sliding_window": ()})
    rope_local_theta: float = setting(10_000.0, POSITIVE)  # in layers with a window
    # pairs that turn by time, row and column: Qwen-VL
    rope_sections: tuple[int, ...] = dataclasses.field(default=(), repr=False)
    # sections take turns, pair by pair: Qwen3-VL
    rope_interleaved: bool = dataclasses.field(default=False, repr=False)
    # the tower for images; None: text only. Not in the repr, of which fingerprints are made
    vision: VisionConfig | None = dataclasses.field(default=None, repr=False)
    # implementation of the experts' products, of implementation_table.py; no part of the model
    grouped_product: str = dataclasses.field(default="auto", repr=False)

    def __post_init__(self):
        super().__post_init__()
        if self.experts_per_token > self.num_experts or (
            self.num_experts and not self.experts_per_token
        ):
            most = f"1 to {self.num_experts}" if self.num_experts else "0 without num_experts"
            raise ValueError(
                f"model experts_per_token={self.experts_per_token} of num_experts="
                f"{self.num_experts} is not possible: use {most}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model num_heads {self.num_heads} is not divisible by num_kv_heads "
                f"{self.num_kv_heads}"
            )
        if self.num_experts and self.activation != "silu":
            raise ValueError(
                f"experts with model activation={self.activation!r} are not supported, only 'silu'"
            )
        if self.query_scalar and not self.qk_norm:
            raise ValueError(
                f"model query_scalar={self.query_scalar} needs qk_norm=True: the norm of queries "
                "applies it"
            )
        if self.head_dim % 2:
            raise ValueError(f"model head_dim must be even for rotary positions: {self.head_dim}")
        self._check_vision()
        of_experts = [n for n in self.lora.targets if n in _OF_EXPERTS] if self.lora else []
        if self.num_experts and of_experts:
            rest = [name for name in self.lora.targets if name not in _OF_EXPERTS]
            raise ValueError(
                f"lora.targets: experts have no adapters ({', '.join(of_experts)}); use "
                f"{','.join(rest or ('query', 'value'))}"
            )
        widest = min(self.hidden_size, self.mlp_size)
        if self.lora is not None and not 0 < self.lora.rank <= widest:
            raise ValueError(
                f"lora.rank={self.lora.rank} must be from 1 to {widest}, the smaller of the "
                "model's hidden_size and mlp_size"
            )

    def _check_vision(self) -> None:
        if self.vision is not None and self.vision.width != self.hidden_size:
            raise ValueError(
                f"features of the vision tower have width {self.vision.width}, the text model's "
                f"hidden_size is {self.hidden_size}: use a tower of width={self.hidden_size}"
            )
        if self.rope_sections and (
            len(self.rope_sections) != 3 or sum(self.rope_sections) != self.head_dim // 2
        ):
            raise ValueError(
                f"model rope_sections must be three numbers with the sum {self.head_dim // 2}, "
                f"half of head_dim, got {self.rope_sections}"
            )

    @property
    def image_both_ways(self) -> bool:
        """Whether tokens of one image attend to each other, also to later ones: Gemma 3."""
        return self.vision is not None and self.vision.family == "gemma3"

    @property
    def windowed(self) -> tuple[bool, ...]:
        """True for each layer with a sliding window, in the order of the layers."""
        every = self.full_every
        return tuple(
            bool(self.sliding_window) and not (every and number % every == 0)
            for number in range(1, self.num_layers + 1)
        )


@dataclasses.dataclass(frozen=True)
class ScalarModel:
    """A decoder with one linear output per token instead of logits: a critic or a reward model.

    Parameters: {"trunk": those of the decoder, "head": [hidden_size]}. The trunk has no output
    projection, so its embeddings count as tied; `scalar_model` makes a ScalarModel of any decoder.
    """

    trunk: DecoderConfig
    head_stddev: float = 0.0  # of the head's initial values

    def __post_init__(self):
        assert self.trunk.tie_embeddings, "a trunk has no head of its own: use scalar_model"


def scalar_model(decoder: DecoderConfig, *, head_stddev: float = 0.0) -> ScalarModel:
    """The decoder's trunk with a scalar head.

    A critic's head starts at 0, so that its first values are not noise; a reward model's starts
    with `reward_head_stddev`. Huang et al. 2024 (arxiv.org/abs/2403.17031), sec. 3.
    """
    return ScalarModel(dataclasses.replace(decoder, tie_embeddings=True), head_stddev)


def decoder_of(network: DecoderConfig | ScalarModel) -> DecoderConfig:
    """The network without a scalar head."""
    return network.trunk if isinstance(network, ScalarModel) else network


def adapted(network: DecoderConfig | ScalarModel, lora: LoraConfig) -> DecoderConfig | ScalarModel:
    """The network with adapters; unchanged if lora.rank is 0."""
    if not lora.rank:
        return network
    if isinstance(network, ScalarModel):
        return dataclasses.replace(network, trunk=adapted(network.trunk, lora))
    return dataclasses.replace(network, lora=lora)


def without_adapters(network: DecoderConfig | ScalarModel) -> DecoderConfig | ScalarModel:
    """The network after its adapters have been merged into their projections."""
    if isinstance(network, ScalarModel):
        return dataclasses.replace(network, trunk=without_adapters(network.trunk))
    return dataclasses.replace(network, lora=None)


def reward_head_stddev(decoder: DecoderConfig) -> float:
    """Standard deviation 1 / sqrt(hidden_size + 1), for initial scores of magnitude about 1."""
    return (decoder.hidden_size + 1) ** -0.5
