"""A checkpoint fits any layout: what was saved on one mesh comes back on another, bit for bit."""

import math

import jax
import numpy as np
import pytest
from support.gradients import DENSE, MODELS

from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.config.training_config import MOMENTS, LoraConfig, OptimizerConfig
from distflow_jax.config.upkeep_config import CheckpointConfig
from distflow_jax.models.decoder_config import adapted, scalar_model
from distflow_jax.parallel.mesh import MeshSizes, role_mesh
from distflow_jax.training.optimizer import make_optimizer
from distflow_jax.training.state import abstract_state

NETWORKS = {
    **MODELS,
    "adapters of a mixture": adapted(MODELS["mixture"], LoraConfig(4, targets=("query", "output"))),
    "critic": scalar_model(DENSE),
}
AXES = ("data", "fsdp", "expert", "pipeline", "context", "tensor")
MOST = {"pipeline": 4, "tensor": 4}  # layers, heads


def layouts(name, moments) -> list[MeshSizes]:
    """Where it is saved, and where it is restored."""
    rng = np.random.default_rng([len(name), len(moments)])
    return [draw_layout(rng, mixture="mixture" in name) for _ in range(4)]


def draw_layout(rng, *, mixture) -> MeshSizes:
    """Of 1, 2, 4 or 8 of the devices, any of them; each factor of 2 goes to any axis."""
    factors = int(rng.integers(4))
    first = int(rng.integers(8 // 2**factors)) * 2**factors
    sizes = dict.fromkeys(AXES, 1)
    fits = [axis for axis in AXES if axis != "expert" or mixture]
    for axis in map(str, rng.choice(fits, factors)):
        sizes["data" if sizes[axis] == MOST.get(axis) else axis] *= 2
    assert math.prod(sizes.values()) == 2**factors
    return MeshSizes(**sizes, submesh=(first, first + 2**factors))


def random_state(abstract):
    """Any bits in every array, where it is to lie."""
    rng = np.random.default_rng(0)

    def draw(x):
        values = rng.integers(0, 256, (*x.shape, np.dtype(x.dtype).itemsize), np.uint8)
        return jax.device_put(values.view(x.dtype)[..., 0], x.sharding)

    return jax.tree.map(draw, abstract)


def bits(x):
    x = np.asarray(x)
    return x.reshape(*x.shape, 1).view(np.uint8)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("name", NETWORKS)
def test_any_two_layouts(tmp_path, name, moments):
    network, optimizer = NETWORKS[name], make_optimizer(OptimizerConfig(moments=moments), 1)
    there, *others = layouts(name, moments)
    state = random_state(abstract_state(network, optimizer, role_mesh(there)))
    checkpointer = Checkpointer(tmp_path, CheckpointConfig())
    checkpointer.save(1, state, {})
    checkpointer.wait()
    for back in others:
        wanted = abstract_state(network, optimizer, role_mesh(back))
        _, found, _ = checkpointer.restore(1, wanted)
        for got, want, like in zip(*map(jax.tree.leaves, (found, state, wanted)), strict=True):
            assert got.sharding == like.sharding and got.dtype == like.dtype, (there, back)
            np.testing.assert_array_equal(bits(got), bits(want), str((there, back)))
    checkpointer.close()


def test_every_axis_is_drawn():
    drawn = [layouts(name, moments) for name in NETWORKS for moments in MOMENTS]
    for axis in AXES:
        assert sum(getattr(of[0], axis) > 1 for of in drawn) >= 1
        assert sum(getattr(back, axis) > 1 for of in drawn for back in of[1:]) >= 4
