"""The shipped configs of machines, and the smallest machine of each."""

from distflow_jax.planning.chips import CHIPS
from support.paths import ROOT

PRESETS = [path.stem for path in sorted((ROOT / "configs").glob("qwen*.py"))]


def least_machine(kind, division):
    """The name of the smallest machine of that kind of chip for a division."""
    chip = CHIPS[kind]
    return f"{kind}-{division.devices // chip.devices * chip.counted}"
