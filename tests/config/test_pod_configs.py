"""Configs of large models: every choice is whole, fits its pod's mesh, and says what it is not."""

import dataclasses
import importlib

import pytest
from support.paths import ROOT

from distflow_jax.config.config_dict import from_config_dict, to_config_dict, to_json
from distflow_jax.config.run_config import Config
from distflow_jax.models.parameters import num_params
from distflow_jax.models.weights.source import open_shapes
from distflow_jax.planning.chips import CHIPS
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.pods import preset

SHAPES = ROOT / "configs" / "shapes"
MILLIONS = {
    "qwen25_7b": 7616,
    "qwen25_32b": 32764,
    "qwen25_72b": 72706,
    "qwen25_vl_7b": 8292,
    "qwen25_vl_72b": 73411,
    "qwen3_30b_a3b": 30532,
}
CHOICES = [
    (name, f"{kind}-{chips},{context}")
    for name in MILLIONS
    for (kind, context), by in importlib.import_module(f"configs.{name}").DIVISIONS.items()
    for chips in sorted({max(by.chips, preset.CHIPS[kind][0]), preset.CHIPS[kind][1]})
]


def config_of(name, choice):
    return importlib.import_module(f"configs.{name}").get_config(choice)


@pytest.mark.parametrize("name", MILLIONS)
def test_shapes_are_those_of_the_published_models(name):
    config = open_shapes(str(SHAPES / name)).config
    assert round(num_params(config) / 1e6) == MILLIONS[name]
    if config.num_experts:
        idle = config.num_experts - config.experts_per_token
        unused = config.num_layers * idle * 3 * config.hidden_size * config.mlp_size
        assert round((num_params(config) - unused) / 1e8) == 34


@pytest.mark.parametrize(("name", "choice"), CHOICES)
def test_every_choice_is_a_run(name, choice):
    edited = config_of(name, choice)
    config = from_config_dict(Config, edited)
    assert to_json(to_config_dict(config)) == to_json(edited)
    kind, chips = choice.split(",")[0].split("-")
    chip, per_host = CHIPS[kind], 8 if kind[0] == "h" else 4
    machine = Machine(
        processes=int(chips) // per_host,
        devices=int(chips),
        local_devices=per_host,
        platform=chip.platform,
        memory=chip.memory,
    )
    model = dataclasses.replace(config.model, source=str(SHAPES / name))
    planned = plan_run(dataclasses.replace(config, model=model), machine, open_source=open_shapes)
    assert planned.sizes.engine.slots > 0
    assert planned.sizes.attention.name == "kernel"
    assert [task.node.id for task in planned.plan.tasks][-1] == "actor_train"


def test_what_is_longer_than_the_training_is_stretched_or_refused():
    division = {("v5p", "64k"): preset.Division(fsdp=16, tensor=4, rollout_tensor=4)}
    with pytest.raises(ValueError, match="has 32,768 positions, too few for 64k .*; use 8k, 32k"):
        preset.grpo("hf:A/B", "v5p-64,64k", division, positions=32_768)
    for positions, factor in ((32_768, 4.0), (65_536, 1.0)):
        config = preset.grpo("hf:A/B", "v5p-64,64k", division, positions=positions, yarn_factor=4.0)
        assert config.model.yarn_factor == factor


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ("v5p", "must be CHIPS,CONTEXT such as v5p-64,8k"),
        ("v9-64,8k", "unknown chip 'v9'; use v5e, v5p"),
        ("v5p-64,9k", "unknown context '9k'; use 8k, 32k, 64k"),
        ("v5p-2048,8k", "a pod of v5p has 64 to 1024 chips"),
        ("v5p-96,8k", "divided over 64 chips of v5p; use a multiple"),
        ("v5e-256,32k", "no division for v5e at 32k; use one of .*v5e,8k"),
    ],
)
def test_a_choice_that_is_none_is_said_in_one_line(choice, says):
    with pytest.raises(ValueError, match=says) as error:
        config_of("qwen25_72b", choice)
    assert "\n" not in str(error.value)
