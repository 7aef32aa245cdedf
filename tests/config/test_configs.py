"""Every config in configs/ is whole: it builds, is locked, goes there and back, and divides."""

import dataclasses
import importlib
import json
import re

import pytest
from flax.traverse_util import flatten_dict
from ml_collections import config_dict
from support.paths import ROOT

from distflow_jax.config.config_dict import from_config_dict, override, to_config_dict, to_json
from distflow_jax.config.run_config import Config
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.weights.source import open_model
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import make_plan, settle
from distflow_jax.planning.sizes import derive_sizes
from distflow_jax.planning.sizes_table import describe_sizes
from distflow_jax.stages.registry import resolve

NAMES = sorted(
    p.stem
    for p in ROOT.glob("configs/*.py")
    if not p.stem.startswith("qwen")  # of pods: test_pod_configs.py
)
ONE = Machine(processes=1, devices=1, local_devices=1, platform="cpu")
EIGHT = Machine(processes=1, devices=8, local_devices=8, platform="cpu")
TWO_PROCESSES = Machine(processes=2, devices=8, local_devices=4, platform="cpu")


def config_of(name, *assignments):
    edited = importlib.import_module(f"configs.{name}").get_config()
    return from_config_dict(Config, override(edited, assignments))


@pytest.fixture(scope="module")
def model_of():
    """Model config by source: each is opened once."""
    opened = {}

    def model(config):
        source = config.model.source
        return opened.setdefault(source, open_model(source).config)

    return model


def test_there_are_configs():
    assert {"base", "grpo_smollm2", "tiny"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_locked_and_goes_there_and_back(name):
    edited = importlib.import_module(f"configs.{name}").get_config()
    with pytest.raises(AttributeError):
        edited.new_key = 1
    for key in edited:
        if isinstance(edited[key], config_dict.ConfigDict):
            assert edited[key].is_locked, key
    config = from_config_dict(Config, edited)
    assert to_json(to_config_dict(config)) == to_json(edited)
    assert from_config_dict(Config, json.loads(to_json(edited))) == config


@pytest.mark.parametrize("machine", [ONE, EIGHT, TWO_PROCESSES], ids=["1", "8", "2x4"])
@pytest.mark.parametrize("name", NAMES)
def test_its_sizes_divide(name, machine, model_of):
    config = config_of(name)
    model = model_of(config)
    sizes = derive_sizes(config, model, machine)
    packing, rollout = sizes.packing, config.rollout
    assert sizes.mesh.fsdp * sizes.mesh.tensor == machine.devices
    # the rows hold the longest batch there can be, and micro-batches fill them evenly
    rows = packing.rows[packing.primary]
    assert rows % sizes.micro_rows == 0
    longest = config.data.max_prompt_length + rollout.max_response_length
    samples = config.data.prompts_per_step * rollout.num_samples // config.training.mini_batches
    assert rows * sizes.mesh.fsdp * (packing.limits.tokens // longest) >= samples
    assert rows * sizes.mesh.fsdp * packing.limits.sequences >= samples
    assert sizes.engine.decode_slots * machine.processes == rollout.num_slots
    shown = {row[0]: row[1] for row in describe_sizes(sizes, config, model, machine)}
    assert shown["devices"] == machine.devices
    assert shown["sequences per step"] == config.data.prompts_per_step * rollout.num_samples


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ((), None),
        (("algorithm.policy_loss=kl_cov",), 0),
        (("algorithm.policy_loss=kl_cov", "training.mini_batches=2"), 1),
        (("algorithm.policy_loss=clip_cov", "training.mini_batches=2", "training.epochs=2"), 3),
        (("algorithm.policy_loss=clip_cov", "algorithm.proximal=rollout"), 1),
    ],
)
def test_the_sizes_state_forward_passes_of_losses_that_choose(changes, passes, model_of):
    """None for other losses, and none before the first optimizer step of a batch."""
    config = config_of(NAMES[0], *changes)
    model = model_of(config)
    table = describe_sizes(derive_sizes(config, model, ONE), config, model, ONE)
    found = {row[0]: row[1] for row in table}
    assert found.get("more forward passes") == passes


