"""A network and a batch small enough for tests, with weights that make sharp predictions."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from distflow_jax.batch import (
    Placement,
    Prompt,
    Rows,
    RowShape,
    Samples,
    Sequences,
    TokenColumn,
    from_token_field,
    to_rows,
    token_field,
)
from distflow_jax.coordinator.assignment import PackingPlan, Shares, StepLengths
from distflow_jax.coordinator.first_fit import RowLimits
from distflow_jax.layout import Layout
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.families import gemma3
from distflow_jax.models.parameters import param_specs
from distflow_jax.rollout.requests import Response
from distflow_jax.training.forward import ForwardConfig, response_logp

# 320 tokens: not a multiple of the sampler's block of 128, but of 8 devices
TINY = DecoderConfig(
    vocab_size=320,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_size=128,
    max_position=256,
)
MIXTURE = dataclasses.replace(
    TINY, family="qwen3_moe", qk_norm=True, mlp_size=32, num_experts=8, experts_per_token=3
)
# every kind of layer, and a window shorter than prompts and responses
WINDOWED = dataclasses.replace(
    TINY,
    family="gemma3",
    num_layers=3,
    sliding_window=6,
    full_every=2,
    rope_local_theta=50.0,
    query_scalar=24,
    **gemma3.SWITCHES,
)


def random_params(config: DecoderConfig, seed: int = 0) -> dict:
    """Float32 NumPy parameters. Larger than at birth, and norms that are not all one: with tiny
    weights every prediction is uniform, and most mistakes would hide."""
    rng = np.random.default_rng(seed)
    flat = {}
    for path, spec in param_specs(config).items():
        noise = rng.standard_normal(spec.shape)
        value = 1 + 0.2 * noise if spec.stddev is None else 0.15 * noise
        flat[path] = value.astype(np.float32)
    return unflatten_dict(flat, sep="/")


def assert_same_arrays(got, want):
    """Equal in form, kind, bits and place on every device."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert x.sharding == y.sharding and x.dtype == y.dtype
        for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True):
            assert a.device == b.device
            np.testing.assert_array_equal(np.asarray(a.data), np.asarray(b.data))


def mesh_of(
    fsdp: int,
    tensor: int,
    names=("fsdp", "tensor"),
    *,
    data: int = 1,
    expert: int = 1,
    pipeline: int = 1,
    context: int = 1,
) -> Mesh:
    """The first devices as a mesh; one of training has the other axes where they are above 1."""
    others = {"expert": expert, "pipeline": pipeline, "context": context}
    sizes = {names[0]: fsdp, **{k: n for k, n in others.items() if n > 1}, names[1]: tensor}
    if data > 1:
        sizes = {"data": data, **sizes}
    names, shape = zip(*sizes.items(), strict=True)
    devices = np.array(jax.devices()[: math.prod(shape)], dtype=object)
    return Mesh(devices.reshape(shape), names)


def prompt_of(counter: int, tokens) -> Prompt:
    return Prompt(counter, counter, np.asarray(tokens, np.int32), "", "test", None, {})


def random_samples(
    seed: int,
    *,
    groups: int,
    size: int,
    prompt: tuple[int, int] = (3, 20),
    response: tuple[int, int] = (1, 14),
    vocab: int = TINY.vocab_size,
) -> Samples:
    """`groups` prompts with `size` responses each; every tenth response token is masked out."""
    rng = np.random.default_rng(seed)
    prompts, responses, masks = [], [], []
    for counter in range(groups):
        p = prompt_of(counter, rng.integers(0, vocab, rng.integers(*prompt, endpoint=True)))
        for _ in range(size):
            length = rng.integers(*response, endpoint=True)
            prompts.append(p)
            responses.append(rng.integers(0, vocab, length).astype(np.int32))
            masks.append(rng.random(length) < 0.9)
    uid = [(counter, sample) for counter in range(groups) for sample in range(size)]
    return Samples(prompts, np.array(uid, np.int64), responses, masks)


def sequences_of(samples: Samples) -> Sequences:
    return Sequences(
        group=[p.counter for p in samples.prompt],
        member=samples.uid[:, 1].tolist(),
        prompt=[p.tokens for p in samples.prompt],
        response=samples.response,
        response_mask=samples.response_mask,
    )


