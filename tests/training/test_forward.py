"""Packed rows give what plain sequences give: log-probs, and gradients of the whole objective.

N sequences, T tokens of the longest one. The yardstick is the same layers over one sequence per
row, with a full softmax and the loss written out. Tolerances are float32 sums in another order:
1e-5 of a gradient's norm is some hundred roundings; a token that sees its neighbour is off by
percents.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.gradients import assert_same, distance
from support.tiny_model import (
    TINY,
    mesh_of,
    mini_batch,
    padded,
    random_params,
    random_samples,
    rows_of,
    sequences_of,
    spread,
    values_of,
)

from distflow_jax.algorithms.packed import per_token
from distflow_jax.batch import RowShape, sequence_field, token_field
from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.run_config import Config
from distflow_jax.config.training_config import TrainingConfig
from distflow_jax.models.attention import masked_attention
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.transformer import bind
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.sizes import derive_sizes
from distflow_jax.training.forward import ForwardConfig, logits_in_memory, response_logp
from distflow_jax.training.objectives.policy_objective import PolicyBatch, policy_objective
from distflow_jax.training.update import UpdateShape, accumulate_gradients

PARAMS = random_params(TINY)
SAMPLES = random_samples(0, groups=4, size=4)
TEMPERATURE = np.float32(0.8)
ALGORITHM = AlgorithmConfig(
    clip_high=0.28, aggregation="seq-mean-token-mean", kl_coef=0.05, entropy_coef=0.01
)
FORWARD = ForwardConfig(logp_chunk=16)
WIDE, NARROW = RowShape(1, 8, 128, 8), RowShape(1, 16, 64, 4)


@pytest.fixture(scope="module")
def fields():
    """Per-token fields that exercise every term: ratios on both sides of the clip, a reference."""
    rng = np.random.default_rng(1)
    plain = unpacked_logp()
    near = [x + rng.normal(0, 0.3, len(x)) for x in plain]
    return {
        "old_logp": [x.astype(np.float32) for x in near],
        "ref_logp": [(x + rng.normal(0, 0.5, len(x))).astype(np.float32) for x in plain],
        "rollout_logp": [(x + rng.normal(0, 0.1, len(x))).astype(np.float32) for x in plain],
        "score": rng.normal(size=len(SAMPLES)).astype(np.float32),
    }


# -- one sequence per row --------------------------------------------------------------------------


def log_softmax_all(params, tokens):
    """log_softmax(logits / temperature) of the next token, [N, T, V]."""
    count, length = tokens.shape
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (count, length))
    causal = jnp.tril(jnp.ones((1, length, length), bool))
    decoder = bind(TINY, params)
    hidden, _ = decoder.hidden(
        tokens, position, lambda q, k, v, _: (masked_attention(q, k, v, causal), None)
    )
    logits = jnp.einsum("NTD,VD->NTV", hidden, decoder.head_weight())
    return jax.nn.log_softmax(logits / TEMPERATURE, axis=-1)


def unpacked_logp():
    """Log-probs of the responses, one float32 array per sample."""
    tokens, starts, ends = padded(SAMPLES)
    log_p = np.asarray(jax.jit(log_softmax_all)(PARAMS, tokens))
    return [
        np.array([log_p[i, t - 1, tokens[i, t]] for t in range(starts[i], ends[i])])
        for i in range(len(tokens))
    ]


def unpacked_gradient(fields):
    """Gradient of the objective, term by term from its definition."""
    tokens, _, _ = padded(SAMPLES)
    mask = spread(SAMPLES, SAMPLES.response_mask)[:, 1:].astype(np.float32)
    names = ("old_logp", "ref_logp", "score")
    old, ref, advantage = (spread(SAMPLES, fields[k])[:, 1:] for k in names)
    per_sequence = mask.sum(1, keepdims=True)
    sequences = np.float32((per_sequence > 0).sum())
    weight = mask / np.maximum(per_sequence, 1) / sequences

    def objective(params):
        log_p = log_softmax_all(params, tokens)[:, :-1]
        logp = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        ratio = jnp.exp(logp - old)
        clipped = jnp.clip(ratio, 1 - 0.2, 1 + 0.28)
        loss = jnp.maximum(-advantage * ratio, -advantage * clipped)
        capped = jnp.minimum(loss, -advantage * 3.0)
        loss = jnp.where(advantage < 0, capped, loss)
        d = logp - ref
        loss += ALGORITHM.kl_coef * (jnp.exp(-d) + d - 1) - ALGORITHM.entropy_coef * entropy
        return jnp.sum(loss * weight)

    return jax.jit(jax.value_and_grad(objective))(PARAMS)


# -- packed ----------------------------------------------------------------------------------------


@jax.jit
def packed_logp(params, rows):
    return response_logp(params, TINY, rows, TEMPERATURE, FORWARD)


def packed_batch(fields, row_shape, *, shared):
    rows, placement = rows_of(SAMPLES, row_shape, shared=shared)
    rows = mini_batch(rows)
    token = {
        k: token_field(sequences_of(SAMPLES), placement, v)[0]
        for k, v in fields.items()
        if k != "score"
    }
    score = sequence_field(placement, fields["score"])[0]
    advantage = np.where(rows.response_mask, per_token(jnp.asarray(score), rows.segment), 0)
    return PolicyBatch(rows=rows, advantage=advantage, **token)


@functools.partial(jax.jit, static_argnames=("mesh", "micro", "block", "keep"))
def packed_gradient(batch, params, *, mesh, micro, block=0, keep=False):
    forward = dataclasses.replace(FORWARD, attention_block=block, keep_logits=keep)
    with use_mesh(mesh):
        return accumulate_gradients(
            params,
            batch,
            TEMPERATURE,
            shape=UpdateShape(mesh, micro, 14),
            objective=policy_objective(TINY, ALGORITHM, forward, max_response=14),
        )


@pytest.fixture(scope="module")
def narrow(fields):
    batch = packed_batch(fields, NARROW, shared=True)
    return batch, packed_gradient(batch, PARAMS, mesh=mesh_of(1, 1), micro=1)


@pytest.mark.parametrize("shared", [False, True], ids=["own prompts", "shared prompts"])
@pytest.mark.parametrize("row_shape", [NARROW, WIDE], ids=["64 tokens", "128 tokens"])
def test_log_probs_of_packed_rows(row_shape, shared):
    rows, placement = rows_of(SAMPLES, row_shape, shared=shared)
    assert shared == (rows.parent.max() > row_shape.sequences)
    logp, entropy = (np.asarray(x) for x in packed_logp(PARAMS, mini_batch(rows)))
    got = values_of(SAMPLES, placement, logp[None])
    for mine, plain, mask in zip(got, unpacked_logp(), SAMPLES.response_mask, strict=True):
        np.testing.assert_allclose(mine[mask], plain[mask], atol=1e-4)
    outside = ~rows.response_mask[0]
    np.testing.assert_array_equal(logp[outside], 0)
    np.testing.assert_array_equal(entropy[outside], 0)
    assert (entropy[~outside] > 0).all() and (entropy < np.log(TINY.vocab_size)).all()


def test_gradient_of_the_objective(fields, narrow):
    loss, expected = unpacked_gradient(fields)
    _, (grads, metrics) = narrow
    np.testing.assert_allclose(metrics["actor/loss"], loss, rtol=1e-5)
    assert distance(grads, expected) < 1e-5
    assert 0 < metrics["actor/pg_clipfrac"] < 1 and metrics["actor/kl_loss"] > 0


@pytest.mark.parametrize(
    ("row_shape", "shared"), [(NARROW, False), (WIDE, True)], ids=["own prompts", "wide rows"]
)
def test_gradient_does_not_depend_on_packing(fields, narrow, row_shape, shared):
    batch = packed_batch(fields, row_shape, shared=shared)
    assert_same(packed_gradient(batch, PARAMS, mesh=mesh_of(1, 1), micro=1), narrow[1])


@pytest.mark.parametrize(("axes", "remat"), [((1, 1), "none"), ((2, 4), "attention")])
def test_attention_tile_by_tile(fields, narrow, axes, remat, monkeypatch):
    """On 8 devices the 2 key/value heads do not divide over a tensor axis of 4."""
    monkeypatch.setattr(sys.modules[__name__], "FORWARD", ForwardConfig("float32", 16, remat))
    batch = packed_batch(fields, WIDE, shared=True)
    found = packed_gradient(batch, PARAMS, mesh=mesh_of(*axes), micro=2, block=32)
    assert_same(found, narrow[1])


def test_micro_batch_changes_rounding_only(narrow):
    batch, (grads, metrics) = narrow
    other, more = packed_gradient(batch, PARAMS, mesh=mesh_of(1, 1), micro=4)
    assert distance(other, grads) < 1e-6
    for name, value in metrics.items():
        np.testing.assert_allclose(more[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_padding_does_not_matter(narrow):
    """Tokens, positions and fields of places that hold nothing may be anything."""
    batch, (grads, metrics) = narrow
    rng = np.random.default_rng(7)
    rows = jax.tree.map(np.array, batch.rows)
    empty = rows.segment == 0
    assert empty.sum() > 100
    rows.tokens[empty] = rng.integers(0, TINY.vocab_size, empty.sum())
    rows.position[empty] = rng.integers(0, 60, empty.sum())
    rows.previous[empty] = rng.integers(0, rows.tokens.shape[1], empty.sum())
    mask = rows.response_mask
    poison = np.float32([np.nan, np.inf, -np.inf, np.nan])
    fields = (np.where(mask, x, p) for x, p in zip(batch[1:5], poison, strict=True))
    poisoned = PolicyBatch(rows, *fields)
    got, more = packed_gradient(poisoned, PARAMS, mesh=mesh_of(1, 1), micro=1)
    for mine, clean in zip(jax.tree.leaves(got), jax.tree.leaves(grads), strict=True):
        np.testing.assert_array_equal(mine, clean)
    for name, value in metrics.items():
        np.testing.assert_array_equal(more[name], value, err_msg=name)


def test_masked_response_tokens_teach_nothing():
    """A response token that the policy did not choose is read, but has no part in the loss."""
    masks = [m if i < 3 else np.zeros_like(m) for i, m in enumerate(SAMPLES.response_mask)]
    mine = dataclasses.replace(SAMPLES, response_mask=masks)
    rows, placement = rows_of(mine, NARROW, shared=True)
    assert rows.response_mask.sum() == sum(m.sum() for m in mine.response_mask)
    logp, _ = packed_logp(PARAMS, mini_batch(rows))
    got = values_of(mine, placement, np.asarray(logp)[None])
    for i, plain in enumerate(unpacked_logp()):
        wanted = np.where(mine.response_mask[i], plain, 0)
        np.testing.assert_allclose(got[i], wanted, atol=1e-4)


def test_gradient_does_not_depend_on_the_mesh(narrow):
    """With 2 key/value heads on a tensor axis of 4, every head's gradient is a sum over copies."""
    batch, one = narrow
    assert_same(packed_gradient(batch, PARAMS, mesh=mesh_of(2, 4), micro=1), one)


