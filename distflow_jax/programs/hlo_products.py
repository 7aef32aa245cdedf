"""FLOPs of a matrix product in HLO, in the forms to which the platforms lower it.

CPU: dot, and custom calls to oneDNN. GPU: custom calls to cuBLAS. TPU: convolution, and kernels
with a cost estimate.
"""

import math
import re

import numpy as np

from distflow_jax.programs.hlo_text import Computation, Instruction, leaves

_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
_READ = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"(\d+)"')
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")


def product_flops(inside: Computation, one: Instruction) -> float:
    """FLOPs of a product, 2 per multiply-add; 0 for other instructions, or if sizes are unknown."""
    if one.opcode == "custom-call" and (found := _ESTIMATE.search(one.attributes)):
        return float(found[1])
    sides = [leaves(side.shape) for side in inside.operands(one)[:2]]
    result = leaves(one.shape)
    if len(sides) != 2 or any(len(side) != 1 for side in sides) or not result:
        return 0.0
    ((_, lhs),), ((_, rhs),), (_, out) = *sides, result[0]
    if one.opcode == "convolution":
        return _convolution_flops(one.attributes, lhs, rhs, out)
    if one.opcode == "dot":
        contracted = one.dims("lhs_contracting_dims")
    elif one.opcode == "custom-call" and (found := _CONTRACTED.search(one.attributes)):
        contracted = tuple(int(d) for d in re.findall(r"\d+", found[1]))
    elif one.opcode == "custom-call" and "__onednn$matmul" in one.attributes and lhs:
        contracted = (len(lhs) - 1,)
    else:
        return 0.0
    if any(d >= len(lhs) for d in contracted):
        return 0.0
    return 2.0 * math.prod(out) * math.prod(lhs[d] for d in contracted)


def kernel_bytes(one: Instruction) -> float | None:
    """Bytes that a kernel reads by its own estimate; None where it has none.

    Its operands may be whole caches, of which it reads some pages.
    """
    found = _READ.search(one.attributes)
    return float(found[1]) if found else None


def _convolution_flops(
    attributes: str, lhs: tuple[int, ...], rhs: tuple[int, ...], out: tuple[int, ...]
) -> float:
    """FLOPs of a convolution, counting only window positions that meet an input element.

    A batched product is a convolution whose padding or dilation leaves one such position each.
    """
    labels = _LABELS.search(attributes)
    if not labels or [len(found) for found in labels.groups()] != [len(lhs), len(rhs), len(out)]:
        return 0.0
    shapes = zip(labels.groups(), (lhs, rhs, out), strict=True)
    size_of = [dict(zip(found, dims, strict=True)) for found, dims in shapes]
    if not ({"b", "f"} <= size_of[0].keys() and "o" in size_of[1]):
        return 0.0
    flops = 2.0 * size_of[0]["b"] * size_of[0]["f"] * size_of[1]["o"]
    for name in ("feature_group_count", "batch_group_count"):
        found = re.search(rf"\b{name}=(\d+)", attributes)
        flops /= max(int(found[1]), 1) if found else 1
    for place, label in enumerate(sorted(filter(str.isdigit, size_of[0]))):
        sizes = [found.get(label) for found in size_of]
        if None in sizes:
            return 0.0
        flops *= _places_met(attributes, place, *sizes)
    return flops


def _places_met(attributes: str, place: int, size: int, window: int, outputs: int) -> int:
    """Pairs of an output and a window position on an input element, in one spatial dim."""

    def of(key: str, default: int) -> int:
        found = re.search(rf"\bwindow=\{{[^}}]*\b{key}=([-\dx_]+)", attributes)
        each = found[1].split("x") if found else []
        return int(each[place].split("_")[0]) if place < len(each) else default

    step, dilation, spread = of("stride", 1), max(of("lhs_dilate", 1), 1), of("rhs_dilate", 1)
    first = np.arange(outputs) * step - of("pad", 0)
    total = 0
    for offset in range(window):
        at = first + offset * spread
        total += np.count_nonzero((at >= 0) & (at <= (size - 1) * dilation) & (at % dilation == 0))
    return total
