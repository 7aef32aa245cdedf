"""Names that other writers give to the same tensors: all are read, and none is dropped."""

import itertools
import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from support.rewritten import change_config, put, wider, written

from distflow_jax.models.families.name_map import own_names
from distflow_jax.models.weights.source import open_model

# what transformers' releases write in place of the start of our names, in any combination
TEXT = ["language_model.model.", "model.language_model.", "language_model."]
TOWER = [
    "vision_tower.vision_model.",
    "vision_tower.",
    "model.vision_tower.vision_model.",
    "model.vision_tower.",
]
PROJECTOR = ["multi_modal_projector.", "model.multi_modal_projector."]
HEAD = ["lm_head.", "language_model.lm_head."]
GEMMA = list(itertools.product(TEXT, TOWER, PROJECTOR, HEAD))
QWEN = list(
    itertools.product(
        ["model.", "model.language_model.", "language_model."], ["visual.", "model.visual."]
    )
)


def with_starts(tensors, starts):
    renamed = {}
    for name, tensor in tensors.items():
        old = next((start for start in starts if name.startswith(start)), "")
        renamed[starts.get(old, "") + name.removeprefix(old)] = tensor
    assert len(renamed) == len(tensors)
    return renamed


def assert_read(folder, params, config):
    source = open_model(str(folder))
    assert source.config == config
    read = dict(source.params())
    assert read.keys() == params.keys()
    for path, array in params.items():
        np.testing.assert_array_equal(read[path], array, err_msg=path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("starts", GEMMA, ids=" ".join)
def test_gemma_with_its_tower(tied, starts, tmp_path):
    config, params = wider("gemma3 seeing", tie_embeddings=tied)
    own = [TEXT[0], TOWER[0], PROJECTOR[0], HEAD[0]]
    tensors = with_starts(written(tmp_path, config, params), dict(zip(own, starts, strict=True)))
    put(tmp_path, tensors, shards=1 if tied else 2)
    assert_read(tmp_path, params, config)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("start", [*TEXT, "model."])
def test_the_text_model_of_gemma_in_the_other_form(tied, start, tmp_path):
    config, params = wider("gemma3 tied", tie_embeddings=tied)
    starts = {"model.": start}
    if start == TEXT[0]:
        starts["lm_head."] = HEAD[1]
    tensors = with_starts(written(tmp_path, config, params), starts)
    put(tmp_path, tensors)
    if start != "model.":
        settings = json.loads((tmp_path / "config.json").read_text())
        outer = {"model_type": "gemma3", "text_config": settings}
        (tmp_path / "config.json").write_text(json.dumps(outer))
    assert_read(tmp_path, params, config)


@pytest.mark.parametrize("starts", QWEN, ids=" ".join)
def test_qwen2_5_vl(starts, tmp_path):
    config, params = wider("qwen2_5_vl seeing", tie_embeddings=False)
    tensors = written(tmp_path, config, params)
    put(tmp_path, with_starts(tensors, dict(zip(["model.", "visual."], starts, strict=True))))
    assert_read(tmp_path, params, config)


@pytest.mark.parametrize(
    "case", ["smolvlm seeing", "qwen3_vl seeing", "llama tied", "mistral yarn"]
)
def test_a_model_that_was_saved_without_its_head(case, tmp_path):
    """transformers' AutoModel leaves out the first word; a tied model lacks nothing."""
    config, params = wider(case, tie_embeddings=True)
    put(tmp_path, with_starts(written(tmp_path, config, params), {"model.": ""}))
    assert_read(tmp_path, params, config)
    config, params = wider(case, tie_embeddings=False)
    tensors = with_starts(written(tmp_path / "untied", config, params), {"model.": ""})
    del tensors["lm_head.weight"]
    put(tmp_path / "untied", tensors)
    with pytest.raises(ValueError, match="head .* needs lm_head.weight"):
        open_model(str(tmp_path / "untied"))


def joined(tensors, config, block, gate, up, down):
    """The experts of a layer in the two tensors that transformers 5 makes of them."""
    found = dict(tensors)
    for layer in range(config.num_layers):
        start = f"model.layers.{layer}."

        def part(expert, name, start=start):
            return found.pop(f"{start}{block}.experts.{expert}.{name}.weight")

        experts = range(config.num_experts)
        both = [np.concatenate([part(e, gate), part(e, up)]) for e in experts]
        found[f"{start}mlp.experts.gate_up_proj"] = np.stack(both)
        found[f"{start}mlp.experts.down_proj"] = np.stack([part(e, down) for e in experts])
        found[f"{start}mlp.gate.weight"] = found.pop(f"{start}{block}.gate.weight")
    return found


MIXTURES = pytest.mark.parametrize(
    ("case", "names"),
    [
        ("qwen3_moe tied", ("mlp", "gate_proj", "up_proj", "down_proj")),
        ("qwen3_moe untied", ("mlp", "gate_proj", "up_proj", "down_proj")),
        ("mixtral untied", ("block_sparse_moe", "w1", "w3", "w2")),
    ],
)


@MIXTURES
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_experts_in_one_tensor(case, names, shards, dtype, tmp_path):
    config, params = wider(case)
    params = {path: array.astype(dtype).astype(np.float32) for path, array in params.items()}
    tensors = joined(written(tmp_path, config, params), config, *names)
    put(tmp_path, {name: x.astype(dtype) for name, x in tensors.items()}, shards)
    assert_read(tmp_path, params, config)


@MIXTURES
def test_experts_of_another_shape_are_refused(case, names, tmp_path):
    config, params = wider(case)
    tensors = joined(written(tmp_path, config, params), config, *names)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    for other in (tensors[name][:-1], tensors[name][..., :-1], tensors[name][0]):
        put(tmp_path, tensors | {name: np.ascontiguousarray(other)})
        with pytest.raises(ValueError, match="do not fit the model") as error:
            open_model(str(tmp_path))
        assert "\n" not in str(error.value)


def test_one_tensor_under_two_names_is_refused(tmp_path):
    config, params = wider("gemma3 seeing")
    tensors = written(tmp_path, config, params)
    second = {"vision_tower.post_layernorm.weight": np.zeros(32, np.float32)}
    put(tmp_path, tensors | second)
    with pytest.raises(ValueError, match="vision_tower.vision_model.post_layernorm.weight twice"):
        open_model(str(tmp_path))
    with pytest.raises(ValueError, match="have b.x twice: as b.x"):
        own_names({"a.x": 1, "b.x": 2}, {r"a\.": "b."}, "here")


def test_a_tower_that_the_config_does_not_name_is_not_dropped(tmp_path):
    config, params = wider("gemma3 seeing")
    written(tmp_path, config, params)
    change_config(tmp_path, vision_config=...)
    with pytest.raises(ValueError, match="tensors without a parameter: vision_tower"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("kept", [True, False])
def test_a_single_file_comes_before_an_index_of_older_shards(tmp_path, kept):
    """As in transformers: a model that was saved again, whole, in the folder of its shards."""
    config, params = wider("mistral untied")
    tensors = written(tmp_path, config, params)
    put(tmp_path, {name: x + 1 for name, x in tensors.items()}, shards=2)
    if not kept:
        for shard in tmp_path.glob("model-*.safetensors"):
            shard.unlink()
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert_read(tmp_path, params, config)


def test_hugging_faces_index_comes_first(tmp_path):
    """Mistral's releases have consolidated.safetensors.index.json with other names beside it."""
    config, params = wider("mistral untied")
    put(tmp_path, written(tmp_path, config, params), shards=2)
    (tmp_path / "consolidated.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"layers.0.attention.wq.weight": "consolidated.safetensors"}})
    )
    assert_read(tmp_path, params, config)
