"""Models that see images in files: there and back, what is random, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax.traverse_util import flatten_dict
from support.paths import TESTS
from support.rewritten import wider
from support.seeing_models import CASES, FAMILY_MODULES
from support.tiny_model import mesh_of

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.model_flops import BatchWork, forward_flops, training_flops, with_patches
from distflow_jax.models.parameters import num_params, param_specs
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.models.weights.hf_folder import Export, write_hf_folder
from distflow_jax.models.weights.load_params import load_or_init_params
from distflow_jax.models.weights.source import freeze, open_model

GOLDEN = json.loads((TESTS / "golden" / "vision.json").read_text())["entries"]
EACH = pytest.mark.parametrize("case", CASES)


def written(folder, config, params):
    tokenizer = Tokenizer.byte_level(config.vocab_size)
    write_hf_folder(folder, Export(config, tokenizer, lambda: iter(params.items())))
    return folder


@EACH
def test_every_bit_comes_back(case, tmp_path):
    config, params = wider(f"{case} seeing")
    source = open_model(str(written(tmp_path / "one", config, params)))
    assert source.config == config
    read = dict(source.params())
    assert read.keys() == params.keys() == param_specs(config).keys()
    for path, array in params.items():
        np.testing.assert_array_equal(read[path], array, err_msg=path)
    written(tmp_path / "two", source.config, read)
    one, two = (
        safetensors.numpy.load_file(tmp_path / name / "model.safetensors")
        for name in ("one", "two")
    )
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, two[name], err_msg=name)


@EACH
def test_the_config_that_transformers_writes_is_read(case):
    config = FAMILY_MODULES[CASES[case].family].config_from_hf(GOLDEN[case]["config"])
    own = CASES[case]
    # how pictures are resized stands in another file
    pictures = ("mean", "std", "least_pixels", "most_pixels", "longest_edge")
    same = {name: getattr(own.vision, name) for name in pictures}
    assert dataclasses.replace(config, vision=dataclasses.replace(config.vision, **same)) == own


def test_smolvlms_epsilon_is_that_of_transformers():
    """Llama's default where a text_config lacks it, and another where there is no text_config."""
    own = CASES["smolvlm"]
    settings = FAMILY_MODULES["smolvlm"].config_to_hf(own)
    text = {key: x for key, x in settings["text_config"].items() if key != "rms_norm_eps"}
    read = FAMILY_MODULES["smolvlm"].config_from_hf
    assert read(settings | {"text_config": text}).norm_eps == 1e-6
    del settings["text_config"]
    assert read(settings).norm_eps == 1e-5


@pytest.mark.parametrize("given", [2, 4])
def test_numbers_of_videos_are_kept(given, tmp_path):
    """Released files of Qwen2.5-VL have 2 tokens per second; transformers' default is 4."""
    config, params = wider("qwen2_5_vl seeing")
    tower = dataclasses.replace(config.vision, tokens_per_second=given)
    config = dataclasses.replace(config, vision=tower)
    folder = written(tmp_path / "out", config, params)
    settings = json.loads((folder / "config.json").read_text())
    assert settings["vision_config"]["tokens_per_second"] == given
    assert open_model(str(folder)).config == config


def test_gemma_without_its_tower_is_a_text_model(tmp_path):
    config, params = wider("gemma3 seeing")
    source = open_model(str(written(tmp_path / "x", config, params)), vision="none")
    text = dataclasses.replace(config, vision=None)
    assert source.config == text
    assert dict(source.params()).keys() == param_specs(text).keys()
    written(tmp_path / "text", source.config, dict(source.params()))
    assert json.loads((tmp_path / "text/config.json").read_text())["model_type"] == "gemma3_text"
    with pytest.raises(ValueError, match="model.vision=none is for Gemma 3, not for smolvlm"):
        open_model("random:smolvlm?hidden=64&layers=2", vision="none")


@pytest.mark.parametrize(
    "spec",
    [
        "random:smolvlm?hidden=64&layers=2",
        "random:qwen2_5_vl?hidden=64&layers=2&vision_layers=3&patch=4",
        "random:qwen3_vl?hidden=64&layers=2&image=64",
        "random:gemma3?hidden=64&layers=2&vision=1",
        "random:smolvlm?hidden=64&layers=2&tiles=256",
    ],
)
def test_random_models_see(spec, tmp_path):
    source = open_model(spec)
    config = source.config
    assert config.vision is not None and config.vision.width == 64
    params = load_or_init_params(source, 0, mesh_of(1, 1))
    flat = {path: np.asarray(x) for path, x in flatten_dict(params, sep="/").items()}
    assert flat.keys() == param_specs(config).keys()
    again = open_model(str(written(tmp_path / "x", config, flat)))
    assert dataclasses.replace(again.config, norm_eps=config.norm_eps) == config
    other = open_model(spec.replace("hidden=64", "hidden=64&merge=4"))
    assert other.fingerprint != source.fingerprint


