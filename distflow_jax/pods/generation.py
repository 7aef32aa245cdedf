"""Estimated time of sampling a step's responses, by a formula.

Decoding is one program that runs until the longest response has ended. The cost of a decode step
depends on the number of running slots.

N responses of a data rank of T chips, S slots, G responses to a prompt; m tokens of the mean
response, L of the longest, p of a prompt. P active parameters per token.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.moe import FEW_TOKENS
from distflow_jax.models.parameters import num_active_params, num_params
from distflow_jax.pods.efficiency import DECODE, PREFILL, Efficiency, Range, decode_of
from distflow_jax.pods.response_lengths import spread
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
    def steps(self) -> float:
        """Decode steps: m N / S, as a free slot is filled at once, and L - m of stragglers.

        Exact if all responses are equally long, and if all start at once.
        """
        return self.mean * self.responses / self.at_once + self.longest - self.mean

    @property
    def last_steps(self) -> float:
        """The last steps, in which slots become idle: 2 (L - m), in which on average half run.

        At most all steps, in which then fewer than half of the slots run on average. The number of
        tokens is N m in any case.
        """
        return min(2 * (self.longest - self.mean), self.steps)

    @property
    def full_steps(self) -> float:
        """The steps before, in which all slots run."""
        return self.steps - self.last_steps

    @property
    def last_running(self) -> float:
        """Slots that run on average in the last steps."""
        left = self.responses * self.mean - self.at_once * self.full_steps
        return left / self.last_steps if self.last_steps else 0.0


@dataclasses.dataclass(frozen=True)
class GenerationEstimate:
    """Seconds of a step's sampling at peak rates; not measured."""

    prefill: Estimate
    full: Estimate  # decode steps with all slots running
    stragglers: Estimate  # later decode steps, in which slots become idle
    steps: float  # decode steps in all

    @property
    def whole(self) -> Estimate:
        """All three, one after the other."""
        return self.prefill + self.full + self.stragglers

    @property
    def total(self) -> float:
        """Seconds in all; nothing overlaps."""
        return self.whole.total

    def expected(self, efficiency: Efficiency) -> Range:
        """Expected seconds in all."""
        return self.whole.expected(efficiency)

    def to_tree(self) -> dict[str, Any]:
        """The estimates as plain JSON values."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        steps = found.pop("steps")
        return {k: e.to_tree() for k, e in found.items()} | {"steps": steps, "total": self.total}


def estimate_generation(
    pod: Pod, model: DecoderConfig, engine: EngineConfig, tensor: int, load: Load
) -> GenerationEstimate:
    """Estimates prefill of N / G prompts, decode steps of all S slots, and those of stragglers.

    A decode step reads all weights once, the keys and values of every running slot, and those of
    its share of prompts (once for all responses). A token has E[l^2] / 2 m tokens of its own
    response before it on average, with lengths l of response_lengths.spread. `tensor`: T.
    """
    prompts = -(-load.responses // load.group)
    step = _Step(pod, model, engine, tensor, load.slots)
    lengths = spread(load.mean, load.longest, load.responses)
    own = float(np.mean(lengths**2) / (2 * np.mean(lengths)))
    return GenerationEstimate(
        step.prefill(prompts, load.prompt),
        step.cost(load, load.at_once, own) * load.full_steps,
        step.cost(load, load.last_running, own) * load.last_steps,
        load.steps,
    )


def _uses_all_weights(pod: Pod, model: DecoderConfig, engine: EngineConfig, slots: int) -> bool:
    """Whether tokens of a decode step pass through all weights: for a mixture, see moe.py.
    `slots`: of a data rank."""
    tokens = slots * (1 + engine.speculative_tokens)
    return not model.num_experts or (pod.chip.platform == "tpu" and tokens <= FEW_TOKENS)


class _Step:
    """Costs on one of the T chips that share a copy of the weights."""

    def __init__(
        self, pod: Pod, model: DecoderConfig, engine: EngineConfig, tensor: int, slots: int
    ):
        self._pod, self._model, self._tensor = pod, model, tensor
        self._weights = weight_bytes(model, engine, tensor)
        # a lookup in the embedding table is no product; a tied table is also the head's matrix
        table = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
        self._every = _uses_all_weights(pod, model, engine, slots)
        passed = num_params(model) if self._every else num_active_params(model)
        self._products = 2 * (passed - table)
        self._prefilled = 2 * (num_active_params(model) - table)
        self._cached = page_bytes(model, engine, tensor) / engine.page_size  # of a token
        self._item = jnp.dtype(engine.dtype).itemsize
        # FLOPs of a query over one token: scores and sums over values, in all layers
        self._attended = 4 * model.num_layers * model.num_heads * model.head_dim

    def cost(self, load: Load, slots: float, own: float) -> Estimate:
        """A decode step of `slots` running slots, each with `own` tokens besides its prompt.

        A layer's products, which read its weights, and its attention, which reads the cache, run
        one after the other.
        """
        cached = slots * own + slots / load.group * load.prompt
        kind, weights = decode_of(self._model), self._read_weights(slots)
        products = self._estimate(kind, slots * self._products, weights)
        flops = slots * self._attended * (own + load.prompt)
        attention = self._estimate(DECODE, flops, cached * self._cached)
        links = self._with_sums(Estimate(0.0, 0.0, {}, 0.0, DECODE, steps=1.0), slots)
        return products + attention + links

    def _read_weights(self, slots: float) -> float:
        """Bytes of the weights that `slots` tokens pass through.

        Of E experts, k for each token, sorted products read a share 1 - (1 - k / E)^slots on
        average.
        """
        experts, chosen = self._model.num_experts, self._model.experts_per_token
        if self._every:
            return self._weights
        idle = (1 - chosen / experts) ** slots
        every = num_params(self._model)
        others = every - num_active_params(self._model)  # than the k experts of a token
        return self._weights * (1 - idle * others / every * experts / (experts - chosen))

    def prefill(self, prompts: int, length: int) -> Estimate:
        """Prefill of `prompts` prompts; causal attention is computed without skipping."""
        tokens = prompts * length
        flops = tokens * (self._prefilled + self._attended * length)
        found = self._estimate(PREFILL, flops, self._weights + tokens * self._cached)
        return self._with_sums(found, tokens)

    def _estimate(self, kind: str, flops: float, accessed: float) -> Estimate:
        """`flops` of all T chips, `accessed` bytes of one."""
        chip = self._pod.chip
        seconds = flops / self._tensor / chip.flops
        return Estimate(seconds, accessed / chip.memory_bandwidth, {}, 0.0, kind)

    def _with_sums(self, one: Estimate, rows: float) -> Estimate:
        """With partial sums after attention and after the MLP of every layer, alone."""
        if self._tensor == 1:
            return one
        size = rows * self._model.hidden_size * self._item
        span = self._pod.interconnect.span(range(self._tensor))
        assert span is not None, self._tensor  # within a host, or whole hosts
        times = 2 * self._model.num_layers
        seconds, latency = (times * span.seconds("all-reduce", n) for n in (size, 0.0))
        return dataclasses.replace(one, links={"tensor": seconds}, exposed=seconds, latency=latency)
