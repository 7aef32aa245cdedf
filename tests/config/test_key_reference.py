"""The reference of keys says what the dataclasses say, and every key has a meaning."""

import dataclasses
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from distflow_jax.algorithms.advantages import ADVANTAGES, CPGD_WEIGHTS
from distflow_jax.algorithms.aggregate import AGGREGATIONS
from distflow_jax.algorithms.correction import CORRECTIONS, PROXIMAL, REJECTIONS
from distflow_jax.algorithms.kl import KL_ESTIMATORS
from distflow_jax.algorithms.policy_losses import POLICY_LOSSES
from distflow_jax.algorithms.preference import PREFERENCE_LOSSES
from distflow_jax.config import key_reference
from distflow_jax.config.run_config import Config
from distflow_jax.data.encoded_rows import OVERLONG
from distflow_jax.rewards.registry import REWARDS
from distflow_jax.training.compressed_moments import MOMENTS

TABLES = {
    "algorithm.advantage": ADVANTAGES,
    "algorithm.cpgd_weight": CPGD_WEIGHTS,
    "algorithm.policy_loss": POLICY_LOSSES,
    "algorithm.aggregation": AGGREGATIONS,
    "algorithm.kl_estimator": KL_ESTIMATORS,
    "algorithm.correction": CORRECTIONS,
    "algorithm.rejection": REJECTIONS,
    "algorithm.proximal": PROXIMAL,
    "preference.loss": PREFERENCE_LOSSES,
    "data.overlong": OVERLONG,
    "reward.function": REWARDS,
    "training.optimizer.moments": MOMENTS,
}


def values(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys and values of a config."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from values(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", dict(value) if isinstance(value, Mapping) else value


def test_keys_and_defaults_are_those_of_the_dataclasses():
    assert {name: key.default for name, key in key_reference.keys().items()} == dict(
        values(Config())
    )


def test_every_key_has_a_comment():
    assert not [name for name, key in key_reference.keys().items() if not key.meaning]


def test_every_section_has_a_summary():
    assert not [section.name for section in key_reference.sections() if not section.summary]


@pytest.mark.parametrize("name", TABLES)
def test_the_meaning_of_a_choice_names_every_choice(name):
    key = key_reference.keys()[name]
    words = key.meaning.replace(",", " ").replace(";", " ").replace(":", " ").split()
    assert not set(TABLES[name]) - set(words)


def test_type_and_meaning_of_some_keys():
    keys = key_reference.keys()
    assert keys["training.remat"].type == "none, dots, attention or full"
    assert keys["algorithm.clip"].type == "float or None"
    assert keys["lora.targets"].type == "tuple of str"
    assert keys["reward.kwargs"].type == "dict"
    assert keys["critic.optimizer.lr"].default == 1e-5  # of the critic, not of OptimizerConfig
    assert keys["checkpoint.every"].meaning.startswith("steps between checkpoints")
    # two lines above the field
    assert keys["coordinator.balance_threshold"].meaning.endswith("for rows to move")


def test_no_package_is_imported():
    code = (
        "import sys; from distflow_jax.config.key_reference import keys; assert keys();"
        "assert not {'jax', 'numpy', 'ml_collections'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