@pytest.mark.parametrize(
    "changes, nodes",
    [
        ((), set()),
        (("algorithm.kl_coef=0.05",), {"reference"}),
        (("training.mini_batches=2",), {"old_logp"}),
        (("algorithm.kl_coef=0.05", "training.epochs=2"), {"reference", "old_logp"}),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_it_plans(name, changes, nodes, model_of):
    config = config_of(name, *changes)
    settled, graph = settle(config)
    plan = make_plan(settled, graph, derive_sizes(settled, model_of(config), EIGHT, graph))
    ids = {task.node.id for task in plan.tasks}
    assert ids == {"rollout", "reward", "advantage", "actor_train"} | nodes
    assert set(resolve(task.node for task in plan.tasks)) == ids


def test_every_key_has_its_owner_and_a_default():
    keys = flatten_dict(json.loads(to_json(to_config_dict(Config()))), sep="/")
    assert {f.name for f in dataclasses.fields(Config)} == {key.split("/")[0] for key in keys}


MODEL = DecoderConfig(
    vocab_size=300, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=96
)


# The number that an error names must do: it is put in, and the same check is passed.
@pytest.mark.parametrize(
    "key, value, machine, given",
    [
        ("data.prompts_per_step", 1, TWO_PROCESSES, ()),
        ("data.prompts_per_step", 5, TWO_PROCESSES, ("training.mini_batches=2",)),
        ("data.prompts_per_step", 1, EIGHT, ("training.mini_batches=4",)),
        ("rollout.num_slots", 20, EIGHT, ()),
        ("rollout.num_slots", 3, TWO_PROCESSES, ("mesh.rollout_tensor=2",)),
        ("training.micro_batch_rows", 3, EIGHT, ()),
        ("training.micro_batch_rows", 7, TWO_PROCESSES, ("mesh.tensor=2",)),
        ("training.logp_chunk", 100, ONE, ()),
        ("training.row_tokens", 64, ONE, ("training.logp_chunk=32",)),
        ("mesh.tensor", 3, EIGHT, ()),
        ("mesh.tensor", 8, EIGHT, ()),
        ("mesh.rollout_tensor", 8, EIGHT, ()),
        ("training.row_sequences", 200, ONE, ()),
        ("mesh.rollout_tensor", 3, TWO_PROCESSES, ()),
    ],
)
def test_the_number_that_an_error_names_would_fit(key, value, machine, given):
    def sizes(number):
        return derive_sizes(config_of("tiny", *given, f"{key}={number}"), MODEL, machine)

    with pytest.raises(ValueError, match=re.escape(f"{key}={value}")) as caught:
        sizes(value)
    text = re.search(r"(?:use|must be one of)(.*)", str(caught.value))[1]
    numbers = re.findall(r"\d+", text.split(" and ")[0])
    assert numbers
    for number in numbers:
        sizes(number)


def test_the_length_penalty_lies_within_the_response():
    config = config_of("tiny", "reward.overlong_buffer=16")
    derive_sizes(config, MODEL, ONE)
    with pytest.raises(ValueError, match="reward.overlong_buffer=16 is above .*=8; use at most"):
        derive_sizes(
            config_of("tiny", "reward.overlong_buffer=16", "rollout.max_response_length=8"),
            MODEL,
            ONE,
        )


def test_roles_have_meshes_of_their_own():
    config = config_of("tiny", "mesh.roles={'REFERENCE': {'tensor': 2}}", "algorithm.kl_coef=0.1")
    sizes = derive_sizes(config, MODEL, TWO_PROCESSES)
    assert (sizes.mesh.fsdp, sizes.mesh_of("REFERENCE").fsdp) == (8, 4)
    tasks = make_plan(*settle(config), sizes).tasks
    layouts = {t.node.id: str(t.layout) for t in tasks}
    assert layouts["reference"] == "fsdp 4 x tensor 2"
    assert layouts["actor_train"] == "fsdp 8 x tensor 1"
    moves = {e.field: e.move for t in tasks for e in t.edges_in}
    assert moves["ref_logp"] == "reshard"


def test_copies_of_the_model_are_data_ranks_too():
    roles = "mesh.roles={'REFERENCE': {'data': 2, 'tensor': 2}}"
    config = config_of("tiny", "mesh.data=2", roles, "algorithm.kl_coef=0.1")
    sizes = derive_sizes(config, MODEL, TWO_PROCESSES)
    assert (sizes.mesh.data, sizes.mesh.fsdp, sizes.mesh.ranks) == (2, 4, 8)
    assert sizes.mesh_of("REFERENCE").ranks == 4
    tasks = make_plan(*settle(config), sizes).tasks
    layouts = {t.node.id: str(t.layout) for t in tasks}
    assert layouts["reference"] == "data 2 x fsdp 2 x tensor 2"
    assert layouts["actor_train"] == "data 2 x fsdp 4 x tensor 1"
    table = {row[0]: row[1] for row in describe_sizes(sizes, config, MODEL, TWO_PROCESSES)}
    plain = derive_sizes(config_of("tiny"), MODEL, TWO_PROCESSES)
    assert table["rows"] == plain.packing.rows[plain.packing.primary] * 8
    assert plain.mesh.describe() == ("fsdp 8 x tensor 1", "")


def test_devices_share_rows():
    config = config_of("tiny", "mesh.context=4", "training.row_tokens=512")
    sizes = derive_sizes(config, MODEL, EIGHT)
    assert (sizes.mesh.ranks, sizes.mesh.context, sizes.mesh.row_chunks) == (2, 4, 8)
    assert sizes.mesh.describe()[0] == "fsdp 2 x context 4 x tensor 1"
    assert sizes.forward.attention_block == 32  # divides a piece of 512 / 8 tokens
    assert sizes.micro_rows == 1
    table = {row[0]: row[1:] for row in describe_sizes(sizes, config, MODEL, EIGHT)}
    text = "tokens, at most 128 sequences; 128 on each of 4 devices"
    assert table["row"] == (512, text)


FOUR_LAYERS = dataclasses.replace(MODEL, num_layers=4)


def test_stages_share_the_layers():
    config = config_of("tiny", "mesh.pipeline=4", "training.pipeline_microbatches=12")
    sizes = derive_sizes(config, FOUR_LAYERS, EIGHT)
    assert (sizes.mesh.ranks, sizes.mesh.pipeline, sizes.micro_rows) == (2, 4, 1)
    assert sizes.mesh.describe()[0] == "fsdp 2 x pipeline 4 x tensor 1"
    assert sizes.rows_at_a_time(sizes.mesh.layout) == 12
    assert sizes.packing.rows[sizes.mesh.layout] % 12 == 0
    assert sizes.forward.microbatches == 12
    table = {row[0]: row[1:] for row in describe_sizes(sizes, config, FOUR_LAYERS, EIGHT)}
    idle = "x 12 micro-batches; each rank is idle for 20% of the time"
    assert table["pipeline"] == ("4 ranks", idle)


def test_stages_take_turns():
    config = config_of(
        "tiny", "mesh.pipeline=2", "training.pipeline_repeats=2", "training.remat=dots"
    )
    sizes = derive_sizes(config, FOUR_LAYERS, EIGHT)
    assert sizes.forward.repeats == 2 and sizes.bubble_share == 1 / 5
    table = {row[0]: row[1:] for row in describe_sizes(sizes, config, FOUR_LAYERS, EIGHT)}
    idle = "x 2 micro-batches, 2 rounds; each rank is idle for 20% of the time"
    assert table["pipeline"] == ("2 ranks", idle)


def test_a_role_without_stages_takes_its_rows_as_ever():
    roles = "mesh.roles={'REFERENCE': {'data': 8}, 'CRITIC': {'pipeline': 2}}"
    sizes = derive_sizes(config_of("tiny", "mesh.pipeline=4", roles), FOUR_LAYERS, EIGHT)
    assert sizes.microbatches == 4  # which the two pipeline ranks of the critic divide too
    of_role = {name: sizes.rows_at_a_time(mesh.layout) for name, mesh in sizes.role_meshes.items()}
    assert of_role == {"REFERENCE": 1, "CRITIC": 4}
    assert sizes.bubble_share == 3 / 7


def test_roles_have_parts_of_every_host():
    parts = "mesh.roles={'REFERENCE': {'devices': '2:4', 'tensor': 2}}"
    config = config_of("tiny", "mesh.devices=0:2", parts, "algorithm.kl_coef=0.1")
    sizes = derive_sizes(config, MODEL, TWO_PROCESSES)
    tasks = make_plan(*settle(config), sizes).tasks
    layouts = {t.node.id: str(t.layout) for t in tasks}
    assert layouts["reference"] == "fsdp 2 x tensor 2 on devices 2:4"
    assert layouts["actor_train"] == "fsdp 4 x tensor 1 on devices 0:2"
    assert {e.field: e.move for t in tasks for e in t.edges_in}["ref_logp"] == "reshard"
    rows = [row for row in describe_sizes(sizes, config, MODEL, TWO_PROCESSES) if "mesh" in row[0]]
    assert rows == [
        ("training mesh", "fsdp 4 x tensor 1", "on devices 0:2 of every host"),
        ("mesh of REFERENCE", "fsdp 2 x tensor 2", "on devices 2:4 of every host"),
    ]


def test_hosts_that_share_a_sampler_hold_the_same_prompts():
    config = config_of("tiny", "mesh.rollout_tensor=4")
    two_by_two = Machine(4, 8, 2, "cpu")
    sizes = derive_sizes(config, MODEL, two_by_two)
    assert sizes.sampler_hosts == 2
    moves = {
        (e.source, e.field): e.move
        for t in make_plan(*settle(config), sizes).tasks
        for e in t.edges_in
    }
    assert moves["rollout", "finished"] == "share"
    assert moves["reward", "score"] == "pack"
