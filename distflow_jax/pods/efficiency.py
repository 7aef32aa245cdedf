"""Shares of the peak rates that published programs reach, by kind of work and kind of chip.

Derived from published training runs and inference servers: docs/scaling.md lists the rows behind
every number. No RL step was used, so that RL steps can check the table.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.planning.chips import Chip

# kinds of work; those of a mixture of experts are apart
TRAINING, TRAINING_EXPERTS = "training", "training, experts"
PREFILL = "prefill"
DECODE, DECODE_EXPERTS = "decode", "decode, experts"


@dataclasses.dataclass(frozen=True)
class Range:
    """An expected number, with its bounds."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The geometric mean of both ends."""
        return math.sqrt(self.low * self.high)

    def __add__(self, other: "Range") -> "Range":
        return Range(self.low + other.low, self.high + other.high)

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high

    def __str__(self) -> str:
        return f"{self.low:.3g} to {self.high:.3g}"

    def to_tree(self) -> dict[str, Any]:
        """The range as plain JSON values."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class PeakShares:
    """Shares of a chip's peak rates that a kind of work reaches."""

    compute: Range  # of bfloat16 products
    memory: Range  # of HBM's bandwidth


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """The part of a chip's peak rates that programs reach."""

    work: Mapping[str, PeakShares]  # by kind
    links: Range  # share of the links' rates
    step: Range  # seconds of a decode step besides: launches, sampling, the host
    source: str = "published"


def efficiency_of(chip: Chip) -> Efficiency:
    """The published range of a chip."""
    dense, experts = _TRAINING.get(chip.name, _GPU_TRAINING)
    tpu = chip.platform == "tpu"
    prefill, decode = (_TPU_PREFILL, _TPU_PREFILL) if tpu else (_GPU_PREFILL, _GPU_DECODE)
    work = {
        TRAINING: PeakShares(dense, _MEMORY),
        TRAINING_EXPERTS: PeakShares(experts, _MEMORY),
        PREFILL: PeakShares(prefill, _MEMORY),
        DECODE: PeakShares(decode, _MEMORY),
        DECODE_EXPERTS: PeakShares(decode, _EXPERTS_MEMORY),
    }
    links, step = (_TPU_LINKS, _TPU_STEP) if tpu else (_GPU_LINKS, _GPU_STEP)
    return Efficiency(work, links, step)


def training_of(model: DecoderConfig) -> str:
    """The kind of a model's updates and forward passes over rows."""
    return TRAINING_EXPERTS if model.num_experts else TRAINING


def decode_of(model: DecoderConfig) -> str:
    """The kind of a model's products in a decode step."""
    return DECODE_EXPERTS if model.num_experts else DECODE


# training, by chip: of a dense model, of a mixture of experts. FLOPs that are computed again count,
# where the source says how many
_TRAINING = {
    "v4": (Range(0.56, 0.75), Range(0.34, 0.53)),
    "v5e": (Range(0.62, 0.89), Range(0.34, 0.53)),
    "v5p": (Range(0.65, 0.75), Range(0.34, 0.53)),
    "v6e": (Range(0.43, 0.60), Range(0.33, 0.48)),
    "tpu7x": (Range(0.44, 0.70), Range(0.25, 0.36)),
}
_GPU_TRAINING = Range(0.33, 0.50), Range(0.16, 0.25)
_TPU_PREFILL = Range(0.26, 0.41)
_GPU_PREFILL = Range(0.37, 0.50)
_GPU_DECODE = Range(0.40, 0.55)  # products, where they take longer than reading the weights
_MEMORY = Range(0.75, 0.90)
_EXPERTS_MEMORY = Range(0.26, 0.41)  # reading the weights of a mixture of experts
_TPU_LINKS = Range(0.59, 0.90)
_GPU_LINKS = Range(0.52, 0.82)
_TPU_STEP = Range(2.9e-3, 4.3e-3)
_GPU_STEP = Range(2.6e-3, 4.0e-3)
