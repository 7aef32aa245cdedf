"""YaRN: frequencies as transformers has them, where a model is stretched, what is refused."""

import json
import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from support.family_models import ROPES
from support.model_files import SIZES, hf_settings, random_params, tensors_of, write_gguf, write_hf
from support.paths import ROOT, TESTS

from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.run_config import Config, ModelSourceConfig
from distflow_jax.models import rope
from distflow_jax.models.decoder_config import DecoderConfig, YarnScaling
from distflow_jax.models.families import qwen2
from distflow_jax.models.weights.source import open_model, open_options, open_shapes

GOLDEN = json.loads((TESTS / "golden" / "families.json").read_text())
SHAPES = ROOT / "configs" / "shapes"
QWEN = DecoderConfig(**SIZES, family="qwen2", attention_bias=True, max_position=64)
SOURCE = "random:qwen2?hidden=32&layers=2&heads=4&kv_heads=2&mlp=48&max_position=64"


def read(scaling, **sizes):
    return qwen2.config_from_hf(hf_settings(QWEN, rope_scaling=scaling, **sizes))


def exact_frequencies(head_dim, theta, scaling):
    """Pair by pair, in Python's floats: how far along the ramp it is, and both ends' mean."""
    ends = []
    for turns in (scaling.beta_fast, scaling.beta_slow):
        longest = scaling.original_max_position / turns  # wavelength that turns so often
        ends.append(head_dim / 2 * math.log(longest / (2 * math.pi), theta))
    if scaling.truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    out = []
    for pair in range(head_dim // 2):
        plain = theta ** (-2 * pair / head_dim)
        along = min(max((pair - ends[0]) / (ends[1] - ends[0]), 0.0), 1.0)
        out.append(plain * (1 - along) + plain / scaling.factor * along)
    return np.array(out)


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_those_of_transformers(name):
    config, golden = read(ROPES[name][0], **ROPES[name][1]), GOLDEN["ropes"][name]
    scaling = config.rope_scaling
    got = rope.inverse_frequencies(config.head_dim, config.rope_theta, scaling)
    exact = exact_frequencies(config.head_dim, config.rope_theta, scaling)
    np.testing.assert_array_max_ulp(got, exact.astype(np.float32))
    # transformers computes in float32
    np.testing.assert_allclose(got, golden["frequencies"], rtol=1e-6)
    assert scaling.table_scale == pytest.approx(golden["scale"], rel=1e-12)
    plain = rope.inverse_frequencies(config.head_dim, config.rope_theta)
    assert got[0] == plain[0] and np.isclose(got[-1] * scaling.factor, plain[-1])


def test_scores_grow_by_the_square_of_the_tables_scale():
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(1, 1, 1, 16)).astype(np.float32) for _ in range(2))
    frequencies = rope.inverse_frequencies(16, 100.0)

    def score(scale):
        tables = (rope.rotary_tables(jnp.array([[p]]), frequencies, scale) for p in (9, 4))
        return np.sum(
            np.multiply(*(rope.rotate(x, t) for x, t in zip((q, k), tables, strict=True)))
        )

    np.testing.assert_allclose(score(1.25), 1.25**2 * score(1.0), rtol=1e-5)


def test_a_file_gives_the_stretched_length_whichever_it_names():
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for named in (64, 256):
        config = read(rope, max_position_embeddings=named)
        assert (config.max_position, config.rope_scaling) == (256, YarnScaling(4.0, 64))
    assert read({"type": "yarn", "factor": 4.0}).rope_scaling == YarnScaling(4.0, 64)
    ratio = read(rope | {"factor": None}, max_position_embeddings=128)
    assert (ratio.max_position, ratio.rope_scaling) == (128, YarnScaling(2.0, 64))


def test_attn_factor_multiplies_the_usual_scale():
    """As vLLM and llama.cpp read the file of DeepSeek-R1-0528-Qwen3-8B; transformers ignores it."""
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attn_factor": 0.8782488562869419,
    }
    config = read(rope)
    assert config.rope_scaling.table_scale == pytest.approx(1.0, abs=1e-12)
    written = qwen2.config_to_hf(config)["rope_scaling"]
    assert written["attention_factor"] == config.rope_scaling.table_scale
    assert "attn_factor" not in written
    assert read(written) == config
    assert read(rope | {"attn_factor": None}).rope_scaling == YarnScaling(4.0, 64)
    with pytest.raises(ValueError, match="attn_factor=1.5 is not supported"):
        read({"rope_type": "default", "attn_factor": 1.5})


