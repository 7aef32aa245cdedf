"""Training a mixture on packed rows: log-probs, balance loss and gradients are those of plain
sequences, wherever these lie.

N sequences, T tokens of the longest one. The yardstick has one sequence per row, the losses written
out. Tolerances as in test_forward.py.

Nightly: mixtures on packed rows: log-probs, balance loss and gradients equal those of separate
sequences.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from support.gradients import distance, likelihood_gradient
from support.tiny_model import (
    MIXTURE,
    TINY,
    mesh_of,
    mini_batch,
    padded,
    random_params,
    random_samples,
    rows_of,
    spread,
)

from distflow_jax.batch import RowShape
from distflow_jax.config.training_config import LoraConfig
from distflow_jax.models.attention import masked_attention
from distflow_jax.models.decoder_config import adapted, scalar_model
from distflow_jax.models.moe import best
from distflow_jax.models.parameters import param_shardings
from distflow_jax.models.transformer import head_logits, hidden_states
from distflow_jax.training.expert_balance import balanced
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.objectives.sft_objective import SftBatch, sft_objective
from distflow_jax.training.objectives.value_objective import (
    ValueBatch,
    ValueConfig,
    value_objective,
)
from distflow_jax.training.update import UpdateShape, accumulate_gradients

COEF = 0.7
PARAMS = random_params(MIXTURE)
# two groups of responses to one prompt, and masked tokens, which are tokens all the same
SAMPLES = random_samples(0, groups=3, size=3)
FORWARD = ForwardConfig(logp_chunk=16, remat="none")


@functools.cache
def plain():
    """(losses, gradient) of sequences one by one: {nll, balance [layers], load [layers, E]}."""
    tokens, _, ends = padded(SAMPLES)
    longest = tokens.shape[1]
    real = np.arange(longest) < np.array(ends)[:, None]
    learned = spread(SAMPLES, SAMPLES.response_mask)
    position = jnp.broadcast_to(jnp.arange(longest, dtype=jnp.int32), tokens.shape)
    causal = jnp.tril(jnp.ones((1, longest, longest), bool))

    def losses(params):
        def route(probability, _):
            expert = best(probability, MIXTURE.experts_per_token)
            return expert, (probability, expert)

        hidden, (_, (probability, expert)) = hidden_states(
            MIXTURE,
            params,
            tokens,
            position,
            lambda q, k, v, _: (masked_attention(q, k, v, causal), None),
            route=route,
        )
        logits = head_logits(MIXTURE, params, hidden[:, :-1].reshape(-1, MIXTURE.hidden_size))
        log_p = jax.nn.log_softmax(logits).reshape(len(tokens), longest - 1, -1)
        logp = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
        nll = -jnp.sum(jnp.where(learned[:, 1:], logp, 0.0)) / learned.sum().astype(np.float32)
        is_token = real.astype(np.float32)[None, :, :, None]
        count = is_token.sum(2)
        chosen = jnp.sum(jax.nn.one_hot(expert, MIXTURE.num_experts).sum(3) * is_token, axis=2)
        f = MIXTURE.num_experts / MIXTURE.experts_per_token * chosen / count
        mean = jnp.sum(probability * is_token, axis=2) / count
        balance = jnp.mean(jnp.sum(f * mean, axis=-1), axis=1)
        return nll + COEF * balance.sum(), {"nll": nll, "balance": balance, "load": chosen.sum(1)}

    return jax.device_get(jax.jit(jax.grad(losses, has_aux=True))(PARAMS))[::-1]


def packed(params, rows, coef=COEF, *, mesh, micro=2, remat="none"):
    """(gradient, metrics); what differs in numbers alone is one program."""
    rows = jax.tree.map(jnp.asarray, rows)
    options = dict(model=MIXTURE, mesh=mesh, micro=micro, remat=remat)
    return likelihood_gradient(params, rows, jnp.float32(coef), **options)


def assert_plain(grads, metrics):
    losses, wanted = plain()
    load = losses["load"] / losses["load"].sum(-1, keepdims=True)
    for name, value in {
        "actor/nll": losses["nll"],
        "actor/balance_loss": losses["balance"].mean(),
        "actor/loss": losses["nll"] + COEF * losses["balance"].sum(),
        "actor/expert_share_max": load.max(),
    }.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    assert all(np.ndim(value) == 0 for value in metrics.values())
    assert distance(grads, wanted) < 1e-5


def on(marks=pytest.mark.slow, *, shared=True, micro=1, remat="none", **axes):
    """A case of the next test, by its axes above 1."""
    name = " ".join(f"{axis} {size}" for axis, size in axes.items()) or "1 device"
    name += "" if shared else ", own prompts"
    return pytest.param(shared, axes, micro, remat, id=name, marks=marks)


@pytest.mark.parametrize(
    ("shared", "axes", "micro", "remat"),
    [
        on(micro=2),
        on(shared=False, micro=4),
        on(fsdp=2, context=2, tensor=2, remat="full"),
        on((), expert=2, tensor=2),
        on(expert=2, micro=2),
        on(expert=4, fsdp=2, remat="full"),
        on(expert=8, shared=False),
        on(fsdp=2, expert=2, tensor=2),
        on(fsdp=2, expert=2, context=2),
        on(data=2, expert=2, context=2, remat="full"),
        on(expert=2, context=2, tensor=2),
    ],
)
def test_losses_and_gradients_are_those_of_plain_sequences(shared, axes, micro, remat):
    axes = dict(fsdp=1, tensor=1) | axes
    mesh = mesh_of(**axes)
    ranks = math.prod(axes.get(name, 1) for name in ("data", "fsdp", "expert"))
    shape = RowShape(1, max(4, ranks), 128, 8) if shared else RowShape(1, 8, 64, 4)
    rows, _ = rows_of(SAMPLES, shape, shared=shared, ranks=ranks)
    assert shared == bool((rows.parent > shape.sequences).any())
    # on one device as they are: the program that other tests run too
    params = jax.device_put(PARAMS, param_shardings(MIXTURE, mesh)) if mesh.size > 1 else PARAMS
    grads, metrics = packed(params, mini_batch(rows), mesh=mesh, micro=micro, remat=remat)
    assert_plain(*jax.device_get((grads, metrics)))


def test_the_balance_loss_takes_part_in_the_routers_gradient():
    """And a coefficient of 0 leaves the objective's own gradient."""
    rows, _ = rows_of(SAMPLES, RowShape(1, 4, 128, 8), shared=True)
    rows = mini_batch(rows)
    without, metrics = packed(PARAMS, rows, 0.0, mesh=mesh_of(1, 1))
    assert metrics["actor/balance_loss"] > 1
    np.testing.assert_allclose(metrics["actor/loss"], metrics["actor/nll"], rtol=1e-6)
    _, wanted = plain()
    router = without["layers"]["router"]
    assert distance({"r": router}, {"r": wanted["layers"]["router"]}) > 0.05


