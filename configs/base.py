"""Every key with its default: the starting point of all other configs.

    python scripts/train.py --config=configs/base.py --workdir=runs/base

trains SmolLM2-135M-Instruct on two-digit additions. The dataclass of each section documents its
keys; `python scripts/plan.py --config=configs/base.py` prints the derived sizes.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.config.run_config import Config


def get_config() -> ConfigDict:
    """The defaults of all sections, locked: an unknown key is an error."""
    return to_config_dict(Config())
