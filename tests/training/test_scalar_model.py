"""A decoder with a scalar head: packed rows give what plain sequences give.

The yardstick is one sequence per row, with the critic's loss written out. Values are read before
the token they judge, scores after the last one.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec
from support.gradients import distance
from support.tiny_model import (
    TINY,
    mesh_of,
    padded,
    random_params,
    random_samples,
    sequences_of,
    spread,
)

from distflow_jax.batch import (
    Placement,
    RowShape,
    from_sequence_field,
    from_token_field,
    to_rows,
    token_field,
)
from distflow_jax.config.algorithm_config import ValueConfig
from distflow_jax.config.training_config import OptimizerConfig
from distflow_jax.models.attention import masked_attention
from distflow_jax.models.decoder_config import reward_head_stddev, scalar_model
from distflow_jax.models.parameters import (
    abstract_params,
    completed,
    init_params,
    param_shardings,
    with_scalar_head,
)
from distflow_jax.models.transformer import bind
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.stages.predictions import make_scores, make_values
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.objectives.value_objective import ValueBatch, value_objective
from distflow_jax.training.optimizer import learning_rate, make_optimizer
from distflow_jax.training.state import init_state
from distflow_jax.training.update import UpdateShape, accumulate_gradients, make_update


@pytest.fixture(scope="module", autouse=True)
def compile_quickly():
    """These programs run once or twice: compiling them well would take most of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


FORWARD = ForwardConfig(logp_chunk=16, remat="none")
SAMPLES = random_samples(0, groups=6, size=2, prompt=(3, 8), response=(3, 9))
SCALAR = scalar_model(TINY, head_stddev=reward_head_stddev(TINY))
PARAMS = random_params(TINY)
HEAD = np.random.default_rng(1).normal(0, 0.2, TINY.hidden_size).astype(np.float32)
SCALAR_PARAMS = {"trunk": PARAMS, "head": HEAD}
TEMPERATURE = np.float32(1)
COUNT = len(SAMPLES)


