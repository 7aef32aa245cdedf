"""Data of a run reach the loader with the layout of its model's images."""

import dataclasses

import numpy as np
import pytest
from support.tiny_config import tiny_config

from distflow_jax.config.run_config import Config
from distflow_jax.data.dataset import open_dataset
from distflow_jax.data.loader import Loader
from distflow_jax.images.placing import SeeingTokenizer
from distflow_jax.models.weights.source import open_model
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.planning.run_data import prompt_encoder

MODELS = {
    "random:smolvlm": {},
    "random:qwen2_5_vl": {},
    "random:qwen3_vl": {},
    "random:gemma3?vision=1": {},
    "random:llama": {"vision": "random:siglip?hidden=32&layers=1&heads=2&patch=8"},
}


@pytest.mark.parametrize("spec", MODELS)
def test_prompts_have_as_many_features_as_their_patches_give(spec):
    source = open_model(spec, **MODELS[spec])
    config = dataclasses.replace(
        Config().data, image_tokens=300, max_prompt_length=500, prompts_per_step=8
    )
    encoder = prompt_encoder(source, config.image_tokens)
    assert isinstance(encoder, SeeingTokenizer)
    for task in ("shapes?sides=32-200", "walk?sides=64-128"):
        loader = Loader(open_dataset(f"task:{task}&size=16"), encoder, config, seed=0)
        for prompt in next(loader):
            (image,) = prompt.images
            assert image.patches.features <= config.image_tokens
            shown = prompt.patch[prompt.patch >= 0]
            np.testing.assert_array_equal(shown, np.arange(image.patches.features))
            assert len(image.patches.patches) % image.patches.features == 0
            assert prompt.tokens.max() < source.config.vocab_size


def test_a_text_model_keeps_its_tokenizer():
    source = open_model("random:llama")
    assert prompt_encoder(source, 256) is source.tokenizer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("model.source=random:llama?vocab=300", "model.vision=random:siglip", "lora.rank=4"),
            "lora.rank=4 trains only the text model, so the tower of model.vision=.* stay random",
        ),
        (
            ("model.source=random:smolvlm", "lora.rank=4", "training.freeze=language"),
            "lora.rank=4 trains adapters of the text model, but training.freeze=language trains",
        ),
        (
            ("model.source=random:gemma3?vision=1&max_position=1024", "rollout.prefill_tokens=1"),
            "rollout.prefill_tokens=1 cannot hold the 16 tokens of an image",
        ),
    ],
    ids=["adapters", "adapters of what is frozen", "pieces"],
)
def test_towers_that_could_not_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        plan_run(tiny_config(*settings), Machine.current())