def rows_of(
    samples: Samples, shape: RowShape, *, shared: bool, ranks: int = 1, group_size: int = 0
):
    """(Rows, Placement) of samples, in the order of their uids, whose prompts count from 0.

    With `group_size` the responses to a prompt, so many at most, share a row."""
    layout = Layout("mesh", (("fsdp", ranks), ("tensor", 1)))
    counter = np.array([p.counter for p in samples.prompt])
    assert (np.diff(counter) >= 0).all()
    shares = Shares.make(
        PackingPlan(
            limits=RowLimits(shape.tokens, shape.sequences, shared, group_size),
            mini_batches=shape.mini_batches,
            prompts_per_step=int(counter.max()) + 1,
            rows={layout: shape.rows // ranks},
            primary=layout,
        ),
        StepLengths(
            counter,
            np.zeros(len(counter), np.int64),
            np.array([len(p.tokens) for p in samples.prompt]),
            np.array([len(r) for r in samples.response]),
        ),
        processes=1,
    )
    placement: Placement = shares.placement(layout, 0)
    return to_rows(sequences_of(samples), placement), placement


def padded(samples: Samples) -> tuple[np.ndarray, list[int], list[int]]:
    """(tokens [N, T] of prompt + response, padded right, first place of the response, length)."""
    whole = [
        np.concatenate([p.tokens, r]) for p, r in zip(samples.prompt, samples.response, strict=True)
    ]
    longest = max(map(len, whole))
    tokens = np.stack([np.pad(x, (0, longest - len(x))) for x in whole])
    return tokens, [len(p.tokens) for p in samples.prompt], [len(x) for x in whole]


def spread(samples: Samples, values: Sequence[np.ndarray]) -> np.ndarray:
    """Values of each response's tokens in the places of `padded`, 0 elsewhere; [N, T]."""
    tokens, starts, ends = padded(samples)
    out = np.zeros(tokens.shape, np.asarray(values[0]).dtype)
    for i, value in enumerate(values):
        out[i, starts[i] : ends[i]] = value
    return out


def random_experts(samples: Samples, model: DecoderConfig) -> list[np.ndarray]:
    """Recorded experts of each sample, int8 [tokens of prompt + response, layers, K].

    Any of them, alike in all copies of a prompt. Of every eighth token none are known (-1), nor of
    a response's last one.
    """

    def draw(seed, tokens):
        rng = np.random.default_rng(seed)
        noise = rng.random((tokens, model.num_layers, model.num_experts))
        chosen = np.argsort(noise, -1)[..., : model.experts_per_token].astype(np.int8)
        return np.where(rng.random((tokens, 1, 1)) < 1 / 8, np.int8(-1), chosen)

    found = []
    for prompt, uid, response in zip(samples.prompt, samples.uid, samples.response, strict=True):
        own = draw(tuple(uid.tolist()), len(response))
        own[-1] = -1
        found.append(np.concatenate([draw(prompt.counter, len(prompt.tokens)), own]))
    return found


def with_experts(
    rows: Rows, placement: Placement, samples: Samples, experts: Sequence[np.ndarray]
) -> Rows:
    """The rows of `samples` with the experts recorded for each of these."""
    column = TokenColumn(experts[0].shape[1:], "int8", prompt=True, fill=-1)
    field = token_field(sequences_of(samples), placement, experts, column)
    return dataclasses.replace(rows, experts=field)


def values_of(samples: Samples, placement: Placement, field: np.ndarray) -> list[np.ndarray]:
    """Per-token values [K, R, L] of each sample's response, in the order of the samples."""
    found = from_token_field(sequences_of(samples), placement, field)
    return [found[i] for i in range(len(samples))]


def mini_batch(rows: Rows, index: int = 0) -> Rows:
    """One mini-batch's rows as device arrays, [R, L] and [R, S]."""
    return jax.tree.map(lambda x: jnp.asarray(x[index]), rows)


def forward_logp(
    model: DecoderConfig, params: dict, responses: Sequence[Response], temperature: float = 1.0
) -> list[np.ndarray]:
    """Log-probs of the responses' tokens in one pass of the trainer over packed rows."""
    return forward_logps(model, [params], responses, temperature)[0]


def forward_logps(
    model: DecoderConfig,
    weights: Sequence[dict],
    responses: Sequence[Response],
    temperature: float = 1.0,
    rows: int = 8,
    row_tokens: int = 128,
) -> list[list[np.ndarray]]:
    """`forward_logp` by each of these weights, in so many rows."""
    samples = Samples(
        [r.prompt for r in responses],
        np.array([(r.prompt.counter, r.sample) for r in responses], np.int64),
        [r.tokens for r in responses],
        [np.ones(len(r.tokens), bool) for r in responses],
    )
    shape = RowShape(1, rows, row_tokens, row_tokens // 16)
    packed, placement = rows_of(samples, shape, shared=True)
    config = ForwardConfig(logp_chunk=32)

    @jax.jit
    def logp(params):
        rows_of_batch = mini_batch(packed)
        return response_logp(params, model, rows_of_batch, np.float32(temperature), config)[0]

    return [values_of(samples, placement, np.asarray(logp(params))[None]) for params in weights]
