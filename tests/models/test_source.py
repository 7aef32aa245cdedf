"""Sources of models by their specs: folders, random models, fingerprints, refusals."""

import shutil

import numpy as np
import pytest
from support.model_files import SIZES, random_params, tensors_of, write_gguf

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.weights.source import fingerprint_files, open_model

TIED = DecoderConfig(**SIZES, max_position=128)


def test_folders_that_are_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no GGUF and no safetensors"):
        open_model(str(tmp_path))
    tensors = tensors_of(TIED, random_params(TIED), "gguf")
    write_gguf(tmp_path / "a.gguf", TIED, tensors)
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    with pytest.raises(ValueError, match=r"several models \(a.gguf, b.gguf\)"):
        open_model(str(tmp_path))
    (tmp_path / "notes.txt").write_text("hello, I am long enough to be read")
    with pytest.raises(ValueError, match="neither a GGUF nor a safetensors"):
        open_model(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("model.safetensors", "version https://git-lfs.github.com/spec/v1\n", "run git lfs pull"),
        ("pytorch_model.bin", "PK", "pytorch_model.bin is of PyTorch: save the model with safe_"),
    ],
)
def test_a_folder_without_weights_says_what_lies_there(tmp_path, name, content, message):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(content)
    with pytest.raises(FileNotFoundError, match=message):
        open_model(str(tmp_path))


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("pipy:a==1", ValueError, "did you mean pypi:a==1"),
        ("ftp:a", ValueError, "known: hf, pypi, random"),
        ("no/such/folder", FileNotFoundError, "write hf:ORG/NAME"),
        ("", FileNotFoundError, "is not a file or folder"),
        ("hf:noslash", ValueError, "must read hf:ORG/NAME"),
        ("pypi:package", ValueError, "must read pypi:PACKAGE==VERSION"),
        ("pypi:--index-url==1", ValueError, "must read pypi:PACKAGE==VERSION"),
        ("random:lama", ValueError, "did you mean 'llama'"),
        ("random:llama?hiden=8", ValueError, "unknown option 'hiden': did you mean 'hidden'"),
        ("random:llama?hidden=big", ValueError, "hidden must be a whole number, got 'big'"),
        ("random:llama?tied=maybe", ValueError, "tied must be 0 or 1, got 'maybe'"),
        ("random:llama?hidden=30", ValueError, "hidden 30 is not divisible by heads 4"),
        ("random:llama?hidden=32&hidden=64", ValueError, "option 'hidden' is given twice"),
        ("https://huggingface.co/Qwen/Qwen3-4B", ValueError, "hub: write hf:Qwen/Qwen3-4B"),
        ("random:llama?layers=0", ValueError, "num_layers must be an integer from 1 to 4096"),
        ("random:llama?vocab=64", ValueError, "needs a vocabulary of 259, got 64"),
        ("random:qwen3?experts=4", ValueError, "=4 is not supported; use qwen3_moe, mixtral"),
        ("random:mixtral?experts=0", ValueError, "=0 is not supported; use llama, mistral, qwen2"),
        ("random:mixtral?experts=3&active=4", ValueError, "=4 of num_experts=3 .*: use 1 to 3"),
    ],
)
def test_bad_specs_say_what_to_write(spec, error, message, tmp_path):
    with pytest.raises(error, match=message):
        open_model(spec, cache_dir=str(tmp_path))


def test_random_source():
    spec = (
        "random:llama?hidden=64&layers=3&heads=8&kv_heads=2&mlp=96&vocab=300&tied=0"
        "&max_position=64&rope_theta=5e4&norm_eps=1e-6"
    )
    source = open_model(spec)
    assert source.config == DecoderConfig(
        "llama", 300, 64, 3, 8, 2, 8, 96, 5e4, None, 1e-6, False, 64
    )
    assert source.params() is None
    assert source.tokenizer.vocab_size == 300
    assert source.fingerprint == open_model(spec).fingerprint
    assert source.fingerprint != open_model(spec.replace("mlp=96", "mlp=97")).fingerprint
    assert open_model("random:llama").config == DecoderConfig()


def test_fingerprint_follows_the_weights_not_the_folder(tmp_path):
    a = write_gguf(tmp_path / "m.gguf", TIED, tensors_of(TIED, random_params(TIED), "gguf"))
    (tmp_path / "other").mkdir()
    b = tmp_path / "other" / "m.gguf"
    shutil.copy(a, b)
    assert open_model(str(a)).fingerprint == open_model(str(b)).fingerprint
    write_gguf(b, TIED, tensors_of(TIED, random_params(TIED, seed=1), "gguf"))
    assert a.stat().st_size == b.stat().st_size
    assert open_model(str(a)).fingerprint != open_model(str(b)).fingerprint


def test_fingerprint_samples_large_files(tmp_path):
    path = tmp_path / "large"
    data = np.zeros(40 << 20, np.uint8)
    data.tofile(path)
    before = fingerprint_files([path])
    data[20 << 20 :] = 1  # as training does: everywhere a little
    data.tofile(path)
    assert fingerprint_files([path]) != before
