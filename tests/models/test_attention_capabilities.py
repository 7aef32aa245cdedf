"""Every implementation of the attention table does what the table says: compared with float64.

Kernels are interpreted, cuDNN's arguments are given to XLA. Rows that devices share, and windows in
the trainer: training/test_library_attention.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distflow_jax.config.implementation_table import FEATURES, IMPLEMENTATIONS, ROWS, Need, lacks
from distflow_jax.models.attention import InRow, packed_mask, within
from distflow_jax.models.block_attention import block_attention
from distflow_jax.models.kernels import library_attention
from distflow_jax.models.kernels.library_attention import BY_MASK, BY_SEGMENTS, Segments
from distflow_jax.models.kernels.tiles import Reach, tiles_of

HEADS, KV_HEADS, HEAD_DIM, LENGTH, SIDE = 4, 2, 16, 128, 32
ALONE = [(1, 1, 60), (2, 2, 37), (3, 3, 20)]  # (segment, parent, tokens), then padding
SHARED = [(9, 9, 40), (1, 9, 20), (2, 9, 3), (3, 3, 30), (4, 9, 21)]
IMAGE = (5, 30)  # first and last token of an image


@dataclasses.dataclass(frozen=True)
class Case:
    """One row, and what attention has to heed in it."""

    parts: tuple = tuple(ALONE)
    window: int = 0
    image: bool = False
    sinks: bool = False
    soft_cap: float = 0.0

    def of(self, index):
        x = np.concatenate([np.full(part[2], part[index], np.int32) for part in self.parts])
        return np.pad(x, (0, LENGTH - len(x)))[None]

    @property
    def position(self):
        length = {s: n for s, _, n in self.parts}
        x = [np.arange(n) + (length[p] if p != s else 0) for s, p, n in self.parts]
        x = np.concatenate(x).astype(np.int32)
        return np.pad(x, (0, LENGTH - len(x)))[None]

    @property
    def in_row(self):
        place = np.arange(LENGTH, dtype=np.int32)[None]
        until = place.copy()
        if self.image:
            until[:, IMAGE[0] : IMAGE[1] + 1] = IMAGE[1]
        return InRow(*map(jnp.asarray, (until, self.of(0), place)))

    @property
    def mask(self):
        mask = packed_mask(*map(jnp.asarray, (self.of(0), self.of(1))), self.in_row)
        position = jnp.asarray(self.position)
        return mask & within(position, position, self.window) if self.window else mask

    @property
    def sink_logits(self):
        return np.array([-1.0, 0.5, 2.0, 0.0], np.float32) if self.sinks else None


CASES = {
    "packed rows": [Case()],
    "shared prompts": [Case(parts=tuple(SHARED))],
    "windows": [Case(window=7), Case(window=50)],
    "image tokens": [Case(image=True)],
    "sinks": [Case(sinks=True), Case(sinks=True, window=7)],
    "soft caps": [Case(soft_cap=1.5)],
}


def inputs(case):
    rng = np.random.default_rng(0)
    q, g = rng.normal(size=(2, 1, LENGTH, HEADS, HEAD_DIM)).astype(np.float32)
    k, v = rng.normal(size=(2, 1, LENGTH, KV_HEADS, HEAD_DIM)).astype(np.float32)
    return q, k, v, np.where(case.of(0)[..., None, None] > 0, g, 0)


def statement(q, k, v, g, case):
    """(output, gradients of q, k, v and sinks) of softmax(cap(q k / sqrt(H))) v, in float64."""
    mask, group, scale = np.asarray(case.mask)[:, None], HEADS // KV_HEADS, HEAD_DIM**-0.5
    q, k, v, g = (x.astype(np.float64).swapaxes(1, 2) for x in (q, k, v, g))
    wide_k, wide_v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores, slope = q @ wide_k.swapaxes(2, 3) * scale, 1.0
    if case.soft_cap:
        tanh = np.tanh(scores / case.soft_cap)
        scores, slope = case.soft_cap * tanh, 1 - tanh**2
    weight = np.where(mask, np.exp(np.minimum(scores, 50)), 0)
    total = weight.sum(-1, keepdims=True)
    sink = 0.0
    if case.sinks:
        sink = np.exp(case.sink_logits.astype(np.float64))[None, :, None, None]
    total = np.maximum(total + sink, 1e-300)
    weight, of_sink = weight / total, sink / total
    out = weight @ wide_v
    d_weight = g @ wide_v.swapaxes(2, 3)
    delta = (weight * d_weight).sum(-1, keepdims=True)
    d_scores = weight * (d_weight - delta) * slope * scale

    def by_group(x):
        return x.reshape(1, KV_HEADS, group, LENGTH, HEAD_DIM).sum(2).swapaxes(1, 2)

    d_q, d_k = d_scores @ wide_k, by_group(d_scores.swapaxes(2, 3) @ q)
    found = [out.swapaxes(1, 2), d_q.swapaxes(1, 2), d_k, by_group(weight.swapaxes(2, 3) @ g)]
    return [*found, -(of_sink * delta).sum((0, 2, 3))] if case.sinks else found


def by_tiles(implementation, q, k, v, sinks, case):
    segment, parent, position = map(jnp.asarray, (case.of(0), case.of(1), case.position))
    reach = Reach(position, position, jnp.int32(case.window)) if case.window else None
    tiles = tiles_of(segment, parent, SIDE, case.in_row, reach)
    assert not case.soft_cap
    return block_attention(q, k, v, tiles, (), reach, implementation, sinks)


def by_mask(attend, q, k, v, sinks, case):
    options = {"sinks_N": sinks} if case.sinks else {}
    options |= {"soft_cap": case.soft_cap} if case.soft_cap else {}
    return attend(q, k, v, case.mask, **options)


def by_segments(attend, q, k, v, sinks, case):
    rows = Segments(*map(jnp.asarray, (case.of(0), case.position, np.zeros((1, 4), bool))))
    options = {"soft_cap": case.soft_cap} if case.soft_cap else {}
    return attend(q, k, v, rows, case.window, sinks, **options)


def function(one):
    """(q, k, v, sinks, case) -> output, of a record of the table on this CPU."""
    if one.name in ("tokamax", "transformer_engine") and "not installed" in lacks(one, NEED):
        pytest.skip(f"{one.name} is not installed")
    if one.name == "kernel":
        return functools.partial(by_tiles, one.platforms[0])
    if one.name == "blocks":
        return functools.partial(by_tiles, "loops")
    if one.name == "cudnn":
        return functools.partial(by_mask, functools.partial(BY_MASK["cudnn"], implementation="xla"))
    if one.name in BY_SEGMENTS:
        return functools.partial(by_segments, BY_SEGMENTS[one.name])
    return functools.partial(by_mask, BY_MASK["loops" if one.name == "masked" else one.name])


NEED = Need(ROWS, "gpu", 64, "bfloat16")


def results(attend, case, g):
    """The output for tokens that are not padding, which may attend to anything; its gradients."""

    def valid(q, k, v, sinks=None):
        return jnp.where(case.of(0)[..., None, None] > 0, attend(q, k, v, sinks, case), 0)

    def run(*arguments):
        out, back = jax.vjp(valid, *arguments)
        return out, *back(g)

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


OF_ROWS = [one for one in IMPLEMENTATIONS if ROWS in one.serves]


@pytest.fixture
def splash_interpreted(interpreted, monkeypatch):
    slow = functools.partial(library_attention.splash_attention, interpret=True)
    monkeypatch.setitem(BY_SEGMENTS, "splash", slow)


@pytest.mark.parametrize("feature", CASES)
@pytest.mark.parametrize("one", OF_ROWS, ids=lambda one: f"{one.name}-{one.platforms[0]}")
def test_it_can_what_it_declares(one, feature, splash_interpreted):
    if feature not in one.can:
        pytest.skip("not declared, see test_implementation_table.py for the refusal")
    for case in CASES[feature]:
        q, k, v, g = inputs(case)
        sinks = [case.sink_logits] if case.sinks else []
        got = results(function(one), case, g)(q, k, v, *sinks)
        for name, mine, exact in zip("oqkvs", got, statement(q, k, v, g, case), strict=False):
            np.testing.assert_allclose(mine, exact, atol=5e-6, rtol=2e-5, err_msg=name)


def test_every_feature_has_a_case():
    """Rows that devices share need a mesh: training/test_library_attention.py."""
    assert {*CASES, "divided rows"} == set(FEATURES)
