"""Moments in fewer bytes: rounding that is right on average, and AdamW that learns all the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.tiny_model import TINY, mesh_of, mini_batch, random_params, random_samples, rows_of

from distflow_jax.batch import RowShape
from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.config.training_config import MOMENTS, OptimizerConfig
from distflow_jax.config.upkeep_config import CheckpointConfig
from distflow_jax.models.parameters import param_shardings
from distflow_jax.training import compressed_moments
from distflow_jax.training.compressed_moments import Blocks, block_of, is_blocks, kept_as
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.objectives.sft_objective import SftBatch, sft_objective
from distflow_jax.training.optimizer import make_optimizer
from distflow_jax.training.state import TrainState, abstract_state, init_state, state_shardings

FEWER = ("bfloat16", "int8")
UPDATES = 20


def log_uniform(shape, decades, seed=0):
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1, 1], shape)
    return (signs * 10.0 ** rng.uniform(-decades, 0, shape)).astype(np.float32)


def rounded(x, kind, times):
    """float32 [times, *x.shape] of what comes back for x, each time with other noise."""
    x = jnp.asarray(x)
    dtype = {"mu": jnp.int8, "nu": jnp.uint8, "bfloat16": jnp.bfloat16}[kind]
    bits = compressed_moments._noise((times, *x.shape), jnp.int32(3), 0) & np.uint32(0xFFFF)
    if kind == "bfloat16":
        back = jax.vmap(
            lambda n: compressed_moments._round_to_bfloat16(x, x, n).astype(jnp.float32)
        )
    else:
        like = compressed_moments._no_codes(x.shape, dtype)
        back = jax.vmap(
            lambda n: compressed_moments._widened(compressed_moments._round_to_codes(x, like, n))
        )
    return np.asarray(jax.jit(back)(bits), np.float64)


def steps(x, kind):
    """Distance of the two numbers between which each of x [64, 64] lies, float64."""
    x = np.abs(x).astype(np.float64)
    if kind == "bfloat16":
        return 2.0 ** (np.floor(np.log2(x)) - 7)
    assert block_of(x.shape) == (1, 64)
    levels, top = {"mu": 127, "nu": 255}[kind], x.max(1, keepdims=True)
    code = np.minimum(np.floor(levels * (x / top) ** 0.25), levels - 1)
    return top * ((code + 1) ** 4 - code**4) / levels**4


@pytest.mark.parametrize("kind", ["bfloat16", "mu", "nu"])
def test_rounding_is_right_on_average(kind):
    """Each result is one of two neighbours, and the mean of N has an error below 5 sigma."""
    x, times = log_uniform((64, 64), 3), 512
    x = np.abs(x) if kind == "nu" else x
    found, step = rounded(x, kind, times), steps(x, kind)
    low, high = found.min(0), found.max(0)
    assert ((found == low) | (found == high)).all()
    assert (np.abs(found - x) <= step * (1 + 1e-4)).all()
    assert (found * x >= 0).all()
    # a coin's deviation is at most half a step; noise has 16 bits, numbers have 24
    bound = (5 * 0.5 / np.sqrt(times) + 2.0**-16) * step + 1e-6 * np.abs(x)
    error = np.abs(found.mean(0) - x)
    assert (error <= bound).all(), (error / bound).max()
    if kind != "bfloat16":
        largest = np.abs(x) == np.abs(x).max(1, keepdims=True)
        assert (found[:, largest] == x[largest]).all()


def test_a_positive_second_moment_never_becomes_zero():
    """Or a step would be m / eps: what is too small for a code takes the smallest."""
    x = np.full((64, 64), 1e-20, np.float32)
    x[:, 0], x[:, 1] = 1, 0
    found = rounded(x, "nu", 16)
    np.testing.assert_allclose(found[..., 2:], 255.0**-4, rtol=1e-5)
    assert (found[..., 1] == 0).all() and (found[..., 0] == 1).all()
    assert (rounded(np.zeros((64, 64), np.float32), "nu", 2) == 0).all()


@pytest.mark.parametrize("moments", FEWER)
def test_an_average_that_moves_slowly_is_not_frozen(moments):
    """b2 = 0.999 and gradients that have become small: in 1,000 steps nu shrinks to 1/e."""
    first = np.abs(log_uniform((64, 64), 1))

    def averages(moments):
        adam = kept_as(moments, optax.scale_by_adam(b1=0.9, b2=0.999))

        @jax.jit
        def many():
            _, state = adam.update(first, adam.init(first))
            small = 0.001 * first
            state = jax.lax.fori_loop(0, 1000, lambda _, s: adam.update(small, s)[1], state)
            return compressed_moments._widened(state.nu)

        with jax.numpy_dtype_promotion("standard"):
            return np.asarray(many(), np.float64)

    wanted, found = averages("float32"), averages(moments)
    np.testing.assert_allclose(wanted, 0.001 * np.exp(-1) * np.square(first), rtol=0.01)
    np.testing.assert_allclose(np.mean(found / wanted), 1, atol=0.02)
    # rounded to the nearest it stays where it is, of 64 numbers each one
    start = jnp.asarray(0.001 * np.square(first[0]), jnp.bfloat16)
    nearest = (np.float32(0.999) * start.astype(jnp.float32)).astype(jnp.bfloat16)
    assert (nearest == start).all()


@pytest.mark.parametrize("moments", FEWER)
def test_a_quadratic_is_minimised_as_with_float32(moments):
    """sum h_i (x_i - 1)^2 / 2 with curvatures over four decades, gradients with noise."""
    curvature = np.abs(log_uniform((64, 64), 4))
    config = OptimizerConfig(lr=0.02, schedule="cosine", clip_norm=0.0, b2=0.99, moments="float32")
    updates_in_all = 300

    def losses(moments):
        optimizer = make_optimizer(dataclasses.replace(config, moments=moments), updates_in_all)

        def body(carry, step):
            x, state = carry
            noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), step), x["w"].shape)
            grads = {"w": curvature * (x["w"] - 1) + 0.01 * curvature * noise}
            updates, state = optimizer.update(grads, state, x)
            return (optax.apply_updates(x, updates), state), None

        @jax.jit
        def run():
            x = {"w": jnp.zeros((64, 64), jnp.float32)}
            (x, _), _ = jax.lax.scan(body, (x, optimizer.init(x)), jnp.arange(updates_in_all))
            return curvature * jnp.square(x["w"] - 1) / 2

        with jax.numpy_dtype_promotion("standard"):
            return np.asarray(run(), np.float64)

    whole, fewer = losses("float32"), losses(moments)
    start = curvature.sum() / 2
    assert whole.sum() < 1e-3 * start
    assert fewer.sum() < 1.1 * whole.sum() + 1e-4 * start


def blocks_in(tree):
    return [x for x in jax.tree.leaves(tree, is_leaf=is_blocks) if is_blocks(x)]


def test_blocks_of_parameters():
    # tables by their short side, others by their last dim; as many powers of two as there are
    assert block_of((49152, 576)) == (1, 72) and block_of((896, 151936)) == (0, 112)
    assert block_of((30, 576, 1536)) == (2, 96) and block_of((30, 576, 9, 64)) == (3, 64)
    assert block_of((32, 4096, 11008)) == (2, 86) and block_of((2, 64, 4, 16)) == (3, 16)
    assert block_of((4, 263)) == (0, 4)  # a prime above the largest block, and its short side


@pytest.mark.parametrize("fsdp, tensor", [(1, 1), (4, 2)])
def test_moments_lie_as_their_parameters_in_fewer_bytes(fsdp, tensor):
    mesh, size = mesh_of(fsdp, tensor), {}
    model = dataclasses.replace(TINY, attention_bias=True)
    for moments in MOMENTS:
        optimizer = make_optimizer(OptimizerConfig(moments=moments), 1)
        state = abstract_state(model, optimizer, mesh)
        leaves = jax.tree.leaves(state.opt_state)
        size[moments] = sum(
            x.dtype.itemsize * int(np.prod(x.sharding.shard_shape(x.shape))) for x in leaves
        )
        layouts = param_shardings(model, mesh)
        for moment in blocks_in(state_shardings(model, optimizer, mesh).opt_state):
            assert moment.codes in jax.tree.leaves(layouts)
    assert size["bfloat16"] < 0.51 * size["float32"]
    # heads of 16 numbers are blocks of 16 here, with a scale of four bytes each
    assert size["int8"] < 0.36 * size["float32"]


def test_small_arrays_stay_float32():
    optimizer = make_optimizer(OptimizerConfig(moments="int8"), 1)
    model = dataclasses.replace(TINY, attention_bias=True, qk_norm=True)
    state = jax.eval_shape(optimizer.init, random_params(model))
    for moment in (state[1][0].mu, state[1][0].nu):
        kept = {name: x for name, x in moment["layers"].items() if not is_blocks(x)}
        assert all(name.endswith(("norm", "bias")) for name in kept) and len(kept) == 7
        assert {x.dtype for x in kept.values()} == {jnp.dtype("float32")}
        assert is_blocks(moment["embed"]["embedding"])


@pytest.fixture(scope="module")
def gradient():
    """(params) -> (loss, gradient): negative log-likelihood of some responses."""
    rows, _ = rows_of(random_samples(0, groups=4, size=4), RowShape(1, 8, 64, 4), shared=True)
    objective = sft_objective(TINY, ForwardConfig(logp_chunk=16))
    batch, tokens = objective.whole(SftBatch(mini_batch(rows)))

    def loss(params):
        return objective.evaluate(params, batch, tokens, np.float32(1))[0]

    return jax.jit(jax.value_and_grad(loss))


def stepper(moments):
    optimizer = make_optimizer(OptimizerConfig(lr=1e-3, moments=moments), UPDATES)

    @jax.jit
    def step(state, grads):
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.count + 1)

    mesh = mesh_of(1, 1)
    params = jax.device_put(random_params(TINY), param_shardings(TINY, mesh))
    return optimizer, step, init_state(params, TINY, optimizer, mesh)


@pytest.fixture(scope="module")
def steppers():
    return {moments: stepper(moments) for moments in MOMENTS}


def run(gradient, step, state, steps):
    losses = []
    for _ in range(steps):
        loss, grads = gradient(state.params)
        state = step(state, grads)
        losses.append(float(loss))
    return state, np.array(losses)


def test_the_tiny_model_learns_as_with_float32(gradient, steppers):
    """The same loss curve within noise."""
    curves = {}
    for moments, (_, step, state) in steppers.items():
        curves[moments] = run(gradient, step, state, UPDATES)[1]
    fallen = curves["float32"][0] - curves["float32"][-1]
    assert fallen > 1
    for moments in FEWER:
        assert np.abs(curves[moments] - curves["float32"]).max() < 0.02 * fallen


@pytest.mark.parametrize("moments", FEWER)
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(gradient, steppers, moments, tmp_path):
    optimizer, step, state = steppers[moments]
    straight, _ = run(gradient, step, state, 4)
    half, _ = run(gradient, step, state, 2)
    saved = Checkpointer(tmp_path, CheckpointConfig())
    saved.save(2, {"actor": half}, {})
    saved.wait()
    abstract = abstract_state(TINY, optimizer, mesh_of(1, 1))
    _, restored, _ = saved.restore(2, {"actor": abstract})
    saved.close()
    resumed, _ = run(gradient, step, restored["actor"], 2)
    for a, b in zip(jax.tree.leaves(straight), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_codes_are_the_same_on_every_mesh():
    """On 8 devices as on one, but for neighbouring codes where the norm differs in its last bit."""
    mesh = mesh_of(4, 2)
    optimizer = make_optimizer(OptimizerConfig(moments="int8"), 1)

    def few(params):  # a table, a matrix whose blocks are divided, one whose blocks are not
        return {k: params["layers"][k] for k in ("gate", "down")} | params["embed"]

    params, grads = (few(random_params(TINY, seed)) for seed in range(2))

    def step(grads, state, params):
        return optimizer.update(grads, state, params)[1]

    alone = jax.jit(step)(grads, optimizer.init(params), params)
    layout = few(param_shardings(TINY, mesh))
    whole = NamedSharding(mesh, PartitionSpec())
    of_state = optax.tree_map_params(
        optimizer,
        compressed_moments.layout_of,
        jax.eval_shape(optimizer.init, params),
        layout,
        is_leaf=is_blocks,
        transform_non_params=lambda _: whole,
    )
    placed = [jax.device_put(tree, layout) for tree in (grads, params)]
    state = jax.jit(optimizer.init, out_shardings=of_state)(placed[1])
    spread = jax.jit(step, out_shardings=of_state)(placed[0], state, placed[1])
    for a, b in zip(blocks_in(alone), blocks_in(spread), strict=True):
        codes = [np.asarray(x.codes, np.int32) for x in (a, b)]
        assert np.abs(codes[0] - codes[1]).max() <= 1
        assert (codes[0] != codes[1]).mean() < 1e-3
        np.testing.assert_allclose(a.scale, b.scale, rtol=1e-5)
        assert isinstance(b, Blocks) and b.codes.sharding.mesh == mesh


def test_unknown_moments_are_named():
    with pytest.raises(ValueError, match="one of float32, bfloat16, int8, got 'float16'"):
        OptimizerConfig(moments="float16")
