"""A checkpoint says what its adapters are: their scale is that of the run that made them."""

import json

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from distflow_jax.checkpoint.adapters import adapters_info, changed_adapters
from distflow_jax.checkpoint.checkpointer import Checkpointer, Contents
from distflow_jax.checkpoint.export import run_export
from distflow_jax.checkpoint.trained_weights import read_trained
from distflow_jax.config.training_config import LoraConfig
from distflow_jax.config.upkeep_config import CheckpointConfig
from distflow_jax.models import lora
from distflow_jax.models.decoder_config import adapted
from distflow_jax.models.parameters import param_specs
from distflow_jax.models.weights.source import open_model
from distflow_jax.parallel.mesh import MeshSizes, role_mesh

SPEC = "random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=300"
BASE = open_model(SPEC).config
LORA = LoraConfig(rank=2, alpha=6.0, targets=("query", "value"))
PATH = "layers/query"


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    specs = param_specs(adapted(BASE, LORA))
    return {path: rng.normal(size=spec.shape).astype(np.float32) for path, spec in specs.items()}


def save_run(folder, params, info, described):
    """A run's folder with one checkpoint; its config.json says `described` of lora."""
    folder.mkdir()
    config = {"model": {"source": SPEC, "cache_dir": ""}} | described
    (folder / "config.json").write_text(json.dumps(config))
    checkpointer = Checkpointer(folder / "checkpoints", CheckpointConfig())
    state = {"actor": {"params": unflatten_dict(params, sep="/")}}
    checkpointer.save(1, jax.device_put(state), info)
    checkpointer.close()
    return folder


def config_of(alpha):
    return {"lora": {"rank": 2, "alpha": alpha, "targets": ["query", "value"]}}


def assert_scaled(folder, params, scale):
    """An export, and a sampler's weights, are merged with this scale."""
    want = lora.merged_one(params.get, PATH, scale)
    np.testing.assert_array_equal(dict(run_export(folder).export.params())[PATH], want)
    _, read = read_trained(folder, "actor", BASE, role_mesh(MeshSizes(fsdp=8, tensor=1)))
    np.testing.assert_allclose(read["layers"]["query"], want, atol=1e-5)


def test_the_scale_is_the_checkpoints_whatever_config_json_says(params, tmp_path):
    """A later start of the run may have described another one."""
    folder = save_run(tmp_path / "run", params, adapters_info(LORA), config_of(64.0))
    assert_scaled(folder, params, 3.0)
    (folder / "config.json").unlink()
    assert dict(run_export(folder, source=SPEC).export.params())


def test_older_checkpoints_have_the_scale_of_config_json(params, tmp_path):
    folder = save_run(tmp_path / "run", params, {}, config_of(8.0))
    assert_scaled(folder, params, 4.0)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="does not describe the adapters of 'actor'"):
        run_export(folder, source=SPEC)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="adapters of 'actor': .*config.json does not exist"):
        run_export(folder, source=SPEC)


@pytest.mark.parametrize(
    "now, named",
    [
        (LORA, ""),
        (LoraConfig(2, 6.0, ("value", "query")), ""),
        (LoraConfig(2, 7.0, ("query", "value")), "lora.alpha was 6.0 and is 7.0"),
        (LoraConfig(0), "lora.rank was 2 and is 0"),
        (
            LoraConfig(4, 6.0, ("query",)),
            "lora.rank was 2 and is 4; lora.targets was ('query', 'value') and is ('query',)",
        ),
    ],
)
def test_changes_are_named(now, named, tmp_path):
    assert changed_adapters(Contents(1, {}, adapters_info(LORA)), now, tmp_path) == named
    old = Contents(1, {}, {})
    assert changed_adapters(old, now, tmp_path) == ""  # nobody knows
    (tmp_path / "config.json").write_text(json.dumps(config_of(6.0)))
    assert changed_adapters(old, now, tmp_path) == named


def test_a_run_without_adapters_may_change_what_it_does_not_use(tmp_path):
    of_before = {"lora": {"rank": 0, "alpha": 6.0, "targets": ["query"]}}
    none = Contents(1, {}, of_before)
    assert changed_adapters(none, LoraConfig(0), tmp_path) == ""
    assert changed_adapters(none, LORA, tmp_path) == "lora.rank was 0 and is 2"


def test_a_checkpoint_of_other_settings_is_not_restored(params, tmp_path):
    folder = save_run(tmp_path / "run", params, adapters_info(LORA), config_of(64.0))
    checkpointer = Checkpointer(folder / "checkpoints", CheckpointConfig())
    now = LoraConfig(2, 64.0, LORA.targets)
    with pytest.raises(ValueError, match="checkpoint 1 in .*: lora.alpha was 6.0 and is 64.0. Use"):
        checkpointer.restore(None, {}, differing=lambda c: changed_adapters(c, now, folder))
    checkpointer.close()
