"""The keys say what the dataclasses say, their choices are what the rooms offer, and each value
outside its range or choices is refused in one line that names key and value."""

import dataclasses
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from distflow_jax.algorithms.advantages import ESTIMATORS
from distflow_jax.algorithms.correction import WEIGHTS
from distflow_jax.algorithms.kl import KL_ESTIMATORS
from distflow_jax.algorithms.policy_losses import LOSSES, SELECTIONS
from distflow_jax.algorithms.preference import PREFERENCE_LOSSES
from distflow_jax.config import key_reference
from distflow_jax.config.algorithm_tables import CORRECTIONS, POLICY_LOSSES, REJECTIONS
from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.data_config import COLUMNS
from distflow_jax.config.run_config import Config
from distflow_jax.config.upkeep_config import TRACKERS
from distflow_jax.data.column_choice import FAMILIES
from distflow_jax.models.remat import REMATS
from distflow_jax.report.trackers.tracker import BUILT_IN
from distflow_jax.rewards.registry import REWARDS
from distflow_jax.rollout.scheduling.sampling_order import ORDERS

TABLES = {
    "algorithm.advantage": ESTIMATORS,
    "algorithm.policy_loss": LOSSES,
    "algorithm.kl_estimator": KL_ESTIMATORS,
    "preference.loss": PREFERENCE_LOSSES,
    "training.remat": REMATS,
    "stream.order": ORDERS,
}
CHOSEN = [key for key in key_reference.keys().values() if key.kind]
OUTSIDE = (-2, -1, 0, 1, 2, "no such choice")
NEEDY = [key for key in key_reference.keys().values() if key.needs]
OTHERS = (0.25, 2.5, 3, True, False, {"a": 1}, ("x",), "x")


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


def test_choices_are_the_entries_of_the_tables():
    keys = key_reference.keys()
    for name, table in TABLES.items():
        assert set(keys[name].kind.choices) == set(table), name
    assert {*CORRECTIONS, *REJECTIONS} == set(WEIGHTS)
    assert {name for name, kind in POLICY_LOSSES.items() if kind.select_options} == set(SELECTIONS)
    assert TRACKERS == tuple(BUILT_IN)
    assert set().union(*FAMILIES) <= set(COLUMNS)
    # a function of the user's may be named too
    assert set(REWARDS) <= set(keys["reward.function"].meaning.replace(",", " ").split())


@pytest.mark.parametrize("key", CHOSEN, ids=lambda key: key.name)
def test_a_value_outside_is_refused_in_one_line(key):
    """Ranges and choices: those of the fields that stand in each section's dataclass."""
    assert key.default is None or key.kind.fits(key.default)
    text = key.type.startswith("str")
    outside = [x for x in OUTSIDE if not key.kind.fits(x) and isinstance(x, str) == text]
    assert outside
    for value in outside:
        value = float(value) if "float" in key.type else value
        name = key.name.split(".")[-1]
        assert f"{name} must be {key.kind.words}, got {value!r}" in refusal({key.name: value})


@pytest.mark.parametrize("key", NEEDY, ids=lambda key: key.name)
def test_a_value_without_effect_is_refused_in_one_line(key):
    """Each need that the defaults of other keys do not meet, after those before it are met."""
    others = key.kind.choices if key.kind and key.kind.choices else OTHERS
    value = next(x for x in others if x != key.default and fits(key, x))
    keys, given = key_reference.keys(), {}
    for other, values in key.needs.items():
        chosen = keys[other].default
        if chosen not in values if values else not chosen:
            name, switch = (".".join(path.split(".")[-2:]) for path in (key.name, other))
            words = f"{name}={value!r} has no effect with {switch}={chosen!r}; "
            assert words in refusal(given | {key.name: value})
        given[other] = values[0] if values else next(x for x in OTHERS if fits(keys[other], x))


def fits(key: key_reference.Key, value: Any) -> bool:
    """Whether a key may have a value."""
    kinds = {"int": int, "float": float, "bool": bool, "str": str, "dict": dict, "tuple": tuple}
    kind = kinds[key.type.split()[0]]
    return type(value) is kind and (key.kind is None or key.kind.fits(value))


def refusal(values: dict[str, Any]) -> str:
    """The one line with which a config refuses values of keys, with the section that does."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    with pytest.raises(ValueError) as caught:
        from_config_dict(Config, tree)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(".".join(["config", *path]))
    return message


def test_type_and_meaning_of_some_keys():
    keys = key_reference.keys()
    assert keys["training.remat"].values == "none, dots, attention or full"
    assert keys["mesh.fsdp"].values == "int, at least 0"
    assert keys["algorithm.lam"].full_meaning.endswith("; only with algorithm.advantage=gae")
    assert keys["algorithm.clip"].type == "float or None"
    assert keys["lora.targets"].type == "tuple of str"
    assert keys["reward.kwargs"].type == "dict"
    assert keys["critic.optimizer.lr"].default == 1e-5  # of the critic, not of OptimizerConfig
    assert keys["checkpoint.every"].meaning.startswith("steps between checkpoints")
    # two lines above the field
    assert keys["coordinator.balance_threshold"].meaning.endswith("for rows to be moved")


def test_no_package_is_imported():
    code = (
        "import sys; from distflow_jax.config.key_reference import keys; assert keys();"
        "assert not {'jax', 'numpy', 'ml_collections'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