def packing(*, shared, seed):
    """Pairs in random rows; two rows stay empty. K = 1, R = 8, L = 64, S = 6."""
    rng = np.random.default_rng(seed)
    at = [[] for _ in range(8)]
    for place, pair in enumerate(rng.permutation(COUNT // 2)):
        at[place % 6 if seed else place // 2].extend([2 * int(pair), 2 * int(pair) + 1])
    placement = Placement(RowShape(1, 8, 64, 6), (tuple(map(tuple, at)),), shared)
    table = sequences_of(SAMPLES)
    return to_rows(table, placement), placement, table


def hidden_alone(params, decoder):
    tokens, _, _ = padded(SAMPLES)
    count, length = tokens.shape
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (count, length))
    causal = jnp.tril(jnp.ones((1, length, length), bool))
    network = bind(decoder, params)
    hidden, _ = network.hidden(
        tokens, position, lambda q, k, v, _: (masked_attention(q, k, v, causal), None)
    )
    return hidden, network.head_weight()


def shifted(x):
    """Values of the previous token: [N, T, ...] shifted by one."""
    return jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


def values_alone(params):
    hidden, _ = hidden_alone(params["trunk"], TINY)
    return jnp.where(spread(SAMPLES, SAMPLES.response_mask), shifted(hidden @ params["head"]), 0.0)


def scores_alone(params):
    hidden, _ = hidden_alone(params["trunk"], TINY)
    last = np.array(padded(SAMPLES)[2]) - 1
    return (hidden @ params["head"])[np.arange(COUNT), last]


RNG = np.random.default_rng(2)
OLD_VALUE = [RNG.normal(0, 1, len(r)).astype(np.float32) for r in SAMPLES.response]
RETURNS = [RNG.normal(0, 1, len(r)).astype(np.float32) for r in SAMPLES.response]


def value_loss_alone(params):
    v = values_alone(params)
    values = (SAMPLES.response_mask, OLD_VALUE, RETURNS)
    mask, old, target = (spread(SAMPLES, x) for x in values)
    near = jnp.clip(v, old - 0.2, old + 0.2)
    loss = jnp.where(mask, 0.5 * jnp.maximum((v - target) ** 2, (near - target) ** 2), 0.0)
    return loss.sum() / np.float32(mask.sum())


OBJECTIVE = value_objective(SCALAR, ValueConfig(clip=0.2), FORWARD, max_response=9)


def batch_of(rows, placement, table):
    def field(values):
        return token_field(table, placement, values)

    return ValueBatch(rows, field(RETURNS), field(OLD_VALUE))


@functools.partial(jax.jit, static_argnames=("mesh", "micro"))
def gradient(params, batch, *, mesh, micro):
    with use_mesh(mesh):
        shape = UpdateShape(mesh, micro, 9)
        return accumulate_gradients(params, batch, TEMPERATURE, shape=shape, objective=OBJECTIVE)


def test_gradient_matches_the_definition():
    """The head's and the trunk's: packed, prompts shared, rows and heads divided, in parts."""
    loss, slope = jax.jit(jax.value_and_grad(value_loss_alone))(SCALAR_PARAMS)
    batch = batch_of(*packing(shared=True, seed=2))
    batch = jax.tree.map(lambda x: jnp.asarray(x[0]), batch)
    grads, metrics = gradient(SCALAR_PARAMS, batch, mesh=mesh_of(2, 4), micro=2)
    np.testing.assert_allclose(metrics["critic/loss"], loss, rtol=1e-5)
    assert distance(grads, slope) < 1e-5
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves((grads, metrics)))


def test_values_and_scores_are_those_of_sequences_alone():
    shape = UpdateShape(mesh_of(2, 1), 2, 9)
    rows, placement, table = packing(shared=True, seed=4)
    values = make_values(shape=shape, model=SCALAR, forward=FORWARD)(SCALAR_PARAMS, rows)
    scores = make_scores(shape=shape, model=SCALAR, forward=FORWARD)(SCALAR_PARAMS, rows)
    assert values.dtype == scores.dtype == jnp.float32
    expected = np.asarray(jax.jit(values_alone)(SCALAR_PARAMS))
    found = from_token_field(table, placement, np.asarray(values))
    _, starts, ends = padded(SAMPLES)
    for i in range(COUNT):
        np.testing.assert_allclose(found[i], expected[i, starts[i] : ends[i]], atol=1e-4)
    assert (np.asarray(values)[~rows.response_mask] == 0).all()
    of_sequence = from_sequence_field(placement, np.asarray(scores))
    expected = np.asarray(jax.jit(scores_alone)(SCALAR_PARAMS))
    np.testing.assert_allclose([of_sequence[i] for i in range(COUNT)], expected, atol=1e-4)
    assert (np.asarray(scores)[~rows.valid] == 0).all()


def test_a_critic_learns_its_returns():
    """By the policy's own update: the state has a head, and nothing compiles again."""
    mesh = mesh_of(2, 1)
    critic = scalar_model(TINY)
    config = OptimizerConfig(lr=2e-2)
    optimizer = make_optimizer(config, 8)
    params = jax.device_put(PARAMS, param_shardings(TINY, mesh))
    params = completed(with_scalar_head(params), critic, 0, mesh)
    state = init_state(params, critic, optimizer, mesh)
    objective = value_objective(critic, ValueConfig(clip=100.0), FORWARD, max_response=9)
    shape = UpdateShape(mesh, 4, 9)
    update = make_update(optimizer, learning_rate(config, 8), shape=shape, objective=objective)
    batch = batch_of(*packing(shared=True, seed=0))
    layout = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    batch = jax.device_put(batch, layout)
    losses = []
    for _ in range(6):
        state, metrics = update(state, batch, np.int32(0), TEMPERATURE)
        losses.append(float(metrics["critic/vf_loss"]))
        assert metrics["training/nonfinite"] == 0 and metrics["critic/grad_norm"] > 0
    assert update._cache_size() == 1
    # a head of 0 predicts 0: the first loss is half the mean square of the returns
    chosen = np.concatenate([r[m] for r, m in zip(RETURNS, SAMPLES.response_mask, strict=True)])
    np.testing.assert_allclose(losses[0], np.mean(chosen**2) / 2, rtol=1e-5)
    assert losses[-1] < 0.7 * losses[0]


def test_scalar_model_has_a_trunk_and_a_head():
    decoder = dataclasses.replace(TINY, tie_embeddings=False)  # its own head is left out
    model = scalar_model(decoder, head_stddev=reward_head_stddev(decoder))
    shapes = {k: x.shape for k, x in flatten_dict(abstract_params(model), sep="/").items()}
    assert shapes.pop("head") == (TINY.hidden_size,)
    trunk = {k.removeprefix("trunk/") for k in shapes}
    assert trunk == flatten_dict(abstract_params(decoder), sep="/").keys() - {"head"}
    mesh = mesh_of(2, 2)
    params = init_params(model, 0, param_shardings(model, mesh))
    head = np.asarray(params["head"])
    np.testing.assert_allclose(head.std(), reward_head_stddev(decoder), rtol=0.3)
    whole = init_params(decoder, 0, param_shardings(decoder, mesh))
    same = completed(with_scalar_head(whole), model, 0, mesh)
    assert jax.tree.structure(same) == jax.tree.structure(params)
    np.testing.assert_array_equal(same["head"], head)
