"""Chunked log-probs and entropies against full float64 softmax, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distflow_jax.training import token_logp as module
from distflow_jax.training.token_logp import token_logp

B, T, D, V = 3, 12, 8, 37
COUNT = np.array([7, 12, 0], np.int32)


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    weight = (2 * rng.normal(size=(V, D))).astype(np.float32)
    target = rng.integers(0, V, (B, T)).astype(np.int32)
    cotangents = tuple(rng.normal(size=(B, T)).astype(np.float32) for _ in range(2))
    return hidden, weight, target, cotangents


def reference(hidden, weight, target, temperature, count, cotangents):
    """((logp, entropy), (gradient of hidden, gradient of weight)) in float64, written out."""
    hidden, weight = hidden.astype(np.float64), weight.astype(np.float64)
    logits = np.einsum("btd,vd->btv", hidden, weight) / temperature
    log_p = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    log_p -= logits.max(-1, keepdims=True)
    p = np.exp(log_p)
    logp = np.take_along_axis(log_p, target[..., None], -1)[..., 0]
    entropy = -(p * log_p).sum(-1)
    wanted = np.arange(T)[None] < count[:, None]
    g, e = (np.where(wanted, x, 0)[..., None] for x in cotangents)
    onehot = np.eye(V)[target]
    d_logits = g * (onehot - p) + e * (-p * (log_p + entropy[..., None]))
    d_hidden = np.einsum("btv,vd->btd", d_logits, weight) / temperature
    d_weight = np.einsum("btv,btd->vd", d_logits, hidden) / temperature
    return (np.where(wanted, logp, 0), np.where(wanted, entropy, 0)), (d_hidden, d_weight)


@functools.partial(jax.jit, static_argnums=(6, 7))
def run(hidden, weight, target, count, temperature, cotangents, chunk, keep=False):
    def f(h, w):
        return token_logp(h, w, target, count, temperature, chunk, keep)

    out, backward = jax.vjp(f, hidden, weight)
    return out, backward(cotangents)


@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize("chunk", [1, 4, 12])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_values_and_gradients(chunk, temperature, keep):
    hidden, weight, target, cotangents = inputs()
    got = run(hidden, weight, target, COUNT, np.float32(temperature), cotangents, chunk, keep)
    expected = reference(hidden, weight, target, temperature, COUNT, cotangents)
    for mine, theirs in zip(got[0], expected[0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=2e-5)
    for mine, theirs in zip(got[1], expected[1], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", range(2), ids=["logp", "entropy"])
def test_gradient_is_autodiff_of_the_plain_formula(which):
    hidden, weight, target, _ = inputs(1)

    def plain(h, w):
        log_p = jax.nn.log_softmax(jnp.einsum("BTD,VD->BTV", h, w), axis=-1)
        chosen = jnp.take_along_axis(log_p, target[..., None], axis=-1)[..., 0]
        out = (chosen, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1))[which]
        return jnp.sum(jnp.where(np.arange(T)[None] < COUNT[:, None], out, 0.0))

    ones, zeros = np.ones((B, T), np.float32), np.zeros((B, T), np.float32)
    cotangents = (ones, zeros) if which == 0 else (zeros, ones)
    got = run(hidden, weight, target, COUNT, np.float32(1), cotangents, 4)[1]
    expected = jax.jit(jax.grad(plain, argnums=(0, 1)))(hidden, weight)
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize("poison", [np.inf, np.nan])
def test_nothing_beyond_the_count_matters(poison, keep):
    """Neither within the last chunk nor behind it, neither forward nor backward."""
    hidden, weight, target, cotangents = inputs(2)
    temperature = np.float32(1)
    clean = run(hidden, weight, target, COUNT, temperature, cotangents, 4, keep)
    beyond = np.arange(T)[None] >= COUNT[:, None]
    hidden = np.where(beyond[..., None], np.float32(poison), hidden)
    target = np.where(beyond, 0, target)
    cotangents = tuple(np.where(beyond, np.float32(poison), g) for g in cotangents)
    got = run(hidden, weight, target, COUNT, temperature, cotangents, 4, keep)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for value in (*got[0], got[1][0]):
        np.testing.assert_array_equal(np.asarray(value)[beyond], 0)


def test_positions_beyond_the_fullest_row_cost_nothing(monkeypatch):
    rng = np.random.default_rng(5)
    hidden = rng.normal(size=(1, 4096, 64)).astype(np.float32)
    weight = rng.normal(size=(1000, 64)).astype(np.float32)
    target = np.zeros((1, 4096), np.int32)
    done, chunk_logits = [], module._chunk_logits

    def counted(*arguments):
        jax.debug.callback(lambda: done.append(None))
        return chunk_logits(*arguments)

    monkeypatch.setattr(module, "_chunk_logits", counted)
    logp = jax.jit(lambda count: token_logp(hidden, weight, target, count, np.float32(1), 32))

    def chunks(count):
        done.clear()
        jax.block_until_ready(logp(np.array([count], np.int32)))
        jax.effects_barrier()
        return len(done)

    assert [chunks(count) for count in (4096, 33, 32, 0)] == [128, 2, 1, 0]
    for x in logp(np.zeros(1, np.int32)):
        np.testing.assert_array_equal(x, 0)


def test_extreme_logits_stay_finite():
    hidden, weight, target, cotangents = inputs(3)
    big = 1e4 * hidden
    for x in jax.tree.leaves(run(big, weight, target, COUNT, np.float32(1), cotangents, 4)):
        assert np.isfinite(x).all()


def test_bfloat16_inputs_give_float32_results():
    hidden, weight, target, cotangents = inputs(4)
    half = (jnp.asarray(x, jnp.bfloat16) for x in (hidden, weight))
    rounded = [np.asarray(x, np.float32) for x in half]
    args = target, COUNT, np.float32(1), cotangents, 4
    got = run(*(jnp.asarray(x, jnp.bfloat16) for x in rounded), *args)
    assert [x.dtype for x in got[0]] == [jnp.float32] * 2
    assert [x.dtype for x in got[1]] == [jnp.bfloat16] * 2
    exact = run(*rounded, *args)
    np.testing.assert_allclose(got[0][0], exact[0][0], atol=1e-4)
    for mine, theirs in zip(got[1], exact[1], strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(np.asarray(mine, np.float32), theirs, atol=0.02 * scale)
