"""The head of a model is what its files have, whatever `tie_word_embeddings` says."""

import json

import ml_dtypes
import numpy as np
import pytest
from support.model_files import tensors_of, write_gguf
from support.rewritten import change_config, params_of, put, wider, written

from distflow_jax.models.families.tensors import EMBEDDING
from distflow_jax.models.weights.hf_folder import Export, write_hf_folder
from distflow_jax.models.weights.source import FAMILIES, open_model

# one case of each family whose embeddings are tied or can be
TIED = {
    "llama tied": {},
    "mistral windows": {"tie_embeddings": True},
    "qwen2 tied": {},
    "qwen3 tied": {},
    "gemma3 tied": {},
    "qwen3_moe tied": {},
    "mixtral untied": {"tie_embeddings": True},
    "smolvlm seeing": {},
    "qwen2_5_vl seeing": {},
    "qwen3_vl seeing": {"tie_embeddings": True},
    "gemma3 seeing": {},
}
EACH = pytest.mark.parametrize("case", TIED)
BF16 = ml_dtypes.bfloat16


def embedding_name(config):
    table = FAMILIES[config.family].hf_weights(config)
    return next(weight.source for weight in table if weight.path == EMBEDDING)


def tied_folder(case, folder):
    config, params = wider(case, **TIED[case])
    tensors = written(folder, config, params)
    assert "lm_head.weight" not in tensors
    return config, params, tensors, embedding_name(config)


@EACH
@pytest.mark.parametrize("shards", [1, 3])
def test_another_head_beside_a_tied_flag_is_read(case, shards, tmp_path):
    config, params, tensors, name = tied_folder(case, tmp_path)
    head = np.roll(tensors[name], 1, axis=0)
    put(tmp_path, tensors | {"lm_head.weight": head}, shards)
    source = open_model(str(tmp_path))
    assert not source.config.tie_embeddings
    read = dict(source.params())
    np.testing.assert_array_equal(read.pop("head"), head.T)
    assert read.keys() == params.keys()
    # and leaves in the same form
    out = tmp_path / "out"
    write_hf_folder(out, Export(source.config, source.tokenizer, source.params))
    again = open_model(str(out))
    np.testing.assert_array_equal(dict(again.params())["head"], head.T)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


@EACH
def test_one_other_number_is_another_head(case, tmp_path):
    config, params, tensors, name = tied_folder(case, tmp_path)
    head = tensors[name].copy()
    head[-1, -1] = np.nextafter(head[-1, -1], np.float32(9))
    put(tmp_path, tensors | {"lm_head.weight": head})
    assert not open_model(str(tmp_path)).config.tie_embeddings


@EACH
@pytest.mark.parametrize(
    ("embedding", "head"),
    [(np.float32, np.float32), (BF16, BF16), (np.float32, BF16), (BF16, np.float32)],
)
def test_the_same_head_stays_tied(case, embedding, head, tmp_path):
    """In the narrower dtype, in which both are the same."""
    config, params, tensors, name = tied_folder(case, tmp_path)
    whole = tensors[name]
    tensors[name] = whole.astype(embedding)
    copy = (whole if embedding == np.float32 else tensors[name]).astype(head)
    put(tmp_path, tensors | {"lm_head.weight": copy})
    source = open_model(str(tmp_path))
    assert source.config == config and config.tie_embeddings
    read = dict(source.params())
    assert read.keys() == params.keys()
    np.testing.assert_array_equal(read[EMBEDDING], tensors[name].astype(np.float32))


@EACH
def test_the_head_alone_is_the_embedding_of_a_tied_model(case, tmp_path):
    """As writers leave it that keep the first of the names of a shared tensor."""
    config, params, tensors, name = tied_folder(case, tmp_path)
    tensors["lm_head.weight"] = tensors.pop(name)
    put(tmp_path, tensors)
    source = open_model(str(tmp_path))
    assert source.config == config
    np.testing.assert_array_equal(dict(source.params())[EMBEDDING], params[EMBEDDING])


def untied_folder(case, tmp_path):
    """As tied_folder, but config.json says that the model has a head of its own."""
    found = tied_folder(case, tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    inner = settings.get("text_config")
    text = {"text_config": inner | {"tie_word_embeddings": False}} if inner else {}
    change_config(tmp_path, tie_word_embeddings=False, **text)
    return found


@EACH
def test_a_head_of_another_size_is_refused(case, tmp_path):
    config, params, tensors, name = tied_folder(case, tmp_path)
    put(tmp_path, tensors | {"lm_head.weight": tensors[name][:-4]})
    with pytest.raises(ValueError, match=r"lm_head.weight \[296, 32\] does not fit head"):
        open_model(str(tmp_path))


@EACH
def test_an_untied_model_without_a_head_is_refused(case, tmp_path):
    config, params, tensors, name = untied_folder(case, tmp_path)
    with pytest.raises(ValueError, match="head .* needs lm_head.weight .*tie_word_embeddings=true"):
        open_model(str(tmp_path))


@EACH
def test_an_untied_model_keeps_a_head_that_equals_the_embedding(case, tmp_path):
    config, params, tensors, name = untied_folder(case, tmp_path)
    put(tmp_path, tensors | {"lm_head.weight": tensors[name].copy()})
    source = open_model(str(tmp_path))
    assert not source.config.tie_embeddings
    np.testing.assert_array_equal(dict(source.params())["head"], params[EMBEDDING].T)


@pytest.mark.parametrize("case", [name for name in TIED if name.endswith("seeing")])
@pytest.mark.parametrize(
    ("outer", "inner"), [(True, ...), (..., True), (True, False), (False, True)]
)
def test_the_flag_counts_in_both_places(case, outer, inner, tmp_path):
    """transformers wrote it into text_config, beside it, or both, over the years."""
    config, params, tensors, name = tied_folder(case, tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    text["tie_word_embeddings"] = inner
    text = {key: value for key, value in text.items() if value is not ...}
    change_config(tmp_path, tie_word_embeddings=outer, text_config=text)
    assert open_model(str(tmp_path)).config == config


@pytest.mark.parametrize("case", ["llama tied", "qwen2 tied", "qwen3 tied", "qwen3_moe tied"])
def test_a_gguf_has_the_head_that_it_holds(case, tmp_path):
    config, params = wider(case)
    tensors = tensors_of(config, params, "gguf")
    assert open_model(str(write_gguf(tmp_path / "a", config, tensors))).config.tie_embeddings
    head = np.roll(tensors["token_embd.weight"], 1, axis=0)
    source = open_model(str(write_gguf(tmp_path / "b", config, tensors | {"output.weight": head})))
    assert not source.config.tie_embeddings
    np.testing.assert_array_equal(dict(source.params())["head"], head.T)


def test_adapters_beside_a_model_are_not_ignored(tmp_path):
    """transformers would apply them, and load another base model if they name one."""
    config, params = wider("llama tied")
    written(tmp_path, config, params)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ValueError, match="has PEFT's adapters, which would not be applied"):
        open_model(str(tmp_path))


def test_cases_cover_all_families():
    assert {wider(case)[0].family for case in TIED} == FAMILIES.keys()
    assert all(params_of(wider(case, **TIED[case])[0]) for case in TIED)
