"""Accelerators by name: memory, peak rates and links, each with its source.

Rates are the vendors' peaks, which no program reaches: estimates from them are bounds.
"""

import dataclasses

_GIB, _GB, _US = 2**30, 1e9, 1e-6


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator, as a program sees it. Rates are per chip and second."""

    name: str
    platform: str  # "tpu" or "gpu"; "cpu" where its rates were measured
    memory: int  # bytes of HBM available to programs
    flops: float  # of products of bfloat16, dense
    memory_bandwidth: float  # bytes of HBM read or written
    # bytes, one way: of a TPU on each link to a neighbour, of a GPU to the others of its node
    link_bandwidth: float
    hop_seconds: float  # latency to a neighbour
    source: str
    # -- TPU: a torus
    dims: int = 0  # of the torus; 0: nodes instead of a torus
    # the ends of a dim of the torus are joined if its size is a multiple of this
    wraps: int = 0
    largest: tuple[int, ...] = ()  # sizes of the largest slice, by dim
    # -- GPU: nodes
    network_bandwidth: float = 0.0  # bytes, one way, between nodes
    network_seconds: float = 0.0  # latency to another node


# XLA reserves some of the HBM. The rest is given in its error for a program that does not fit:
# "Used 16.1G of 15.75G hbm".
# Per hop: about 1 us, "How to scale your model", jax-ml.github.io/scaling-book/sharding. A v5p
# torus is made of cubes of 4x4x4, whose faces are joined by optical switches; on v5e and v6e only a
# dim of 16 wraps around (scaling-book/tpus). A link's rate is the chip's bandwidth in both
# directions, divided by 2 x its ports.
_V5P = Chip(
    name="v5p",
    platform="tpu",
    memory=int(95.74 * _GIB),
    flops=459e12,
    memory_bandwidth=2765 * _GB,
    link_bandwidth=1200 * _GB / (2 * 6),
    hop_seconds=1 * _US,
    source="cloud.google.com/tpu/docs/v5p",
    dims=3,
    wraps=4,
    largest=(16, 16, 24),
)
_V5E = Chip(
    name="v5e",
    platform="tpu",
    memory=int(15.75 * _GIB),
    flops=197e12,
    memory_bandwidth=819 * _GB,
    link_bandwidth=400 * _GB / (2 * 4),
    hop_seconds=1 * _US,
    source="cloud.google.com/tpu/docs/v5e",
    dims=2,
    wraps=16,
    largest=(16, 16),
)
_V6E = Chip(
    name="v6e",
    platform="tpu",
    memory=int(31.25 * _GIB),
    flops=918e12,
    memory_bandwidth=1638 * _GB,
    link_bandwidth=800 * _GB / (2 * 4),
    hop_seconds=1 * _US,
    source="cloud.google.com/tpu/docs/v6e",
    dims=2,
    wraps=16,
    largest=(16, 16),
)
# SXM, in nodes of up to 8 on NVLink 4 (900 GB/s in both directions), with one 400 Gbit/s adapter
# each. JAX takes 3/4 of the memory unless XLA_PYTHON_CLIENT_MEM_FRACTION is set; here 0.95.
# Latencies: NCCL's own model of a ring (src/graph/tuning.cc, hwLat, Simple).
_H100 = Chip(
    name="h100",
    platform="gpu",
    memory=int(0.95 * 80e9),
    flops=989e12,
    memory_bandwidth=3350 * _GB,
    link_bandwidth=450 * _GB,
    hop_seconds=3.4 * _US,
    source="nvidia.com/en-us/data-center/h100",
    network_bandwidth=50 * _GB,
    network_seconds=14 * _US,
)
_H200 = dataclasses.replace(
    _H100,
    name="h200",
    memory=int(0.95 * 141e9),
    memory_bandwidth=4800 * _GB,
    source="nvidia.com/en-us/data-center/h200",
)
CHIPS = {chip.name: chip for chip in (_V5P, _V5E, _V6E, _H100, _H200)}

# By the start of jax's device_kind; the longest match counts.
_KINDS = {
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H200": _H200,
}
# Dense FLOP/s of bfloat16, by the same keys. Sources: cloud.google.com/tpu/docs/vVERSION for TPUs;
# NVIDIA's data sheets for GPUs, half of the sparse rates there.
_PEAKS = {kind: chip.flops for kind, chip in _KINDS.items()} | {
    "TPU v4": 275e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA GH200": _H100.flops,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Peak FLOP/s of a device by jax's device_kind; None if unknown, for example for a CPU."""
    name = _longest(device_kind)
    return None if name is None else _PEAKS[name]


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a device by jax's device_kind; None if it is not one of CHIPS."""
    return _KINDS.get(_longest(device_kind) or "")


def _longest(device_kind: str) -> str | None:
    # as in "NVIDIA A100-SXM4-80GB", "NVIDIA GH200 480GB"
    words = device_kind.replace("-", " ") + " "
    fitting = [name for name in _PEAKS if words.startswith(f"{name} ") and " MIG " not in words]
    return max(fitting, key=len, default=None)