def test_the_model_cards_words_are_what_is_written():
    """Other readers know these keys alone, and older ones take the factor from the lengths."""
    settings = qwen2.config_to_hf(
        replace(QWEN, rope_scaling=YarnScaling(4.0, 64), max_position=256)
    )
    assert settings["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    assert settings["max_position_embeddings"] == 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": None, "original_max_position_embeddings": None}, "yarn .* lacks factor"),
        ({"factor": 0.5}, "scaling factor must be at least 1, got 0.5"),
        ({"beta_slow": 64.0}, "beta_fast > beta_slow > 0, got .*beta_slow=64.0"),
        ({"attention_factor": 0.0}, "attention_factor must be positive, got 0.0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(change, message):
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    with pytest.raises(ValueError, match=message) as error:
        read(rope | change)
    assert "\n" not in str(error.value)


def test_gguf_says_the_same(tmp_path):
    tensors = tensors_of(QWEN, random_params(QWEN), "gguf")
    keys = {
        "qwen2__rope__scaling__type": "yarn",
        "qwen2__rope__scaling__factor": 4.0,
        "qwen2__rope__scaling__original_context_length": 64,
    }
    config = open_model(str(write_gguf(tmp_path / "a", QWEN, tensors, **keys))).config
    assert config == replace(QWEN, rope_scaling=YarnScaling(4.0, 64), max_position=256)
    more = {
        "qwen2__rope__scaling__yarn_beta_fast": 16.0,
        "qwen2__rope__scaling__yarn_beta_slow": 2.0,
        "qwen2__rope__scaling__attn_factor": 0.5,
    }
    scaling = open_model(
        str(write_gguf(tmp_path / "b", QWEN, tensors, **keys, **more))
    ).config.rope_scaling
    assert scaling == YarnScaling(4.0, 64, 16.0, 2.0, 0.5 * YarnScaling(4.0).table_scale)
    other = keys | {"qwen2__rope__scaling__yarn_log_multiplier": 0.1}
    with pytest.raises(ValueError, match="yarn_log_multiplier=0.1 is not supported, only 0"):
        open_model(str(write_gguf(tmp_path / "c", QWEN, tensors, **other)))


def test_a_config_can_stretch_a_model():
    plain = open_model(SOURCE)
    stretched = open_model(SOURCE, yarn_factor=4.0)
    assert stretched.config == replace(
        plain.config, rope_scaling=YarnScaling(4.0, 64), max_position=256
    )
    assert open_model(SOURCE, yarn_factor=1.0).config == plain.config
    own = open_model(SOURCE, yarn_factor=4.0, yarn_positions=32)
    assert (own.config.rope_scaling, own.config.max_position) == (YarnScaling(4.0, 32), 128)
    assert len({s.fingerprint for s in (plain, stretched, own)}) == 3
    published = open_shapes(str(SHAPES / "qwen25_7b"), yarn_factor=4.0).config
    assert (published.max_position, published.rope_scaling) == (131_072, YarnScaling())


def test_a_config_that_cannot_is_told_in_one_line(tmp_path):
    scaling = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    tensors = tensors_of(QWEN, random_params(QWEN))
    folder = str(write_hf(tmp_path / "m", QWEN, tensors, rope_scaling=scaling))
    assert open_model(folder).config.max_position == 128
    with pytest.raises(ValueError, match="yarn_factor=4: .*extend it to 128 .*; use .*factor=1"):
        open_model(folder, yarn_factor=4.0)
    with pytest.raises(ValueError, match="yarn_positions=65 is above the 64 positions of random"):
        open_model(SOURCE, yarn_factor=4.0, yarn_positions=65)
    for model, message in (
        ({"yarn_positions": 8}, "model.yarn_positions=8 with model.yarn_factor=1 has no effect"),
    ):
        with pytest.raises(ValueError, match=message):
            from_config_dict(Config, {"model": model})
    assert open_options(ModelSourceConfig())["yarn_factor"] == 1.0
