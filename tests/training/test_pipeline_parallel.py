"""Stages that each have a part of the layers give what one device gives, whatever else divides.

More combinations of axes: test_axes.py; other objectives: test_mesh_of_objectives.py.

Nightly: pipeline stages give one device's loss, gradient and predictions, in bfloat16 too.
"""

import dataclasses

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from support.gradients import MODELS, TEMPERATURE, assert_same, batch, gradient, params_of
from support.tiny_model import WINDOWED, mesh_of

from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.config.training_config import OptimizerConfig
from distflow_jax.config.upkeep_config import CheckpointConfig
from distflow_jax.models.decoder_config import scalar_model
from distflow_jax.models.parameters import param_shardings
from distflow_jax.parallel.mesh import MeshSizes, replica_mesh, role_mesh, sampler_mesh
from distflow_jax.resharding.weight_sync import WeightSync
from distflow_jax.stages.predictions import make_logp, make_values
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.optimizer import make_optimizer
from distflow_jax.training.state import abstract_state, init_state
from distflow_jax.training.update import UpdateShape

DENSE, WINDOWS = MODELS["dense"], dataclasses.replace(WINDOWED, num_layers=4)
OPTIMIZER = make_optimizer(OptimizerConfig(), 1)
MESHES = {
    "pipeline 2": dict(fsdp=1, tensor=1, pipeline=2),
    "pipeline 4": dict(fsdp=1, tensor=1, pipeline=4),
    "fsdp 2 x pipeline 2": dict(fsdp=2, tensor=1, pipeline=2),
    "pipeline 2 x context 2": dict(fsdp=1, tensor=1, pipeline=2, context=2),
    "data 2 x fsdp 2 x pipeline 2": dict(fsdp=2, tensor=1, data=2, pipeline=2),
    "fsdp 2 x pipeline 2 x tensor 2": dict(fsdp=2, tensor=2, pipeline=2),
    "fsdp 2 x pipeline 2 x context 2": dict(fsdp=2, tensor=1, pipeline=2, context=2),
}


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "model, mesh, options",
    [
        slow("dense", "fsdp 2 x pipeline 2", dict(micro=4, microbatches=4, block=32, remat="full")),
        slow("dense", "pipeline 2 x context 2", dict(micro=8, microbatches=4, block=16)),
        slow("dense", "pipeline 2", dict(micro=8, microbatches=8)),
        slow("dense", "pipeline 2", dict(micro=4, shared=False, remat="dots")),
        slow("dense", "pipeline 4", dict(micro=8, microbatches=4, block=32)),
        slow("dense", "data 2 x fsdp 2 x pipeline 2", dict(micro=2, remat="attention")),
        slow("mixture", "pipeline 2", dict(micro=4, remat="full")),
        slow("mixture", "fsdp 2 x pipeline 2 x tensor 2", dict(micro=2)),
        slow("adapters", "pipeline 2", dict(micro=2, remat="full")),
        slow("adapters", "fsdp 2 x pipeline 2 x tensor 2", dict(micro=4, block=32)),
        slow("adapters", "fsdp 2 x pipeline 2 x context 2", dict(micro=2)),
        ("dense", "fsdp 2 x pipeline 2", dict(micro=4, block=32, remat="dots", repeats=2)),
        slow("mixture", "pipeline 2", dict(micro=4, microbatches=4, remat="full", repeats=2)),
        slow("dense", "fsdp 2 x pipeline 2 x tensor 2", dict(micro=2, remat="full", repeats=2)),
        slow("dense", "pipeline 2 x context 2", dict(micro=8, repeats=2)),
        slow("windows", "pipeline 2", dict(micro=4, block=32, remat="attention", repeats=2)),
        slow("mixture", "fsdp 2 x pipeline 2 x tensor 2", dict(micro=2, remat="dots", repeats=2)),
        slow("adapters", "fsdp 2 x pipeline 2 x context 2", dict(micro=2, remat="full", repeats=2)),
    ],
)
def test_loss_and_gradient_are_those_of_one_device(model, mesh, options):
    network = WINDOWS if model == "windows" else MODELS[model]
    one = gradient(network, fsdp=1, tensor=1, shared=options.get("shared", True))
    assert_same(gradient(network, **options, **MESHES[mesh]), one)


