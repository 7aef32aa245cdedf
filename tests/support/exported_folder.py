"""Random models as Hugging Face folders: what is written, and what is read of it."""

import numpy as np
import safetensors.numpy

from distflow_jax.models.parameters import param_specs
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.models.weights.hf_folder import Export


def random_params(network, seed=0):
    rng = np.random.default_rng(seed)
    return {
        path: rng.normal(size=spec.shape).astype(np.float32)
        for path, spec in param_specs(network).items()
    }


def export_of(network, params, **changes):
    decoder = getattr(network, "trunk", network)
    tokenizer = Tokenizer.byte_level(decoder.vocab_size)
    return Export(network, tokenizer, lambda: iter(params.items()), **changes)


def assert_bits(loaded, params):
    assert loaded.keys() == params.keys()
    for path, array in params.items():
        assert loaded[path].dtype == array.dtype == np.float32
        assert loaded[path].tobytes() == array.tobytes(), path


def tensors_in(folder):
    """By the safetensors package, which shares no code with the writer."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = safetensors.numpy.load_file(path)
        assert not found.keys() & part.keys()
        found |= part
    return found
