"""Prompts that are read in chunks by a sampler whose devices share the heads."""

import jax
import numpy as np
import pytest
from support.tiny_model import TINY, mesh_of

from distflow_jax.observe.compilations import Compilations
from distflow_jax.rollout.decode_state import EngineConfig, StateShapes
from distflow_jax.rollout.engine.engine import weight_layout
from distflow_jax.rollout.prefill.prefill_programs import PrefillPrograms
from distflow_jax.rollout.prefill.prefix_cache import reading_bytes

CONFIG = EngineConfig(slots=2, max_prompt=48, max_response=4, page_size=16, prefill_tokens=16)


@pytest.fixture(scope="module")
def sampler():
    """Programs and weights on two devices, where every program has run."""
    mesh = mesh_of(1, 2, names=("data", "tensor"))
    specs = weight_layout(TINY, CONFIG, mesh).specs(mesh, CONFIG.dtype)
    params = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), specs)
    programs = PrefillPrograms(StateShapes(TINY, CONFIG, mesh))
    for _ in programs.every_shape(params):
        pass
    return programs, params


def test_the_second_chunk_is_the_same_program(sampler):
    """Nothing compiles after every_shape, and devices share the keys."""
    programs, params = sampler
    counter = Compilations()
    prefix = programs.read(params, np.zeros(48, np.int32))
    programs.read(params, np.zeros(3, np.int32), prefix.replace(length=np.int32(40)))
    assert counter.take() == 0, counter.names()
    counter.close()
    heads = prefix.key.sharding.shard_shape(prefix.key.shape)[2]
    assert heads == TINY.num_kv_heads // 2 and prefix.value.sharding == prefix.key.sharding


def test_its_memory_is_that_of_the_program_that_runs(sampler):
    """Traced from shapes; each chunk is added in place."""
    programs, params = sampler
    counter = Compilations()
    memory = programs.trace_chunk(params).lower().compile().memory_analysis()
    assert counter.take() == 0, counter.names()
    counter.close()
    room = reading_bytes(TINY, CONFIG, 2) // 2
    assert memory.alias_size_in_bytes == room > 0
