"""How long a step's responses take to sample, by a formula: decoding is one program that runs until
the longest response has ended, and what a step of it costs depends on who is still at work.

N responses of a data rank of T chips, S slots, G responses to a prompt; m tokens of the mean
response, L of the longest, p of a prompt. P parameters that a token meets.
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
    """What one data rank of a sampler has to do in a step. Lengths in tokens."""

    responses: int  # N
    slots: int  # S
    prompt: int  # p
    mean: float  # m
    longest: int  # L
    group: int  # G

    @property
    def at_once(self) -> int:
        """Slots that are ever used."""
        return min(self.responses, self.slots)

    @property
    def full_steps(self) -> float:
        """Decode steps with every slot at work: m N / S, as a slot that ends is filled again."""
        return self.mean * self.responses / self.at_once

    @property
    def last_steps(self) -> float:
        """The straggler term, L - m: steps from when no response is left to be started until the
        longest has ended. Exact where all are equally long, and where all start at once."""
        return self.longest - self.mean


@dataclasses.dataclass(frozen=True)
class GenerationEstimate:
    """Seconds of a step's sampling at peak rates; not measured."""

    prefill: Estimate
    full: Estimate  # decode steps with all slots at work
    stragglers: Estimate  # those after, in which slots fall idle
    steps: float

    @property
    def whole(self) -> Estimate:
        """All of it."""
        return self.prefill + self.full + self.stragglers

    @property
    def total(self) -> float:
        """Seconds: one part after the other."""
        return self.prefill.total + self.full.total + self.stragglers.total

    def to_tree(self) -> dict[str, Any]:
        """Plain numbers, as JSON has them."""
        parts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        steps = parts.pop("steps")
        return {k: e.to_tree() for k, e in parts.items()} | {"steps": steps, "total": self.total}


def estimate_generation(
    pod: Pod, model: DecoderConfig, engine: EngineConfig, tensor: int, load: Load
) -> GenerationEstimate:
    """Prefill of N / G prompts, then m N / S decode steps of S slots, then L - m of S / 2.

    A decode step reads all weights once, and the keys and values of every slot (half a mean
    response) and of every prompt that is being answered (once for all who answer it).
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
    """Costs on a chip, of T that share a copy of the weights."""

    def __init__(self, pod: Pod, model: DecoderConfig, engine: EngineConfig, tensor: int):
        self._pod, self._model, self._tensor = pod, model, tensor
        self._weights = weight_bytes(model, engine, tensor)
        # the table is looked up in, and no product where the head is another
        table = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
        self._products = 2 * (num_active_params(model) - table)
        self._cached = page_bytes(model, engine, tensor) / engine.page_size  # of a token
        self._item = jnp.dtype(engine.dtype).itemsize
        # all scores and all sums over values, of a query over one token
        self._attended = 4 * model.num_layers * model.num_heads * model.head_dim

    def cost(self, load: Load, slots: float, own: float) -> Estimate:
        """A decode step of `slots`, each with `own` tokens beside its prompt."""
        flops = slots * (self._products + self._attended * (own + load.prompt)) / self._tensor
        cached = slots * own + slots / load.group * load.prompt
        return self._estimate(flops, self._weights + cached * self._cached, slots)

    def prefill(self, prompts: int, length: int) -> Estimate:
        """Reading prompts; causal attention is computed whole."""
        tokens = prompts * length
        flops = tokens * (self._products + self._attended * length) / self._tensor
        return self._estimate(flops, self._weights + tokens * self._cached, tokens)

    def _estimate(self, flops: float, accessed: float, rows: float) -> Estimate:
        chip = self._pod.chip
        links, exposed = {}, 0.0
        if self._tensor > 1:
            # partial sums behind attention and behind the MLP of every layer; nothing can go on
            size = rows * self._model.hidden_size * self._item
            span = self._pod.interconnect.span(range(self._tensor))
            assert span is not None, self._tensor  # a part of a host, or whole ones
            exposed = 2 * self._model.num_layers * span.seconds("all-reduce", size)
            links = {"tensor": exposed}
        return Estimate(flops / chip.flops, accessed / chip.memory_bandwidth, links, exposed)


def _times(one: Estimate, count: float) -> Estimate:
    links = {axes: count * seconds for axes, seconds in one.links.items()}
    return Estimate(count * one.compute, count * one.memory, links, count * one.exposed)
