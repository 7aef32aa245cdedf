"""Slots that fit into memory, and what their cache takes."""

import dataclasses

import jax
import pytest
from support.seeing import MODELS, sizes_of
from support.tiny_model import TINY, mesh_of

from distflow_jax.config.data_config import DataConfig
from distflow_jax.config.rollout_config import RolloutConfig
from distflow_jax.config.run_config import Config
from distflow_jax.config.stream_config import StreamConfig
from distflow_jax.config.training_config import TrainingConfig
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.sizes import derive_sizes
from distflow_jax.planning.sizes_table import describe_sizes
from distflow_jax.rollout.cache_sizing import (
    FEATURE_BATCHES,
    cache_bytes,
    feature_bytes,
    fitting_slots,
)
from distflow_jax.rollout.decode_state import (
    EngineConfig,
    StateShapes,
    num_pages,
    pages_of,
    waiting_pages,
)
from distflow_jax.rollout.prefill.image_programs import ImagePrograms

CONFIG = EngineConfig(slots=8, max_prompt=32, max_response=20, page_size=16, group_size=4)


@pytest.mark.parametrize(("axes", "dtype"), [((1, 1), "float32"), ((4, 2), "bfloat16")])
def test_bytes_are_those_of_the_arrays(axes, dtype):

    mesh = mesh_of(*axes, names=("data", "tensor"))
    config = dataclasses.replace(CONFIG, dtype=dtype)
    shapes = StateShapes(TINY, config, mesh)
    state = jax.jit(lambda: shapes.empty(0), out_shardings=shapes.shardings())()
    held = sum(x.addressable_shards[0].data.nbytes for x in (state.cache.key, state.cache.value))
    assert cache_bytes(TINY, config, ranks=axes[0], tensor=axes[1]) == held


@pytest.mark.parametrize("name", MODELS)
def test_features_that_stay_are_counted(name):
    model = MODELS[name]
    config = dataclasses.replace(CONFIG, images=sizes_of(model))
    shapes = StateShapes(model, config, mesh_of(1, 1, names=("data", "tensor")))
    batch = ImagePrograms(shapes, config.images)._blank(config.images.features)
    assert feature_bytes(model, config) == FEATURE_BATCHES * batch.nbytes > 0
    assert feature_bytes(TINY, CONFIG) == 0


@pytest.mark.parametrize("ranks", [1, 4])
def test_as_many_slots_as_fit(ranks):
    free = dataclasses.replace(CONFIG, slots=0)
    options = dict(ranks=ranks, tensor=1)

    def taken(slots):
        return cache_bytes(TINY, dataclasses.replace(CONFIG, slots=slots), **options)

    for wanted in (1, 3, 5):
        budget = taken(wanted * ranks)
        slots = fitting_slots(TINY, free, budget=budget, useful=1000, **options)
        assert slots % ranks == 0 and slots >= wanted * ranks
        assert taken(slots) <= budget
    assert fitting_slots(TINY, free, budget=2**40, useful=7, **options) == -(-7 // ranks) * ranks
    with pytest.raises(ValueError, match="cache_fraction leaves 0 MiB; raise it"):
        fitting_slots(TINY, free, budget=10, useful=7, **options)


def test_the_plan_says_what_it_took():
    model = DecoderConfig(max_position=2048)
    config = Config()
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, num_slots=0))
    machine = Machine(1, 1, 1, "gpu", memory=2**30)
    sizes = derive_sizes(config, model, machine)
    responses = config.data.prompts_per_step * config.rollout.num_samples
    assert 0 < sizes.engine.slots <= responses
    assert cache_bytes(model, sizes.engine, ranks=1, tensor=1) <= 0.3 * 2**30
    (row,) = [
        row for row in describe_sizes(sizes, config, model, machine) if row[0] == "decode slots"
    ]
    assert row[1] == sizes.engine.slots
    assert f"{num_pages(sizes.engine, 1)} pages of 64 tokens" in row[2]
    assert "as many as are useful and fit into 30% of 1.0 GiB" in row[2]
    with pytest.raises(ValueError, match="memory of this gpu is unknown; set a number"):
        derive_sizes(config, model, Machine(1, 1, 1, "gpu"))


TURNS = {
    "environment": "calculator",
    "num_slots": 8,
    "num_samples": 8,
    "max_response_length": 256,
}


def config_of(max_staleness=0, **rollout):
    """8 prompts a step."""
    return Config(
        rollout=RolloutConfig(**rollout),
        training=TrainingConfig(row_tokens=512),
        data=DataConfig(prompts_per_step=8),
        stream=StreamConfig(max_staleness=max_staleness),
    )


@pytest.mark.parametrize(
    ("changes", "staleness", "lanes", "slots"),
    [
        ({}, 0, 8, 32),  # four times the slots
        ({"max_trajectories": 12}, 0, 8, 12),
        ({"max_trajectories": 8}, 0, 0, 8),  # as without trajectories that wait
        ({"max_trajectories": 10**6}, 0, 8, 64),  # 8 prompts of 8 responses are all there are
        ({"max_trajectories": 10**6}, 2, 8, 192),
        ({"environment": ""}, 0, 0, 8),
    ],
    ids=str,
)
def test_trajectories_of_a_sampler(changes, staleness, lanes, slots):
    config = config_of(**TURNS | changes, max_staleness=staleness)
    engine = derive_sizes(config, DecoderConfig(max_position=2048), Machine(1, 1, 1, "cpu")).engine
    assert (engine.lanes, engine.slots, engine.decode_slots) == (lanes, slots, 8)
    response = pages_of(engine.max_response, engine.page_size)
    assert waiting_pages(engine, 1) == (slots - 8) * (response // 2)
    assert num_pages(engine, 1) >= 8 * response + waiting_pages(engine, 1)


def test_trajectories_that_wait_are_planned():
    """Their pages are in the plan's cache and its table, and in a cache that is to fit."""
    model = DecoderConfig(max_position=2048)
    config = config_of(**TURNS)
    machine = Machine(1, 1, 1, "gpu", memory=2**30)
    sizes = derive_sizes(config, model, machine)
    rows = {row[0]: row[1:] for row in describe_sizes(sizes, config, model, machine)}
    assert rows["decode slots"][0] == 8 and rows["trajectories"][0] == 32
    assert (
        f"; {waiting_pages(sizes.engine, 1)} pages on each device are reserved for"
        in (rows["trajectories"][1])
    )
    fitting = config_of(**TURNS | {"num_slots": 0, "num_samples": 256})
    engine = derive_sizes(fitting, model, machine).engine
    assert 0 < engine.lanes < engine.slots <= 4 * engine.lanes
    assert cache_bytes(model, engine, ranks=1, tensor=1) <= 0.3 * 2**30


def test_each_slot_decodes_a_trajectory():
    with pytest.raises(ValueError, match="max_trajectories=7 is below rollout.num_slots=8"):
        RolloutConfig(**TURNS | {"max_trajectories": 7})
