"""Exports whose files somebody else wrote again: other tensors, other names, other keys."""

import dataclasses
import json

import safetensors.numpy

from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.models.weights.hf_folder import Export, write_hf_folder
from support import family_models, seeing_models

VOCAB = 300  # of the byte-level tokenizer beside the weights
CASES = family_models.CASES | {f"{name} seeing": c for name, c in seeing_models.CASES.items()}


def params_of(config):
    drawn = seeing_models if config.vision is not None else family_models
    return dict(drawn.drawn_params(config))


def wider(case, **changes):
    """(config, parameters) of a case with a vocabulary that the tokenizer fits."""
    config = dataclasses.replace(CASES[case], vocab_size=VOCAB, **changes)
    return config, params_of(config)


def written(folder, config, params):
    """The folder's tensors; without hashes, so that they can be changed."""
    tokenizer = Tokenizer.byte_level(config.vocab_size)
    write_hf_folder(folder, Export(config, tokenizer, lambda: iter(params.items())))
    (folder / "SHA256SUMS").unlink()
    return safetensors.numpy.load_file(folder / "model.safetensors")


def put(folder, tensors, shards=1):
    """Writes the tensors again, in one file or in shards with an index."""
    (folder / "model.safetensors").unlink()
    if shards == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    index = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
        safetensors.numpy.save_file(part, folder / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def change_config(folder, **changes):
    """Sets keys of config.json; those with the value ... are removed."""
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in settings.items() if v is not ...}))
