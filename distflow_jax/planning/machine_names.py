"""Machines by name: TPU slices as Google Cloud calls them (v5litepod-8, v5p-8), and h100-8."""

import dataclasses
import math
import re

from distflow_jax.planning.chips import CHIPS, Chip

# sizes of the slices of v5e and v6e, and of the others below a cube of 4x4x4; larger ones are
# products of multiples of 4 (cloud.google.com/tpu/docs/v5e, /v5p, /v6e, /tpu7x)
FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
SMALL = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_CUBE = 64  # chips
CHIPS_PER_HOST = 4  # of TPU slices of several hosts
GPUS_PER_NODE = 8  # of machines with more
_CHIP_NAMES = {"v5litepod": "v5e", "gpu": "h100"}  # other names of chips


@dataclasses.dataclass(frozen=True)
class NamedMachine:
    """Chips of one kind: a TPU slice with the sizes of its torus, or (nodes, GPUs of each)."""

    chip: Chip
    sizes: tuple[int, ...]

    @property
    def topology(self) -> str:
        """The machine as plan.py's --topology: "v5p:2x2x1"."""
        return f"{self.chip.name}:{'x'.join(map(str, self.sizes))}"

    @property
    def devices(self) -> int:
        """Devices of JAX."""
        return math.prod(self.sizes) * self.chip.devices

    @property
    def hosts(self) -> int:
        """Hosts, each of which runs one process."""
        if not self.chip.dims:
            return self.sizes[0]
        return 1 if fits_a_host(self.chip, self.sizes) else math.prod(self.sizes) // CHIPS_PER_HOST


def fits_a_host(chip: Chip, sizes: tuple[int, ...]) -> bool:
    """Whether a slice of these sizes, int [dims], has a single host."""
    return all(n <= most for n, most in zip(sizes, chip.host, strict=True))


def chip_named(name: str) -> Chip | None:
    """The chip of a name such as v5litepod, v5e, h100 or gpu; None if there is none."""
    return CHIPS.get(_CHIP_NAMES.get(name, name))


def named_machine(name: str) -> NamedMachine:
    """The machine of a name: CHIP-NUMBER.

    The number counts chips of v5e (v5litepod) and v6e, two cores of each chip of v4, v5p and tpu7x,
    and GPUs. Raises ValueError, with names that exist, for a machine that does not.
    """
    found = re.fullmatch(r"(\w+)-([1-9]\d*)", name, re.ASCII)
    chip = chip_named(found[1]) if found else None
    if found is None or chip is None:
        raise ValueError(
            f"{name!r} must be CHIP-NUMBER such as v5litepod-8, v5p-8 or h100-8, with one of "
            f"{', '.join(CHIPS)}"
        )
    number = int(found[2])
    if not chip.dims:
        return NamedMachine(chip, _nodes(name, number))
    chips, rest = divmod(number, chip.counted)
    sizes = None if rest else _slice_sizes(chip, chips)
    if sizes is None:
        counts = f" (the number counts cores, {chip.counted} per chip)" * (chip.counted > 1)
        raise ValueError(f"there is no slice {name}{counts}; use {_names(chip, chips)}")
    return NamedMachine(chip, sizes)


def _nodes(name: str, gpus: int) -> tuple[int, int]:
    if gpus <= GPUS_PER_NODE:
        return 1, gpus
    if gpus % GPUS_PER_NODE:
        near = name.replace(str(gpus), str(-(-gpus // GPUS_PER_NODE) * GPUS_PER_NODE))
        raise ValueError(f"{name}: use a multiple of {GPUS_PER_NODE} GPUs, such as {near}")
    return gpus // GPUS_PER_NODE, GPUS_PER_NODE


def _slice_sizes(chip: Chip, chips: int) -> tuple[int, ...] | None:
    """The sizes of the slice with that many chips, as near to a cube as there is; None for none."""
    fixed = FLAT if chip.dims == 2 else SMALL
    for sizes in fixed:
        if math.prod(sizes) == chips:
            return sizes
    if chip.dims == 2 or chips % _CUBE:
        return None
    cubes = chips // _CUBE
    a_b_c = [
        (a, b, cubes // (a * b))
        for a in range(1, cubes + 1)
        if cubes % a == 0
        for b in range(a, cubes // a + 1)
        if cubes % (a * b) == 0 and cubes // (a * b) >= b
    ]
    sizes = tuple(4 * n for n in min(a_b_c, key=sum))
    return sizes if all(n <= m for n, m in zip(sizes, chip.largest, strict=True)) else None


def _names(chip: Chip, chips: int) -> str:
    """The names of the slices nearest in size."""
    largest = math.prod(chip.largest)
    exist = [n for n in range(1, largest + 1) if _slice_sizes(chip, n)]
    near = sorted(sorted(exist, key=lambda n: abs(n - chips))[:4])
    return " or ".join(f"{chip.name}-{n * chip.counted}" for n in near)