def test_padding_does_not_matter():
    rows, _ = rows_of(SAMPLES, RowShape(1, 4, 128, 8), shared=True)
    rows = jax.tree.map(np.array, mini_batch(rows))
    empty = rows.segment == 0
    rows.tokens[empty] = np.random.default_rng(0).integers(0, MIXTURE.vocab_size, empty.sum())
    grads, metrics = packed(PARAMS, rows, mesh=mesh_of(1, 1))
    assert_plain(*jax.device_get((grads, metrics)))


def test_even_use_is_1_and_one_expert_for_all_is_the_most():
    """A router of zeros is even in P; tokens then all go through the first K experts."""
    router = np.zeros_like(PARAMS["layers"]["router"])
    params = PARAMS | {"layers": PARAMS["layers"] | {"router": router}}
    rows, _ = rows_of(SAMPLES, RowShape(1, 4, 128, 8), shared=True)
    _, metrics = packed(params, mini_batch(rows), mesh=mesh_of(1, 1))
    np.testing.assert_allclose(metrics["actor/balance_loss"], 1, rtol=1e-6)
    np.testing.assert_allclose(metrics["actor/expert_share_max"], 1 / 3, rtol=1e-6)


def test_dense_models_are_left_alone():
    objective = sft_objective(TINY, FORWARD)
    assert balanced(objective, 0.0) is objective


@pytest.mark.slow
def test_adapters_learn_from_the_balance_too():
    """Experts and routers are frozen; what comes before them is moved by both losses."""
    network = adapted(MIXTURE, LoraConfig(4, targets=("query", "output")))
    rows, _ = rows_of(SAMPLES, RowShape(1, 4, 128, 8), shared=True)
    rows, mesh = mini_batch(rows), mesh_of(1, 1)

    @jax.jit
    def run(params, coef):
        return accumulate_gradients(
            params,
            SftBatch(rows),
            jnp.float32(1),
            shape=UpdateShape(mesh, 2, 14),
            objective=balanced(sft_objective(network, FORWARD), coef),
        )[0]

    params = random_params(network)
    with_it, without = (run(params, jnp.float32(coef)) for coef in (COEF, 0.0))
    assert {path.partition("_lora")[0] for path in flatten_dict(with_it, sep="/")} == {
        "layers/query",
        "layers/output",
    }
    assert distance(without, with_it) > 0.01


@pytest.mark.slow
def test_a_critic_has_a_balance_of_its_own():
    critic = scalar_model(MIXTURE, head_stddev=0.1)
    objective = value_objective(critic, ValueConfig(), FORWARD, max_response=14)
    rows, _ = rows_of(SAMPLES, RowShape(1, 4, 128, 8), shared=True)
    rows, mesh = mini_batch(rows), mesh_of(1, 1)
    zeros = jnp.zeros(rows.tokens.shape, jnp.float32)

    @jax.jit
    def run(params):
        return accumulate_gradients(
            params,
            ValueBatch(rows, zeros, zeros),
            jnp.float32(1),
            shape=UpdateShape(mesh, 1, 14),
            objective=balanced(objective, COEF),
        )[1]

    metrics = run(random_params(critic))
    parts = metrics["critic/vf_loss"] + COEF * MIXTURE.num_layers * metrics["critic/balance_loss"]
    np.testing.assert_allclose(metrics["critic/loss"], parts, rtol=1e-5)
