"""Configs of machines: every choice is whole, fits its machine's mesh, and says what it is not.

Nightly: each is within 10 % of the sweep's best, with memory to spare; one for TPUs is that of the
sweep's best three as compiled, too (needs libtpu). A compiled decode step moves little more than
its weights and its cache (needs libtpu).
"""

import dataclasses
import importlib

import pytest
from support.accelerators import needs_libtpu
from support.paths import ROOT
from support.presets import PRESETS, least_machine, traced_pod

from distflow_jax.config.config_dict import from_config_dict, to_config_dict, to_json
from distflow_jax.config.graph_settings import value_at, with_values
from distflow_jax.config.run_config import Config
from distflow_jax.models.parameters import num_params
from distflow_jax.models.weights.source import open_shapes
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.machine_names import named_machine
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.pods import preset
from distflow_jax.pods.compile import compile_sampler
from distflow_jax.pods.pod_plan import SPARE, plan_on
from distflow_jax.pods.pricing import SEARCHED, Pricing
from distflow_jax.pods.search import Search
from distflow_jax.pods.sweep import price
from distflow_jax.pods.topology import open_topology
from distflow_jax.rollout.cache_sizing import cache_bytes, weight_bytes

SHAPES = ROOT / "configs" / "shapes"
MILLIONS = {
    "qwen25_0_5b": 494,
    "qwen25_1_5b": 1544,
    "qwen25_3b": 3086,
    "qwen25_7b": 7616,
    "qwen25_32b": 32764,
    "qwen25_72b": 72706,
    "qwen25_vl_7b": 8292,
    "qwen25_vl_72b": 73411,
    "qwen3_30b_a3b": 30532,
}
LARGE = {
    "v4": "v4-64",
    "v5e": "v5e-256",
    "v5p": "v5p-2048",
    "h100": "h100-1024",
    "h200": "h200-1024",
}
CHOICES = [
    (name, f"{machine},{context}")
    for name in PRESETS
    for (kind, context), by in importlib.import_module(f"configs.{name}").DIVISIONS.items()
    for machine in dict.fromkeys((least_machine(kind, by), LARGE.get(kind, f"{kind}-8")))
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
    machine = Machine.of(named_machine(choice.split(",")[0]))
    model = dataclasses.replace(config.model, source=str(SHAPES / name))
    planned = plan_run(dataclasses.replace(config, model=model), machine, open_source=open_shapes)
    assert planned.sizes.engine.slots > 0
    assert planned.sizes.attention.name == ("kernel" if machine.platform == "tpu" else "blocks")
    assert [task.node.id for task in planned.plan.tasks][-1] == "actor_train"


# faster as compiled than the sweep's best by formulas, with memory to spare (docs/lab/pods.md)
FASTER_AS_COMPILED = (("qwen25_7b", "v6e-8,2k"), ("qwen25_72b", "v5e-256,8k"))
LEAST = [
    pytest.param(
        name,
        f"{least_machine(kind, by)},{context}",
        marks=pytest.mark.slow,
    )
    for name in PRESETS
    for (kind, context), by in importlib.import_module(f"configs.{name}").DIVISIONS.items()
]


@pytest.mark.parametrize(("name", "choice"), [("qwen25_1_5b", "h100-1,2k"), *LEAST])
def test_every_choice_is_near_the_best_of_the_sweep(name, choice):
    config = from_config_dict(Config, config_of(name, choice))
    config = with_values(config, {"model.source": str(SHAPES / name)})
    pricing = Pricing(traced_pod(choice.split(",")[0]), config)
    planned = pricing.planned({})
    own = pricing.price(planned, pricing.traced(planned))
    assert own.spare >= SPARE and not own.problem
    best = price(Search(pricing))[0].guess
    most = 1.15 if (name, choice) in FASTER_AS_COMPILED else 1.1
    assert own.expected.middle <= most * best.expected.middle, {
        key: value_at(best.planned.config, key) for key in SEARCHED
    }


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("qwen25_1_5b", "v5e-8"),
        ("qwen25_3b", "v5e-8"),
        ("qwen25_3b", "v6e-8"),
        ("qwen25_7b", "v5p-8"),
    ],
)
def test_a_choice_is_near_the_best_three_as_compiled(name, machine):
    """With their training compiled; sampling is priced by formulas in any case."""
    config = from_config_dict(Config, config_of(name, f"{machine},2k"))
    config = with_values(config, {"model.source": str(SHAPES / name)})
    pod = open_topology(machine)
    pricing = Pricing(pod, config)
    best = [c.guess for c in price(Search(pricing))[:3]]

    def seconds(planned):
        found = plan_on(pod, planned, only=tuple(best[0].programs))
        assert not found.refused
        return found.expected.middle

    own = pricing.planned({})
    others = [guess.planned for guess in best if guess.planned.config != own.config]
    assert seconds(own) <= 1.1 * min(map(seconds, others))


