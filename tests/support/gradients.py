"""Gradients of a small model on any mesh, for tests that compare meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from distflow_jax.batch import RowShape
from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.training_config import LoraConfig
from distflow_jax.models.decoder_config import DecoderConfig, adapted
from distflow_jax.models.parameters import param_shardings
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.training.expert_balance import balanced
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.objectives.policy_objective import PolicyBatch, policy_objective
from distflow_jax.training.objectives.sft_objective import SftBatch, sft_objective
from distflow_jax.training.update import UpdateShape, accumulate_gradients
from support.tiny_model import (
    MIXTURE,
    TINY,
    mesh_of,
    mini_batch,
    random_experts,
    random_params,
    random_samples,
    rows_of,
    with_experts,
)

LENGTH, ROWS = 128, 8
TEMPERATURE = np.float32(0.8)
ALGORITHM = AlgorithmConfig(kl_coef=0.05, entropy_coef=0.01)
DENSE = dataclasses.replace(TINY, num_layers=4)
MODELS = {
    "dense": DENSE,
    "mixture": dataclasses.replace(MIXTURE, num_layers=4),
    "adapters": adapted(DENSE, LoraConfig(4, alpha=4.0, targets=("query", "value", "down"))),
}
params_of = functools.cache(random_params)


@functools.cache
def batch(shared: bool = True, replayed: DecoderConfig | None = None) -> PolicyBatch:
    """Rows of several prompts, one of them with a row to itself, and every term of a loss.

    `replayed`: the mixture whose experts, recorded ones, are in the rows.
    """
    samples = random_samples(5, groups=6, size=5, prompt=(3, 30), response=(1, 40))
    rows, placement = rows_of(samples, RowShape(1, ROWS, LENGTH, 8), shared=shared)
    if replayed:
        rows = with_experts(rows, placement, samples, random_experts(samples, replayed))
    rows = mini_batch(rows)
    if shared:  # some responses follow a prompt that lies elsewhere in the row
        place = np.arange(LENGTH)[None]
        moved = np.asarray(rows.previous) != place - 1
        assert (moved & np.asarray(rows.response_mask)).sum() > 8
    rng = np.random.default_rng(2)
    mask = np.asarray(rows.response_mask)
    advantage = np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32)
    ref_logp = np.where(mask, -1.0 - np.asarray(rows.tokens) % 7, 0).astype(np.float32)
    return PolicyBatch(rows, advantage, None, None, ref_logp)


@functools.cache
def gradient(
    model: DecoderConfig = TINY,
    *,
    micro: int = 1,
    block: int = 0,
    remat: str = "none",
    shared: bool = True,
    replay: bool = False,
    keep: bool = False,
    microbatches: int = 0,
    dtype: str = "float32",
    repeats: int = 1,
    by: str = "loops",
    **axes: int,
):
    """(gradient of what is trained, metrics with the loss among them) on the host.

    `micro`: rows of a data rank that are worked on at a time, through stages as so many
    `microbatches`. The loss has a mixture's balance in it; with `replay` its tokens go through
    experts that were recorded. `axes` are mesh_of's.
    """
    mesh = mesh_of(**axes)
    forward = ForwardConfig(dtype, 16, remat, block, keep, microbatches, repeats, by)
    objective = policy_objective(model, ALGORITHM, forward, max_response=40)
    objective = balanced(objective, 0.1 if model.num_experts else 0.0)
    params = jax.device_put(params_of(model), param_shardings(model, mesh))

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(params, batch):
        with use_mesh(mesh):
            shape = UpdateShape(mesh, micro, 40)
            return accumulate_gradients(
                params, batch, TEMPERATURE, shape=shape, objective=objective
            )

    grads, metrics = jax.device_get(run(params, batch(shared, model if replay else None)))
    assert metrics["actor/entropy"] > 0
    assert ("actor/router_mismatch" in metrics) == replay
    return grads, metrics


@functools.partial(jax.jit, static_argnames=("model", "mesh", "micro", "remat"))
def likelihood_gradient(params, rows, coef, *, model, mesh, micro=2, remat="none"):
    """(gradient, metrics) of a mixture's nll, and `coef` times the balance of its experts."""
    objective = sft_objective(model, ForwardConfig(logp_chunk=16, remat=remat))
    with use_mesh(mesh):
        return accumulate_gradients(
            params,
            SftBatch(rows),
            jnp.float32(1),
            shape=UpdateShape(mesh, micro, 14),
            objective=balanced(objective, coef),
        )


def distance(a, b) -> float:
    """|a - b| / |b| over all leaves."""
    a, b = flatten_dict(a, sep="/"), flatten_dict(b, sep="/")
    assert a.keys() == b.keys()
    pairs = [(np.asarray(a[k], np.float64), np.asarray(b[k], np.float64)) for k in a]
    norm = sum(np.sum(y**2) for _, y in pairs)
    assert norm > 0
    return np.sqrt(sum(np.sum((x - y) ** 2) for x, y in pairs) / norm)


def assert_same(got, wanted):
    """Gradients within 1e-5 of each other, norm-relative, and equal metrics."""
    (grads, metrics), (others, more) = got, wanted
    assert distance(grads, others) < 1e-5
    assert metrics.keys() == more.keys()
    for name, value in more.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