@pytest.mark.slow
@pytest.mark.parametrize("model, options", [("mixture", {}), ("dense", dict(block=32))])
def test_bfloat16_goes_through_the_stages(model, options):
    """Rounded as much as on one device: XLA:CPU once had no program for it.

    Two devices: eight on two cores can block XLA's threads (docs/lab/xla_cpu.md).
    """

    def of(**axes):
        grads, _ = gradient(MODELS[model], micro=4, dtype="bfloat16", **options, **axes)
        leaves = jax.tree.leaves(grads)
        return np.concatenate([np.ravel(x).astype(np.float64) for x in leaves])

    exact, _ = gradient(MODELS[model], fsdp=1, tensor=1)
    exact = np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(exact)])
    one, stages = of(fsdp=1, tensor=1), of(fsdp=1, tensor=1, pipeline=2)
    assert np.linalg.norm(stages - exact) < 1.5 * np.linalg.norm(one - exact)


@pytest.mark.parametrize(
    "what, mesh",
    [
        ("logp", "pipeline 2"),
        slow("logp", "fsdp 2 x pipeline 2 x tensor 2"),
        slow("values", "fsdp 2 x pipeline 2 x context 2"),
    ],
)
def test_predictions_go_through_the_stages(what, mesh):
    """[K, R, L] of several mini-batches, each with empty rows."""
    rows = jax.tree.map(lambda x: np.stack([x, x[::-1]]), batch().rows)
    forward = ForwardConfig(logp_chunk=16)

    def run(mesh):
        shape, critic = UpdateShape(mesh, 2, 40), scalar_model(DENSE, head_stddev=0.1)
        network = DENSE if what == "logp" else critic
        params = jax.device_put(params_of(network), param_shardings(network, mesh))
        if what == "logp":
            logp = make_logp(shape=shape, model=network, forward=forward)
            return np.asarray(logp(params, rows, TEMPERATURE))
        return np.asarray(make_values(shape=shape, model=network, forward=forward)(params, rows))

    got, want = run(mesh_of(**MESHES[mesh])), run(mesh_of(1, 1))
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_each_stage_holds_its_layers_and_a_share_of_the_embedding():
    mesh = mesh_of(2, 1, pipeline=2)
    state = abstract_state(DENSE, OPTIMIZER, mesh)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    params = flatten_dict(state.params, sep="/")
    assert len(moments) == 2 * len(params)
    for x in [*params.values(), *moments]:
        held = np.prod(x.sharding.shard_shape(x.shape)) / np.prod(x.shape)
        # norms are whole on the data ranks, and the last one everywhere
        assert held == {1: 1, 2: 1 / 2 if x.shape[0] == 4 else 1 / 4}.get(x.ndim, 1 / 4), x


@pytest.mark.parametrize(
    "there, back",
    [
        (dict(fsdp=1, tensor=2, pipeline=4), dict(fsdp=4, tensor=2)),
        (dict(fsdp=1, tensor=1), dict(fsdp=2, tensor=1, pipeline=2)),
    ],
)
def test_a_checkpoint_fits_any_number_of_stages(tmp_path, there, back):
    there, back = mesh_of(**there), mesh_of(**back)
    params = jax.device_put(params_of(DENSE), param_shardings(DENSE, there))
    state = init_state(params, DENSE, OPTIMIZER, there)
    checkpointer = Checkpointer(tmp_path / "checkpoints", CheckpointConfig())
    checkpointer.save(1, state, {})
    checkpointer.wait()
    wanted = abstract_state(DENSE, OPTIMIZER, back)
    _, restored, _ = checkpointer.restore(None, wanted)
    checkpointer.close()
    for got, want, like in zip(*map(jax.tree.leaves, (restored, state, wanted)), strict=True):
        assert got.sharding == like.sharding
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize(
    "sizes", [MeshSizes(2, 1, pipeline=4), MeshSizes(1, 2, (0, 4), pipeline=2)], ids=str
)
def test_the_sampler_gets_the_layers_of_all_stages(sizes):
    """Of all devices, and of a part of every host's."""
    whole = params_of(DENSE)
    params = jax.device_put(whole, param_shardings(DENSE, role_mesh(sizes)))
    sync = WeightSync(param_shardings(DENSE, replica_mesh(2)), sampler_mesh(2), "float32")
    for got, want in zip(*map(jax.tree.leaves, (sync(params), whole)), strict=True):
        assert len(got.addressable_shards) == 8
        np.testing.assert_array_equal(np.asarray(got), want)
