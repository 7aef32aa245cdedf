"""Damaged model files: refused in one line, or read as the file that the damage makes of them.

Neither format has a checksum: a flipped bit of a weight, or of a number in the header that may have
any value, cannot show. What may not happen is another error, or a model of another shape.
"""

import dataclasses
import json
import re

import numpy as np
import pytest
from support.model_files import SIZES, random_params, tensors_of, write_gguf, write_hf

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.weights.gguf_file import open_gguf
from distflow_jax.models.weights.source import open_model

TIED = DecoderConfig(**SIZES, max_position=128)
MASKS = (0x01, 0x20, 0xFF)  # the lowest bit, another letter's, all of them


@pytest.fixture
def gguf_path(tmp_path):
    return write_gguf(tmp_path / "m", TIED, tensors_of(TIED, random_params(TIED), "gguf"))


@pytest.fixture
def safetensors_path(tmp_path):
    folder = write_hf(tmp_path / "hf", TIED, tensors_of(TIED, random_params(TIED)))
    return folder / "model.safetensors"


def opened(path):
    """The model in a file and its parameters, or None where it is refused in one line."""
    try:
        model = open_model(str(path))
        return model, dict(model.params())
    except ValueError as error:
        message = str(error)
        assert message and "\n" not in message
        return None


def flipped(path, positions):
    """Results of `opened` with each of these bytes changed in turn; the file is then restored."""
    whole = path.read_bytes()
    for i, position in enumerate(positions):
        broken = bytearray(whole)
        broken[position] ^= MASKS[i % len(MASKS)]
        path.write_bytes(broken)
        yield opened(path)
    path.write_bytes(whole)


def start_of_data(path):
    """Bytes of a safetensors file before its tensors."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def differing(params, others):
    """Names of parameters that are not the same to the bit; all have the same shapes."""
    assert {n: x.shape for n, x in params.items()} == {n: x.shape for n, x in others.items()}
    return [n for n, x in params.items() if x.tobytes() != others[n].tobytes()]


def test_cut_files_are_refused(gguf_path, safetensors_path):
    for path in (gguf_path, safetensors_path):
        whole = path.read_bytes()
        drawn = np.random.default_rng(0).integers(0, len(whole), 60)
        for size in (0, 3, 8, 9, 10, 30, 300, 500, 4000, len(whole) - 1, *drawn):
            path.write_bytes(whole[:size])
            with pytest.raises(ValueError, match="truncated|neither|safetensors file") as error:
                open_model(str(path))
            assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_flipped_header_bytes_of_gguf(gguf_path):
    """Accepted are those in types of tokens, a fifth of the header, and some in texts of tokens."""
    config, intact = TIED, opened(gguf_path)
    assert intact[0].config == config
    start = min(info.offset for info in open_gguf(gguf_path).tensors.values())
    positions = np.random.default_rng(0).integers(0, start, 300)
    found = list(flipped(gguf_path, positions))
    assert found.count(None) > 0.6 * len(found)
    for model, params in filter(None, found):
        # the start of one tensor, or its type
        assert len(differing(intact[1], params)) <= 1
        changed = [
            field.name
            for field in dataclasses.fields(config)
            if getattr(model.config, field.name) != getattr(config, field.name)
        ]
        assert changed in ([], ["rope_theta"], ["norm_eps"], ["max_position"])
    assert opened(gguf_path) is not None


def test_flipped_header_bytes_of_safetensors(safetensors_path):
    """Only what stands in the metadata may be read as something else."""
    intact = opened(safetensors_path)
    start = start_of_data(safetensors_path)
    positions = np.random.default_rng(0).integers(0, start, 400)
    found = list(flipped(safetensors_path, positions))
    assert found.count(None) > 0.95 * len(found)
    for model, params in filter(None, found):
        assert model.config == TIED and not differing(intact[1], params)


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_a_flipped_byte_of_a_weight_changes_that_weight(form, gguf_path, safetensors_path):
    path = {"gguf": gguf_path, "safetensors": safetensors_path}[form]
    intact = opened(path)
    size = path.stat().st_size
    if form == "gguf":
        offsets = [info.offset for info in open_gguf(path).tensors.values()]
        start, last = min(offsets), max(offsets)
    else:
        start, last = start_of_data(path), size - 1
    assert start < last < size
    positions = np.random.default_rng(0).integers(start, last, 30)
    for position, (model, params) in zip(positions, flipped(path, positions), strict=True):
        assert model.config == TIED
        (name,) = differing(intact[1], params)
        assert np.count_nonzero(params[name] != intact[1][name]) == 1, position


def test_more_layers_than_tensors_are_refused_at_once(gguf_path, safetensors_path):
    """4 billion layers, whose names alone would fill the memory."""
    whole = bytearray(gguf_path.read_bytes())
    key = b"llama.block_count"
    whole[whole.index(key) + len(key) + 7] ^= 0xFF
    gguf_path.write_bytes(whole)
    settings = safetensors_path.parent / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"num_hidden_layers": 10**9}))
    for path, layers in ((gguf_path, 0xFF000002), (safetensors_path, 10**9)):
        message = f"must be an integer from 1 to 4096, got {layers}"
        with pytest.raises(ValueError, match=message):
            open_model(str(path))
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"num_hidden_layers": 4000}))
    message = f"{safetensors_path} do not fit .* has 4000 layers and 0 experts, the files hold 20"
    with pytest.raises(ValueError, match=re.compile(message)):
        open_model(str(safetensors_path))
