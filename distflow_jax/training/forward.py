"""The trainer's forward pass over packed rows: log-probs and entropies, values, scores.

R rows, L tokens per row, S sequences per row, D hidden, V vocabulary.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from distflow_jax.algorithms.packed import last_index, per_token
from distflow_jax.batch import RowImages, Rows
from distflow_jax.models.attention import UNLIMITED, InRow, packed_mask, within
from distflow_jax.models.block_attention import block_attention
from distflow_jax.models.decoder_config import DecoderConfig, ScalarModel
from distflow_jax.models.kernels.library_attention import (
    BY_MASK,
    BY_SEGMENTS,
    Segments,
    in_segments,
)
from distflow_jax.models.kernels.tiles import Reach, Tiles, either, tiles_of
from distflow_jax.models.moe import replay
from distflow_jax.models.transformer import Attend, Seen, bind
from distflow_jax.models.vision.chunks import encode_chunks
from distflow_jax.models.vision.patch_attention import WHOLE, Form
from distflow_jax.parallel import context_parallel
from distflow_jax.parallel.rules import constrain, local, mesh_axes, width
from distflow_jax.training.expert_balance import balancing_route, watching
from distflow_jax.training.token_logp import token_logp


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Settings of the trainer's forward pass."""

    compute_dtype: str = "float32"  # dtype of activations and of the weights' working copy
    logp_chunk: int = 128  # positions per row with logits in memory at a time
    remat: str = "full"  # results that the backward pass recomputes, see models/remat.py
    attention_block: int = 0  # tokens of a tile's side, see models/kernels/tiles.py; 0: no tiles
    keep_logits: bool = False  # keep logits for the backward pass instead of recomputing them
    microbatches: int = 0  # micro-batches in the pipeline at once; 0: one per pipeline stage
    repeats: int = 1  # times that a micro-batch passes all pipeline stages
    # one of block_attention.IMPLEMENTATIONS for tiles, else of library_attention.py's
    attention_by: str = "loops"
    tower: Form = WHOLE  # of attention between patches, where the model has a tower


_LOGITS_BYTES = 2**28  # of a device, for a micro-batch's logits at most
_LOGITS_TOKENS = 512  # larger products are not faster, and a row's last chunk is half empty