@pytest.mark.parametrize(
    "asked, tokens, rows, vocab, remat, expected",
    [
        (0, 576, 1, 49_152, "none", (576, True)),
        (0, 576, 1, 49_152, "full", (576, False)),
        (0, 4096, 1, 49_152, "none", (512, False)),
        (0, 4096, 1, 1_000_000, "none", (64, False)),  # 256 MiB are 67 tokens
        (0, 997, 1, 512, "none", (997, True)),  # nothing else divides a prime
        (0, 256, 4, 512, "none", (128, True)),
        (32, 256, 4, 512, "none", (32, True)),
    ],
)
def test_logits_in_memory(asked, tokens, rows, vocab, remat, expected):
    assert logits_in_memory(asked, tokens, rows=rows, vocab=vocab, remat=remat) == expected


def test_accelerators_take_longer_chunks_where_their_memory_allows():
    def chunk(gib, rows=1):
        sizes = dict(rows=rows, vocab=152_064, remat="full", memory=gib * 2**30)
        return logits_in_memory(0, 8192, **sizes)[0]

    assert (chunk(95), chunk(70), chunk(15), chunk(0)) == (1024, 512, 256, 256)
    assert chunk(95, rows=4) == 256


def test_logits_in_memory_are_those_of_a_devices_rows():
    def chunk(devices, rows):
        training = TrainingConfig(logp_chunk=0, row_tokens=1024, micro_batch_rows=rows)
        machine = Machine(1, devices, devices, "cpu")
        return derive_sizes(Config(training=training), DecoderConfig(), machine).forward.logp_chunk

    assert chunk(1, 1) == chunk(8, 8) == 512
    assert chunk(1, 2) == chunk(8, 16) == 256


@pytest.mark.parametrize(("fsdp", "tensor"), [(1, 1), (2, 2)])
def test_kept_logits_change_nothing(narrow, fsdp, tensor):
    batch, (expected, _) = narrow
    mesh = mesh_of(fsdp, tensor)
    grads, _ = packed_gradient(batch, PARAMS, mesh=mesh, micro=2, keep=True)
    assert distance(grads, expected) < 1e-5
