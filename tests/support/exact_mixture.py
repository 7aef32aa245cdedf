"""A mixture of experts in float64 NumPy: one sequence, whole, with nothing that a program has."""

from typing import NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict

from distflow_jax.models import rope
from distflow_jax.models.decoder_config import DecoderConfig


class Exact(NamedTuple):
    """The exact results for a sequence of T tokens."""

    logp: np.ndarray  # [T - 1]: of every token but the first
    own: np.ndarray  # [T, layers, K]: the routers' choice, most probable first
    lead: np.ndarray  # [T, layers]: of the last expert chosen over the first that is not


def exact(c: DecoderConfig, params: dict, tokens, recorded=None) -> Exact:
    """`recorded` [T, layers, K]: the experts that tokens go through, -1 for the routers' choice."""
    p = {path: np.asarray(x, np.float64) for path, x in flatten_dict(params, sep="/").items()}
    length, k = len(tokens), c.experts_per_token
    angle = np.arange(length)[:, None, None] * np.float64(
        rope.inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
    )

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + c.norm_eps) * scale

    def rotated(x):  # [T, heads, H]
        a, b = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x, own, lead = p["embed/embedding"][tokens], [], []
    for layer in range(c.num_layers):
        w = {path.removeprefix("layers/"): a[layer] for path, a in p.items() if "layers/" in path}
        h = norm(x, w["attention_norm"])
        q, key, v = (np.einsum("td,dnh->tnh", h, w[name]) for name in ("query", "key", "value"))
        if c.qk_norm:
            q, key = norm(q, w["query_norm"]), norm(key, w["key_norm"])
        groups = c.num_heads // c.num_kv_heads
        q, key, v = rotated(q), np.repeat(rotated(key), groups, 1), np.repeat(v, groups, 1)
        scores = np.einsum("tnh,snh->nts", q, key) / np.sqrt(c.head_dim)
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        x = x + np.einsum("nts,snh,nhd->td", weight, v, w["output"])
        h = norm(x, w["mlp_norm"])
        probability = np.exp(h @ w["router"])
        probability /= probability.sum(-1, keepdims=True)
        order = np.argsort(-probability, axis=-1, kind="stable")
        ranked = np.take_along_axis(probability, order, -1)
        own.append(order[:, :k])
        lead.append(ranked[:, k - 1] - ranked[:, k])
        chosen = order[:, :k]
        if recorded is not None:
            chosen = np.where(recorded[:, layer, :1] >= 0, recorded[:, layer], chosen)
        is_chosen = np.zeros(probability.shape, bool)
        np.put_along_axis(is_chosen, chosen.astype(int), True, -1)
        share = np.where(is_chosen, probability, 0)
        if c.norm_topk:
            share /= share.sum(-1, keepdims=True)
        gate, up = (np.einsum("td,edf->tef", h, w[name]) for name in ("gate", "up"))
        inner = gate / (1 + np.exp(-gate)) * up
        x = x + np.einsum("te,tef,efd->td", share, inner, w["down"])
    hidden = norm(x, p["final_norm"])
    logits = hidden @ (p["embed/embedding"].T if c.tie_embeddings else p["head"])
    logits -= logits.max(-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    logp = log_p[np.arange(length - 1), np.asarray(tokens)[1:]]
    return Exact(logp, np.stack(own, 1), np.stack(lead, 1))


def same_sets(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether the experts of each token are the same, whatever their order; [..., K] -> [...]."""
    return (np.sort(a, -1) == np.sort(b, -1)).all(-1)