def logits_in_memory(
    logp_chunk: int, row_tokens: int, *, rows: int, vocab: int, remat: str
) -> tuple[int, bool]:
    """ForwardConfig.logp_chunk and keep_logits for training.logp_chunk (0: chosen by the sizes).

    `rows` of a micro-batch and `vocab` entries are those of one device. Short chunks are slow,
    because each adds up a gradient of the whole weight, [V, D].
    """
    fits = max(1, _LOGITS_BYTES // (4 * rows * vocab))
    possible = [n for n in range(1, min(fits, row_tokens) + 1) if row_tokens % n == 0]
    best = max(1, _LOGITS_TOKENS // rows)
    chunk = logp_chunk or min(possible, key=lambda n: abs(math.log(n / best)))
    return chunk, remat == "none" and row_tokens <= fits


def parent_segment(rows: Rows) -> jax.Array:
    """Segment of each token's prompt, or its own segment if not shared; int32 [R, L]."""
    sequences = rows.parent.shape[1]
    is_sequence = (rows.segment > 0) & (rows.segment <= sequences)
    return jnp.where(is_sequence, per_token(rows.parent, rows.segment), rows.segment)


class _Pairs(NamedTuple):
    """Pairs of tokens that attention allows; all arrays have rows as their first dim."""

    allowed: Tiles | Segments | jax.Array  # tiles, segments, or the mask [R, L, L]
    near: Tiles | None  # tiles with a pair within the window, for layers with one
    positions: tuple[jax.Array, jax.Array] | None  # of queries and keys, for models with windows


def row_attention_of(rows: Rows, config: ForwardConfig, model: DecoderConfig) -> Attend:
    """Attention over packed rows, or over the shards of rows that devices share."""
    sliding_window = model.sliding_window
    segment, parent = (
        context_parallel.divide(rows.segment),
        context_parallel.divide(parent_segment(rows)),
    )
    in_row, block = None, config.attention_block
    place = jax.lax.broadcasted_iota(jnp.int32, rows.segment.shape, 1)
    until, position = place, rows.position
    if model.image_both_ways and rows.images is not None:
        first, until = image_ends(rows.images, rows.segment, model.vision.patches_per_feature)
        # a window reaches back to the image's first token at least
        position = jnp.minimum(position, position - (place - first) + (sliding_window - 1))
    if context_parallel.context_shards() > 1 or until is not place:
        in_row = InRow(
            context_parallel.divide(until),
            context_parallel.in_gathered_order(rows.segment),
            context_parallel.in_gathered_order(place),
        )
    positions = near = None
    if sliding_window:
        positions = (
            context_parallel.divide(position),
            context_parallel.in_gathered_order(rows.position),
        )
    if block:
        across = mesh_axes("context")
        assert not across or segment.shape[1] % (2 * block) == 0, (segment.shape, block)
        allowed = tiles_of(segment, parent, block, in_row)
        if sliding_window:
            near = tiles_of(segment, parent, block, in_row, Reach(*positions, sliding_window))
    elif config.attention_by in BY_SEGMENTS:
        assert in_row is None, "segments are those of whole rows, see implementation_table.py"
        allowed, positions = Segments(segment, rows.position, rows.valid), None
    else:
        allowed = packed_mask(segment, parent, in_row)

    def attend(*arguments):
        return _attend_pairs(config.attention_by, sliding_window, *arguments)

    return Partial(attend, _Pairs(allowed, near, positions))


def _attend_pairs(
    implementation: str, sliding_window: int, pairs: _Pairs, q, k, v, _, window=None
) -> tuple[jax.Array, None]:
    """An Attend, given the first three arguments: attention over the allowed pairs.

    Layers with a `window` use the pairs within it only. `implementation` is attention_by of a
    ForwardConfig.
    """
    allowed, near, positions = pairs
    across, tiled = mesh_axes("context"), isinstance(allowed, Tiles)
    of_pairs = ("batch", "length", "length")
    if not isinstance(allowed, jax.Array):
        of_pairs = type(allowed)(*(("batch", *["length"] * (x.ndim - 1)) for x in allowed))

    def on_device(q, k, v, allowed, *reach):
        if tiled:
            return block_attention(q, k, v, allowed, across, *(reach or (None,)), implementation)
        if isinstance(allowed, Segments):
            return in_segments(
                implementation, q, k, v, allowed, sliding_window, *(reach or (None,))
            )
        if across:
            k, v = (jax.lax.all_gather(x, across, axis=1, tiled=True) for x in (k, v))
        return BY_MASK[implementation](q, k, v, allowed)

    heads = ("batch", "length", "heads", "head_dim")
    # the mesh divides the query heads, but there are too few key/value heads to divide
    if k.shape[2] % width("heads"):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    arguments, dims = (q, k, v, allowed), (heads, heads, heads, of_pairs)
    if window is not None and tiled:
        tiles = either(window < UNLIMITED, near, allowed)
        arguments = (q, k, v, tiles, Reach(*positions, window))
        dims = (*dims, Reach(("batch", "length"), ("batch", "length"), ()))
    elif window is not None and isinstance(allowed, Segments):
        arguments, dims = (*arguments, window), (*dims, ())
    elif window is not None:
        arguments = (q, k, v, allowed & within(*positions, window))
    return local(on_device, arguments, dims, heads, shape=q.shape), None


def packed_hidden(
    params: Any, model: DecoderConfig, rows: Rows, config: ForwardConfig
) -> tuple[jax.Array, jax.Array]:
    """Hidden states [R, L, D] of packed rows, and the head's weight [V, D].

    If c devices share a row, hidden states are those of its shards (parallel/context_parallel.py):
    [R c, L / c, D]. A mixture replays `rows.experts` if set, and reports its routers' statistics to
    `expert_balance.watched`.
    """
    dtype = jnp.dtype(config.compute_dtype)
    decoder = bind(model, params)
    found = watching() if model.num_experts else None
    route, recorded = None, None
    if found is not None:
        route = balancing_route(rows, model)
    elif rows.experts is not None:
        route = replay(model.experts_per_token)
    if rows.experts is not None:  # layer by layer
        recorded = jnp.moveaxis(context_parallel.divide(rows.experts), 2, 0)
        recorded = constrain(recorded, "layers", "shards", "length", "activation")
    seen, position = None, rows.position
    if rows.images is not None:
        remat, form = config.remat, config.tower
        seen = row_features(params, model, rows.images, dtype=dtype, remat=remat, form=form)
        position = rows.position if rows.images.rotary is None else rows.images.rotary
    hidden, kept = decoder.hidden(
        context_parallel.divide(rows.tokens),
        context_parallel.divide(position),
        row_attention_of(rows, config, model),
        layer_inputs=recorded,
        dtype=dtype,
        remat=config.remat,
        route=route,
        seen=seen,
        microbatches=config.microbatches,
        repeats=config.repeats,
    )
    if found is not None:
        found.append(kept[1])
    return hidden, decoder.head_weight(dtype)


def response_logp(
    params: Any, model: DecoderConfig, rows: Rows, temperature: jax.Array, config: ForwardConfig
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies of softmax(logits / temperature), float32 [R, L] each.

    0 outside response_mask. Fields of `rows` are [R, L] and [R, S]; `temperature` is a scalar.
    Logits are computed only at positions that predict a response token.
    """
    hidden, weight = packed_hidden(params, model, rows, config)
    # each shard of a row predicts the tokens that follow its hidden states, so none of these moves
    is_here, source = context_parallel.located(rows.previous)
    mask = context_parallel.of_each_shard(rows.response_mask) & is_here
    # response positions first, so that the vocabulary loop ends where the fullest row ends
    order = jnp.argsort(~mask, axis=1, stable=True).astype(jnp.int32)
    chosen = order[:, : _most_predicted(hidden.shape[1], rows, config.logp_chunk)]
    source = jnp.take_along_axis(source, chosen, axis=1)
    gathered = jnp.take_along_axis(hidden, source[..., None], axis=1)
    gathered = constrain(gathered, "batch", "length", "activation")
    target = jnp.take_along_axis(context_parallel.of_each_shard(rows.tokens), chosen, axis=1)
    count = mask.sum(axis=1, dtype=jnp.int32)
    chunk, keep = config.logp_chunk, config.keep_logits
    found = token_logp(gathered, weight, target, count, temperature, chunk, keep)
    back = jnp.argsort(order, axis=1)

    # 0 after the count, so the sum takes each token from the shard that predicts it
    def in_rows(x):
        x = jnp.pad(x, ((0, 0), (0, order.shape[1] - x.shape[1])))
        return context_parallel.sum_over_shards(jnp.take_along_axis(x, back, axis=1))

    logp, entropy = map(in_rows, found)
    return logp, entropy


def _most_predicted(length: int, rows: Rows, chunk: int) -> int:
    """Largest number of tokens that a row's shard of `length` tokens predicts, in whole chunks.

    Each token predicts the next one; the last of a shared prompt predicts the first of every
    response.
    """
    most = -(-(length + rows.valid.shape[1]) // chunk) * chunk
    return min(rows.tokens.shape[1], most)


def _scalars(params: Any, model: ScalarModel, rows: Rows, config: ForwardConfig) -> jax.Array:
    """The scalar head on every hidden state, float32 [R, L], in whole rows."""
    hidden, _ = packed_hidden(params["trunk"], model.trunk, rows, config)
    # in float32 for any compute dtype: bfloat16 has too few digits to tell returns apart
    return context_parallel.unite(
        jnp.einsum("RLD,D->RL", hidden.astype(jnp.float32), params["head"])
    )


def response_values(
    params: Any, model: ScalarModel, rows: Rows, config: ForwardConfig
) -> jax.Array:
    """Expected return before each token under response_mask, float32 [R, L]; 0 elsewhere.

    Taken from the hidden state that predicts the token, so it does not depend on the token.
    """
    scalars = _scalars(params, model, rows, config)
    values = jnp.take_along_axis(scalars, rows.previous, axis=1)
    return jnp.where(rows.response_mask, values, 0.0)


def sequence_scores(
    params: Any, model: ScalarModel, rows: Rows, config: ForwardConfig
) -> jax.Array:
    """A reward model's score of each sequence, float32 [R, S]; 0 for empty slots.

    Taken from the hidden state of the last token, which is the prompt's if the response is empty.
    """
    size = rows.valid.shape[1]
    # shared prompts have segments above S, at most one for each sequence
    last = last_index(rows.segment > 0, rows.segment, 2 * size + 1)
    own, prompt = last[:, 1 : size + 1], jnp.take_along_axis(last, rows.parent, axis=1)
    place = jnp.maximum(jnp.where(own >= 0, own, prompt), 0)
    scalars = _scalars(params, model, rows, config)
    return jnp.where(rows.valid, jnp.take_along_axis(scalars, place, axis=1), 0.0)


def row_features(
    params: Any, model: DecoderConfig, images: RowImages, *, dtype: Any, remat: str, form: Form
) -> Seen:
    """The features of rows, or of their context shards; fields of `images` are [R, ...]."""
    assert model.vision is not None, "rows have images only where the model has a tower"
    found = encode_chunks(
        model.vision,
        params["vision"],
        images.patches,
        images.positions,
        images.segments,
        dtype=dtype,
        remat=remat,
        form=form,
    )
    deep = context_parallel.of_each_shard(found[:, 1:]) if found.shape[1] > 1 else None
    features = context_parallel.of_each_shard(found[:, 0])
    return Seen(context_parallel.divide(images.patch), features, deep)


def image_ends(images: RowImages, segment: jax.Array, merge: int) -> tuple[jax.Array, jax.Array]:
    """Places in its row of the first and last token of each token's image, int32 [R, L] each.

    Those of text are its own place. Segments with the same picture, responses of an environment's,
    share its features alone, and so do two showings in one response. Fields of `images` are
    [R, ...], `segment` is int32 [R, L]; `merge`: patches of a feature.
    """
    number, length = _image_numbers(images, merge), segment.shape[1]
    place = jax.lax.broadcasted_iota(jnp.int32, segment.shape, 1)
    one, other = slice(None, -1), slice(1, None)
    together = (number[:, one] == number[:, other]) & (segment[:, one] == segment[:, other])
    together &= number[:, one] > 0
    begins = jnp.pad(~together, ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.pad(~together, ((0, 0), (0, 1)), constant_values=True)
    first = jax.lax.cummax(jnp.where(begins, place, 0), axis=1)
    last = jax.lax.cummin(jnp.where(ends, place, length), axis=1, reverse=True)
    return first, last


def _image_numbers(images: RowImages, merge: int) -> jax.Array:
    """Which image of its row a token stands for, int32 [R, L]; 0 for text."""
    rows, chunks, size = images.segments.shape
    # numbers are those of a chunk, and so are different ones in another
    chunk = jnp.arange(chunks, dtype=jnp.int32)[None, :, None]
    of_feature = (images.segments + chunk * (size + 1)).reshape(rows, -1)[:, ::merge]
    found = jnp.take_along_axis(of_feature, jnp.maximum(images.patch, 0), axis=1)
    return jnp.where(images.patch >= 0, found, 0)
