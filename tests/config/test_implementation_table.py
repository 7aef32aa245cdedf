"""The table of attention implementations: refusals, what auto takes, what settings accept."""

import importlib.util
import re

import pytest

from distflow_jax.config.implementation_table import (
    DECODE,
    FEATURES,
    IMPLEMENTATIONS,
    PREFILL,
    ROWS,
    Need,
    candidates,
    lacks,
    named,
    names,
)
from distflow_jax.config.rollout_config import RolloutConfig
from distflow_jax.config.training_config import TrainingConfig


@pytest.fixture
def all_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def need(where, one, *features, **changes):
    """What `one` can do, and these features."""
    dims = tuple(one.head_dims) or (64,)
    found = Need(where, one.platforms[0], dims[-1], one.dtypes[0], frozenset(features))
    return found._replace(**changes)


OF_ALL = [(one, where) for one in IMPLEMENTATIONS for where in one.serves]


@pytest.mark.parametrize(("one", "where"), OF_ALL, ids=lambda x: getattr(x, "name", x))
def test_nothing_is_chosen_for_what_it_cannot(one, where, all_installed):
    assert not lacks(one, need(where, one, *one.can))
    for feature in set(FEATURES) - one.can:
        asked = need(where, one, feature)
        assert one not in candidates(asked)
        assert lacks(one, asked) == f"it does not support {feature} ({FEATURES[feature]})"
    if one.head_dims:
        assert "supports head dims" in lacks(one, need(where, one, head_dim=7))
    assert "computes in" in lacks(one, need(where, one, dtype="float16"))
    for platform in {"cpu", "gpu", "tpu"} - set(one.platforms):
        asked = need(where, one, platform=platform)
        assert "it runs on" in lacks(one, asked) and one not in candidates(asked)


def test_names_of_a_place_and_platform_are_unique():
    found = [(one.name, where, p) for one, where in OF_ALL for p in one.platforms]
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("where", "platform", "dtype", "expected"),
    [
        (ROWS, "cpu", "float32", ["blocks", "masked"]),
        (ROWS, "tpu", "bfloat16", ["kernel", "tokamax", "masked"]),
        (ROWS, "gpu", "bfloat16", ["cudnn", "tokamax", "blocks", "masked"]),
        (ROWS, "cuda", "float32", ["blocks", "masked"]),
        (ROWS, "metal", "float32", ["blocks", "masked"]),
        (DECODE, "cpu", "float32", ["pages"]),
        (DECODE, "tpu", "bfloat16", ["tpu", "reference"]),
        (DECODE, "gpu", "bfloat16", ["reference"]),
        (PREFILL, "gpu", "bfloat16", ["cudnn", "masked"]),
    ],
)
def test_what_auto_may_take_for_shared_prompts(where, platform, dtype, expected, all_installed):
    asked = Need(where, platform, 128, dtype, frozenset({"shared prompts"}))
    assert [one.name for one in candidates(asked)] == expected


def test_deprecated_triton_kernels_are_taken_by_name_alone():
    for one in IMPLEMENTATIONS:
        assert ("Triton" in one.by) == (not one.auto)


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        (
            "splash",
            Need(ROWS, "tpu", 128, "bfloat16", frozenset({"shared prompts"})),
            "training.attention='splash': it does not support shared prompts "
            "(training.share_prompts=True); use 'auto', 'kernel', 'blocks' or 'masked'",
        ),
        (
            "transformer_engine",
            Need(ROWS, "gpu", 128, "bfloat16"),
            "training.attention='transformer_engine': it needs transformer_engine, which is not "
            "installed: pip install --no-build-isolation transformer_engine[jax]; use 'auto', "
            "'blocks', 'masked' or 'kernel'",
        ),
        (
            "tokamax",
            Need(ROWS, "tpu", 128, "bfloat16"),
            "training.attention='tokamax': it needs tokamax, which is not installed: pip install "
            "tokamax; use 'auto', 'kernel', 'splash', 'blocks' or 'masked'",
        ),
        (
            "cudnn",
            Need(ROWS, "gpu", 128, "float32"),
            "training.attention='cudnn': it computes in bfloat16, and the compute dtype is "
            "float32; use 'auto', 'blocks' or 'masked'",
        ),
    ],
)
def test_a_name_that_cannot_is_refused_with_what_lacks(name, asked, message, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        named("training.attention", name, asked)


def test_settings_take_the_names_of_the_table():
    for name in names(ROWS):
        TrainingConfig(attention=name)
    for name in names(DECODE, PREFILL):
        RolloutConfig(attention=name)
    with pytest.raises(ValueError, match="training.attention must be one of auto, kernel, cudnn"):
        TrainingConfig(attention="pages")
    with pytest.raises(ValueError, match="rollout.attention must be one of auto"):
        RolloutConfig(attention="splash")
