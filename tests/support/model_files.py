"""Model files for tests: Hugging Face folders and GGUF files of random weights."""

import json

import gguf
import numpy as np
import safetensors.numpy

from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.models.weights.source import FAMILIES

SIZES = dict(
    vocab_size=300,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=64,
)


def table_of(config, table="hf"):
    """The family's names in files of either format."""
    return getattr(FAMILIES[config.family], f"{table}_weights")(config)


def random_params(config, seed=0):
    rng = np.random.default_rng(seed)
    return {
        weight.path: rng.normal(size=weight.param_shape(config.num_layers)).astype(np.float32)
        for weight in table_of(config)
    }


def tensors_of(config, params, table="hf"):
    return {
        name: np.ascontiguousarray(weight.save(part))
        for weight in table_of(config, table)
        for name, part in zip(
            weight.names(config.num_layers), weight.slices(params[weight.path]), strict=True
        )
    }


def hf_settings(config, **changes):
    settings = {
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.mlp_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_position,
    }
    if config.head_dim * config.num_heads != config.hidden_size:
        settings["head_dim"] = config.head_dim
    if config.num_experts:
        settings |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "norm_topk_prob": config.norm_topk,
            "moe_intermediate_size": config.mlp_size,
        }
    return settings | changes


def write_hf(folder, config, tensors, shards=1, **changes):
    """A Hugging Face folder; with several shards also their index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_settings(config, **changes)))
    Tokenizer.byte_level(config.vocab_size).backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    if shards == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    index = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[shard::shards]}
        safetensors.numpy.save_file(part, folder / name)
        index |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def write_gguf(path, config, tensors, arch="", quant=None, **metadata):
    """A GGUF file by the package's own writer."""
    # llama.cpp's names have no underscore
    writer = gguf.GGUFWriter(str(path), arch or config.family.replace("_", ""))
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.mlp_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if config.head_dim * config.num_heads != config.hidden_size:
        writer.add_key_length(config.head_dim)
    if config.num_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.experts_per_token)
        writer.add_expert_feed_forward_length(config.mlp_size)
    backend = Tokenizer.byte_level(config.vocab_size).backend
    tokens = [backend.id_to_token(index) for index in range(259)]
    tokens += ["ab", *(f"<unused{index}>" for index in range(config.vocab_size - 260))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * 3 + [1] * (config.vocab_size - 259))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(258)
    for key, value in metadata.items():
        writer.add_key_value(key.replace("__", "."), value, *_gguf_type(value))
    for name, tensor in tensors.items():
        if quant is not None and tensor.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(tensor, quant), raw_dtype=quant)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_type(value):
    if isinstance(value, list):
        return gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32
    kinds = {int: "UINT32", float: "FLOAT32", str: "STRING"}
    return (gguf.GGUFValueType[kinds[type(value)]],)


def assert_params(source, params, **tolerance):
    loaded = dict(source.params())
    assert loaded.keys() == params.keys()
    for path, array in params.items():
        assert loaded[path].dtype == np.float32
        np.testing.assert_allclose(loaded[path], array, err_msg=path, **(tolerance or {"rtol": 0}))


def gemma(**own):
    """config.json of google/gemma-3-1b-it, with keys of one's own."""
    keys = {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "initializer_range": 0.02,
        "intermediate_size": 6912,
        "max_position_embeddings": 32_768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10_000,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 262_144,
    }
    return keys | own