def test_a_text_model_gets_a_new_tower(tmp_path):
    spec = "random:siglip?hidden=48&layers=2&patch=8&image=32"
    text = open_model("random:llama?hidden=64&layers=2")
    params = load_or_init_params(text, 0, mesh_of(1, 1))
    flat = {path: np.asarray(x) for path, x in flatten_dict(params, sep="/").items()}
    folder = written(tmp_path / "text", text.config, flat)
    source = open_model(str(folder), vision=spec)
    tower = source.config.vision
    assert (tower.family, tower.hidden_size, tower.grid, tower.width) == ("siglip", 48, 4, 64)
    assert source.fingerprint != open_model(str(folder)).fingerprint
    both = load_or_init_params(source, 0, mesh_of(1, 1))
    jax.tree.map(np.testing.assert_array_equal, {k: both[k] for k in params}, params)
    found = {path: np.asarray(x) for path, x in flatten_dict(both, sep="/").items()}
    again = open_model(str(written(tmp_path / "out", source.config, found)))
    assert (again.config.family, again.config.vision.family) == ("smolvlm", "smolvlm")
    for path, array in again.params():
        np.testing.assert_array_equal(array, found[path], err_msg=path)


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ("random:vit", "model.vision=random:vit is not supported: use random:siglip"),
        ("random:siglip?hiden=4", "unknown option 'hiden': did you mean 'hidden'?"),
        ("random:siglip?hidden=50", "vision hidden_size 50 is not divisible by num_heads 4"),
        ("random:siglip?patch=7&image=32", "patch=7 does not divide image=32"),
        ("random:siglip?layers=x", "layers must be a whole number"),
    ],
)
def test_bad_towers_are_refused_in_one_line(vision, message):
    with pytest.raises(ValueError) as error:
        open_model("random:llama?hidden=64&layers=2", vision=vision)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_bad_combinations_are_refused():
    with pytest.raises(ValueError, match="has a tower of its own; use model.vision"):
        open_model("random:smolvlm?hidden=64&layers=2", vision="random:siglip")
    with pytest.raises(ValueError, match="llama has no tower of its own"):
        open_model("random:llama?hidden=64&layers=2&vision=1")
    with pytest.raises(ValueError, match="training.freeze=vision: .* has no vision tower"):
        freeze(open_model("random:llama?hidden=64&layers=2"), "vision")
    with pytest.raises(ValueError, match="freeze=vision: the tower of model.vision is new and"):
        freeze(open_model("random:llama?hidden=64&layers=2", vision="random:siglip"), "vision")
    with pytest.raises(ValueError, match="freeze=language: .* has no vision tower"):
        freeze(open_model("random:llama?hidden=64&layers=2"), "language")
    with pytest.raises(ValueError, match="features of the vision tower have width 32, the text"):
        DecoderConfig(vision=CASES["smolvlm"].vision)
    with pytest.raises(ValueError, match="only Llama models can be exported"):
        qwen = open_model("random:qwen2?hidden=64&layers=2", vision="random:siglip").config
        written(None, qwen, {})


def test_patches_are_counted_by_image_and_window():
    """Two images of 6 x 4 and 2 x 2 patches in windows of 4: 16 and 8 of the first, 4."""
    v = CASES["qwen2_5_vl"].vision
    places = [*np.ndindex(6, 4), *np.ndindex(2, 2), (0, 0)]
    positions = np.array(places, np.int32)
    segments = np.array([1] * 24 + [2] * 4 + [0], np.int32)
    work = with_patches(BatchWork(10, 4, 55, 0, 1, 1, 1), v.window, positions, segments)
    assert (work.patches, work.patch_pairs) == (29, 1 + 24**2 + 4**2)
    assert work.window_pairs == 1 + 16**2 + 8**2 + 4**2


def test_flops_count_the_tower():
    """Against the weights one by one: 2 a patch or feature, 4 hidden a pair."""
    config = dataclasses.replace(CASES["qwen2_5_vl"], lora=None)
    v = config.vision
    text = BatchWork(10, 4, 55)
    seen = dataclasses.replace(text, patches=40, patch_pairs=1600, window_pairs=400)
    layer = 4 * v.hidden_size**2 + 3 * v.hidden_size * v.mlp_size
    per_patch = 3 * layer + v.patch_bytes * v.hidden_size
    per_feature = v.merged_size**2 + v.merged_size * v.width
    wanted = 2 * (40 * per_patch + 10 * per_feature)
    wanted += 4 * v.hidden_size * (1600 + 2 * 400)
    assert forward_flops(config, seen) - forward_flops(config, text) == wanted
    assert training_flops(config, seen) - training_flops(config, text) == 3 * wanted
    frozen = dataclasses.replace(config, vision=dataclasses.replace(v, frozen=True))
    assert training_flops(frozen, seen) - training_flops(frozen, text) == wanted
    assert num_params(config) > num_params(dataclasses.replace(config, vision=None))
