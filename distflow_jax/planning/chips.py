"""Accelerators by name: memory, peak rates and links, each with its source.

Rates are the vendors' peaks, which no program reaches: estimates from them are bounds.
"""

import dataclasses

_GIB, _GB, _US = 2**30, 1e9, 1e-6


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator, as a program sees it: a device of JAX. Rates are per device and second."""

    name: str
    platform: str  # "tpu" or "gpu"; "cpu" where its rates were measured
    memory: int  # bytes of HBM available to programs
    flops: float  # of products of bfloat16, dense
    memory_bandwidth: float  # bytes of HBM read or written
    # bytes, one way: of a TPU's chip on each link to a neighbour, of a GPU to the others of its
    # node
    link_bandwidth: float
    hop_seconds: float  # latency to a neighbour
    source: str
    host_bandwidth: float  # bytes, one way, between a device and its host
    # -- TPU: a torus
    dims: int = 0  # of the torus; 0: nodes instead of a torus
    # the ends of a dim of the torus are joined if its size is a multiple of this
    wraps: int = 0
    largest: tuple[int, ...] = ()  # sizes of the largest slice, by dim
    host: tuple[int, ...] = ()  # sizes of the largest slice of one host; larger ones have 4 chips
    counted: int = 1  # what the number in the name of a slice counts, for each chip
    devices: int = 1  # of each chip
    inner_bandwidth: float = 0.0  # bytes, one way, between the devices of a chip
    # -- GPU: nodes
    network_bandwidth: float = 0.0  # bytes, one way, between nodes; 0: planned for one node only
    network_seconds: float = 0.0  # latency to another node


# XLA reserves some of the HBM. The rest is given in its error for a program that does not fit:
# "Used 16.1G of 15.75G hbm".
# Per hop: about 1 us, "How to scale your model", jax-ml.github.io/scaling-book/sharding. The torus
# of a v4, v5p or tpu7x is made of cubes of 4x4x4, whose faces are joined by optical switches; on
# v5e and v6e only a dim of 16 wraps around (scaling-book/tpus). A link's rate is the chip's
# bandwidth in both directions, divided by 2 x its ports; that of a v4 is from scaling-book/tpus.
# The number in the name of a slice counts two TensorCores of each chip, on v5e and v6e one. To the
# host: PCIe, about 15 GB/s a chip, on v6e 32 (scaling-book/tpus); no
# source for a tpu7x, which is taken to have what a v5p has.
_V4 = Chip(
    name="v4",
    platform="tpu",
    memory=int(30.75 * _GIB),
    flops=275e12,
    memory_bandwidth=1200 * _GB,
    link_bandwidth=45 * _GB,
    hop_seconds=1 * _US,
    source="cloud.google.com/tpu/docs/v4",
    host_bandwidth=15 * _GB,
    dims=3,
    wraps=4,
    largest=(16, 16, 16),
    host=(2, 2, 1),
    counted=2,
)
_V5P = dataclasses.replace(
    _V4,
    name="v5p",
    memory=int(95.74 * _GIB),
    flops=459e12,
    memory_bandwidth=2765 * _GB,
    link_bandwidth=1200 * _GB / (2 * 6),
    source="cloud.google.com/tpu/docs/v5p",
    largest=(16, 16, 24),
)
# A chip of two devices, each with half of its peak, memory and bandwidth. Between them data move
# six times as fast as over a link (docs.cloud.google.com/tpu/docs/tpu7x).
_TPU7X = dataclasses.replace(
    _V4,
    name="tpu7x",
    memory=int(94.75 * _GIB),
    flops=2307e12 / 2,
    memory_bandwidth=7380 * _GB / 2,
    link_bandwidth=1200 * _GB / (2 * 6),
    source="cloud.google.com/tpu/docs/tpu7x",
    host_bandwidth=15 * _GB / 2,
    largest=(16, 24, 24),
    devices=2,
    inner_bandwidth=6 * 1200 * _GB / (2 * 6),
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
    host_bandwidth=15 * _GB,
    dims=2,
    wraps=16,
    largest=(16, 16),
    host=(2, 4),
)
_V6E = dataclasses.replace(
    _V5E,
    name="v6e",
    memory=int(31.25 * _GIB),
    flops=918e12,
    memory_bandwidth=1638 * _GB,
    link_bandwidth=800 * _GB / (2 * 4),
    source="cloud.google.com/tpu/docs/v6e",
    host_bandwidth=32 * _GB,
)
# SXM, in nodes of up to 8 on NVLink 4 (900 GB/s in both directions), with one 400 Gbit/s adapter
# each. JAX takes 3/4 of the memory unless XLA_PYTHON_CLIENT_MEM_FRACTION is set; here 0.95.
# To the host: PCIe 5.0 x16. Latencies: NCCL's own model of a ring (src/graph/tuning.cc, hwLat,
# Simple).
_H100 = Chip(
    name="h100",
    platform="gpu",
    memory=int(0.95 * 80e9),
    flops=989e12,
    memory_bandwidth=3350 * _GB,
    link_bandwidth=450 * _GB,
    hop_seconds=3.4 * _US,
    source="nvidia.com/en-us/data-center/h100",
    host_bandwidth=64 * _GB,
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
# NVLink 5, 1800 GB/s in both directions; of 192 GB a DGX B200 has 180 for each GPU.
_B200 = dataclasses.replace(
    _H100,
    name="b200",
    memory=int(0.95 * 180e9),
    flops=2250e12,
    memory_bandwidth=8000 * _GB,
    link_bandwidth=900 * _GB,
    source="nvidia.com/en-us/data-center/dgx-b200",
)
# SXM on NVLink 3, 600 GB/s in both directions, and PCIe 4.0 x16; a DGX A100 has a 200 Gbit/s
# adapter for each GPU.
_A100 = dataclasses.replace(
    _H100,
    name="a100",
    memory=int(0.95 * 40e9),
    flops=312e12,
    memory_bandwidth=1555 * _GB,
    link_bandwidth=300 * _GB,
    source="nvidia.com/en-us/data-center/a100",
    host_bandwidth=32 * _GB,
    network_bandwidth=25 * _GB,
)
_A100_80 = dataclasses.replace(
    _A100, name="a100_80", memory=int(0.95 * 80e9), memory_bandwidth=2000 * _GB
)
# 24 GB, joined by PCIe 4.0 x16 alone: 32 GB/s one way. Peaks are half of the sparse rates: L4 242
# and A10 250, in their data sheets; A10G 140, baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-
# inference; RTX 4090 330 with sums in float32, NVIDIA Ada GPU architecture, appendix A.
_L4 = dataclasses.replace(
    _H100,
    name="l4",
    memory=int(0.95 * 24e9),
    flops=121e12,
    memory_bandwidth=300 * _GB,
    link_bandwidth=32 * _GB,
    hop_seconds=5.7 * _US,
    source="nvidia.com/en-us/data-center/l4",
    host_bandwidth=32 * _GB,
    network_bandwidth=0.0,
    network_seconds=0.0,
)
_A10 = dataclasses.replace(
    _L4,
    name="a10",
    flops=125e12,
    memory_bandwidth=600 * _GB,
    source="nvidia.com/en-us/data-center/products/a10-gpu",
)
_A10G = dataclasses.replace(
    _A10, name="a10g", flops=70e12, source="aws.amazon.com/ec2/instance-types/g5"
)
_RTX4090 = dataclasses.replace(
    _L4,
    name="rtx4090",
    flops=165e12,
    memory_bandwidth=1008 * _GB,
    source="nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4090",
)
_TPUS = (_V4, _V5E, _V5P, _V6E, _TPU7X)
_GPUS = (_A100, _A100_80, _H100, _H200, _B200, _L4, _A10, _A10G, _RTX4090)
CHIPS = {chip.name: chip for chip in (*_TPUS, *_GPUS)}

# By the start of jax's device_kind; the longest match counts.
_KINDS = {
    "TPU v4": _V4,
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": _TPU7X,
    "NVIDIA A100 SXM4 40GB": _A100,
    "NVIDIA A100 SXM4 80GB": _A100_80,
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H200": _H200,
    "NVIDIA B200": _B200,
    "NVIDIA L4": _L4,
    "NVIDIA A10": _A10,
    "NVIDIA A10G": _A10G,
    "NVIDIA GeForce RTX 4090": _RTX4090,
}
# Dense FLOP/s of bfloat16, by the same keys. Sources: cloud.google.com/tpu/docs/vVERSION for TPUs;
# NVIDIA's data sheets for GPUs, half of the sparse rates there.
_PEAKS = {kind: chip.flops for kind, chip in _KINDS.items()} | {
    "NVIDIA A100": _A100.flops,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA GH200": _H100.flops,
    "NVIDIA H200 NVL": 835e12,
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
