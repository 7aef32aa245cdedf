"""Estimated time of sampling a step's responses, by a formula.

Decoding is one program that runs until the longest response has ended. The cost of a decode step
depends on the number of running slots.

N responses of a data rank of T chips, S slots, G responses to a prompt; m tokens of the mean
response, L of the longest, p of a prompt. P active parameters per token.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.parameters import num_active_params
from distflow_jax.pods.roofline import Estimate
from distflow_jax.pods.topology import Pod
from distflow_jax.rollout.cache_sizing import page_bytes, weight_bytes
from distflow_jax.rollout.decode_state import EngineConfig


@dataclasses.dataclass(frozen=True)
class Load:
    """The work of one data rank of a sampler in a step. Lengths in tokens."""

    responses: int  # N
    slots: int  # S
    prompt: int  # p
    mean: float  # m
    longest: int  # L
    group: int  # G

    @property
    def at_once(self) -> int:
        """Number of slots in use: no more than there are responses."""
        return min(self.responses, self.slots)

    @property
    def full_steps(self) -> float:
        """Decode steps with all slots running: m N / S, as a free slot is filled at once."""
        return self.mean * self.responses / self.at_once

    @property
    def last_steps(self) -> float:
        """The straggler term, L - m: steps after the last response has started.

        Exact if all responses are equally long, and if all start at once.
        """
        return self.longest - self.mean


@dataclasses.dataclass(frozen=True)
class GenerationEstimate:
    """Seconds of a step's sampling at peak rates; not measured."""

    prefill: Estimate
    full: Estimate  # decode steps with all slots running
    stragglers: Estimate  # later decode steps, in which slots become idle
    steps: float  # decode steps in all

    @property
    def whole(self) -> Estimate:
        """The sum of all three."""
        return self.prefill + self.full + self.stragglers

    @property
    def total(self) -> float:
        """Seconds in all; nothing overlaps."""
        return self.prefill.total + self.full.total + self.stragglers.total

    def to_tree(self) -> dict[str, Any]:
        """The estimates as plain JSON values."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        steps = found.pop("steps")
        return {k: e.to_tree() for k, e in found.items()} | {"steps": steps, "total": self.total}


def estimate_generation(
    pod: Pod, model: DecoderConfig, engine: EngineConfig, tensor: int, load: Load
) -> GenerationEstimate:
    """Estimates prefill of N / G prompts, m N / S decode steps of S slots, L - m steps of S / 2.

    A decode step reads all weights once, the keys and values of every slot (half a mean response),
    and those of every prompt with running responses (once for all of them). `tensor`: T.
    """
    prompts = -(-load.responses // load.group)
    step = _Step(pod, model, engine, tensor)
    full = step.cost(load, load.at_once, load.mean / 2)
    last = step.cost(load, load.at_once / 2, (load.mean + load.longest) / 2)
    return GenerationEstimate(
        step.prefill(prompts, load.prompt),
        _times(full, load.full_steps),
        _times(last, load.last_steps),
        load.full_steps + load.last_steps,
    )


class _Step:
    """Costs on one of the T chips that share a copy of the weights."""

    def __init__(self, pod: Pod, model: DecoderConfig, engine: EngineConfig, tensor: int):
        self._pod, self._model, self._tensor = pod, model, tensor
        self._weights = weight_bytes(model, engine, tensor)
        # a lookup in the embedding table is no product; a tied table is also the head's matrix
        table = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
        self._products = 2 * (num_active_params(model) - table)
        self._cached = page_bytes(model, engine, tensor) / engine.page_size  # of a token
        self._item = jnp.dtype(engine.dtype).itemsize
        # FLOPs of a query over one token: scores and sums over values, in all layers
        self._attended = 4 * model.num_layers * model.num_heads * model.head_dim

    def cost(self, load: Load, slots: float, own: float) -> Estimate:
        """A decode step of `slots` running slots, each with `own` tokens besides its prompt."""
        flops = slots * (self._products + self._attended * (own + load.prompt)) / self._tensor
        cached = slots * own + slots / load.group * load.prompt
        return self._estimate(flops, self._weights + cached * self._cached, slots)

    def prefill(self, prompts: int, length: int) -> Estimate:
        """Prefill of `prompts` prompts; causal attention is computed without skipping."""
        tokens = prompts * length
        flops = tokens * (self._products + self._attended * length) / self._tensor
        return self._estimate(flops, self._weights + tokens * self._cached, tokens)

    def _estimate(self, flops: float, accessed: float, rows: float) -> Estimate:
        chip = self._pod.chip
        links, exposed = {}, 0.0
        if self._tensor > 1:
            # partial sums after attention and after the MLP of every layer; nothing overlaps
            size = rows * self._model.hidden_size * self._item
            span = self._pod.interconnect.span(range(self._tensor))
            assert span is not None, self._tensor  # within a host, or whole hosts
            exposed = 2 * self._model.num_layers * span.seconds("all-reduce", size)
            links = {"tensor": exposed}
        return Estimate(flops / chip.flops, accessed / chip.memory_bandwidth, links, exposed)


def _times(one: Estimate, count: float) -> Estimate:
    links = {axes: count * seconds for axes, seconds in one.links.items()}
    return Estimate(count * one.compute, count * one.memory, links, count * one.exposed)