@needs_libtpu
@pytest.mark.slow
def test_a_large_update_fits_as_compiled():
    """72B on v5e with two rows at a time: 11 % free by formulas, 0.1 % as compiled."""
    config = from_config_dict(Config, config_of("qwen25_72b", "v5e-256,8k"))
    config = with_values(config, {"model.source": str(SHAPES / "qwen25_72b")})
    pod = open_topology("v5e-256")
    planned = plan_run(config, pod.machine, open_source=open_shapes)
    planned = dataclasses.replace(planned, devices=pod.devices)
    found = plan_on(pod, planned, only=("actor_train", "update_weights"))
    assert not found.problem and found.spare >= SPARE


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("qwen25_7b", "v5p-8,2k"),
        ("qwen25_7b", "v6e-8,2k"),
        ("qwen25_3b", "v5e-8,2k"),
        ("qwen3_30b_a3b", "v5p-128,8k"),
    ],
)
def test_a_decode_step_moves_its_weights_and_its_cache_alone(name, choice):
    """Within 15 %, as compiled: queries are not rearranged in HBM, nor pages or experts copied."""
    config = from_config_dict(Config, config_of(name, choice))
    config = with_values(config, {"model.source": str(SHAPES / name)})
    pod = open_topology(choice.split(",")[0])
    planned = plan_run(config, pod.machine, open_source=open_shapes)
    planned = dataclasses.replace(planned, devices=pod.devices)
    found = compile_sampler(planned, pod, "decode")
    model, engine = planned.source.config, planned.sizes.engine
    ranks, tensor = planned.sizes.sampler_ranks, planned.sizes.rollout_tensor
    whole = weight_bytes(model, engine, tensor)
    whole += cache_bytes(model, engine, ranks=ranks, tensor=tensor)
    step = found.bytes_accessed / engine.tokens_per_call
    assert found.unread == 0 and 0.9 * whole < step < 1.15 * whole


def test_what_is_longer_than_the_training_is_stretched_or_refused():
    division = {("v5p", "64k"): preset.Division(fsdp=16, tensor=4, rollout_tensor=4)}
    with pytest.raises(ValueError, match="has 32,768 positions, too few for 64k .*; use 2k, 8k, 3"):
        preset.grpo("hf:A/B", "v5p-128,64k", division, positions=32_768)
    for positions, factor in ((32_768, 4.0), (65_536, 1.0)):
        config = preset.grpo(
            "hf:A/B", "v5p-128,64k", division, positions=positions, yarn_factor=4.0
        )
        assert config.model.yarn_factor == factor


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ("v5p", "'v5p' must be MACHINE,CONTEXT .* context of 2k, 8k, 32k, 64k"),
        ("v9-64,8k", "'v9-64' must be CHIP-NUMBER .* one of v4, v5e, v5p"),
        ("v5p-128,9k", "'v5p-128,9k' must be MACHINE,CONTEXT .* 2k, 8k, 32k, 64k"),
        ("v5p-96,8k", "there is no slice v5p-96 .*; use .*v5p-64 or v5p-128"),
        ("v5p-64,8k", "'v5p-64,8k' has 32 devices, but .* over 64 of v5p: use v5p-128, or a mu"),
        ("v5e-256,32k", "no division for v5e at 32k; use one of .*v5e,8k"),
    ],
)
def test_a_choice_that_is_none_is_said_in_one_line(choice, says):
    with pytest.raises(ValueError, match=says) as error:
        config_of("qwen25_72b", choice)
    assert "\n" not in str(error.value)
