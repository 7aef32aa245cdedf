"""Temporaries of programs by formulas, where nothing is compiled. Bytes of one device.

A tokens of a micro-batch on the device, D hidden, N heads, K key/value heads, H head dim, F mlp,
V vocabulary, t tensor ranks, c bytes of an activation. tests/pods/test_temporaries.py compares the
formulas with programs that libtpu compiled.
"""

import jax
import jax.numpy as jnp

from distflow_jax.dag.plan import Task
from distflow_jax.models import lora
from distflow_jax.models.decoder_config import DecoderConfig, ScalarModel, adapted
from distflow_jax.parallel.rules import device_bytes
from distflow_jax.planning.plan_run import RunPlan
from distflow_jax.planning.run_models import network_of
from distflow_jax.planning.unit_programs import Program
from distflow_jax.training.state import TrainState

_FLOAT = 4  # bytes of a gradient, and of a logit
_MORE = 1.1  # over the sum of the terms, so that few programs take more


def temporary_bytes(planned: RunPlan, program: Program, task: Task) -> int:
    """Temporaries, gradients among them, of a model's part of a program on a training mesh.

    Held at once: what the backward pass keeps of each layer, the working set of one layer, the
    head's weights and its gradients, a chunk of logits, and for each weight of the device's shard a
    copy in the compute dtype and, in training, its gradient, that of the micro-batch and its
    update.
    """
    sizes, config, layout = planned.sizes, planned.source.config, program.unit.layout
    forward, mesh = sizes.forward, program.mesh.shape
    trains = task.node.type == "MODEL_TRAIN"
    item, tensor = jnp.dtype(forward.compute_dtype).itemsize, mesh["tensor"]
    rows = sizes.rows_at_a_time(layout)
    tokens = rows * sizes.packing.limits.tokens // mesh.get("context", 1)
    state = program.given_states[task.state_key]
    params = state.params if isinstance(state, TrainState) else state
    network = adapted(network_of(task.node.role, config), planned.config.lora)
    trained = device_bytes(lora.divide(network, params)[0]) if trains else 0
    wide = [x for x in jax.tree.leaves(params) if x.dtype.itemsize > item]  # what is trained
    copy = sum(device_bytes(x) // x.dtype.itemsize * item for x in wide)

    layers = tokens * item * kept_widths(config, tensor)[forward.remat] * config.num_layers
    # results of a layer and their gradients; in a forward pass results alone
    layer = tokens * item * kept_widths(config, tensor)["none" if trains else "attention"]
    layer += 2 * item * layer_weights(config, tensor, mesh.get("expert", 1))
    if config.num_experts:  # the group's tokens, once for each of their experts
        width = config.hidden_size + 2 * config.mlp_size / tensor
        layer += 4 * item * tokens * config.experts_per_token * width
    head = logits = 0.0
    if not isinstance(network, ScalarModel):
        matrix = config.vocab_size * config.hidden_size / tensor
        copies = 1 if config.tie_embeddings else 2
        gradients = 0 if not trains or planned.config.lora.rank else 2 * _FLOAT
        head = matrix * (item * copies + gradients)
        chunk = forward.logp_chunk if not forward.keep_logits else sizes.packing.limits.tokens
        logits = 3 * _FLOAT * rows * chunk * config.vocab_size / tensor
    whole = layer + head + logits + (layers + 3 * trained if trains else 0)
    # a forward pass alone casts weights as it gathers them, layer by layer
    whole += copy if trains or mesh["fsdp"] == 1 else 0
    return int(_MORE * whole)


def kept_widths(config: DecoderConfig, tensor: int) -> dict[str, float]:
    """Values per token and layer that the backward pass keeps, by training.remat; see
    models/remat.py."""
    c, stream = config, config.hidden_size / tensor  # XLA divides what it keeps of the stream
    heads = 2 * (c.num_heads + c.num_kv_heads) * c.head_dim / tensor
    experts = c.experts_per_token if c.num_experts else 1
    mlp = 2 * experts * c.mlp_size / tensor
    return {
        "full": stream,
        "attention": stream + heads,
        # experts are computed again
        "dots": 2 * stream + heads + (0 if c.num_experts else mlp),
        # some of it in float32: rotations, and what norms and activations are computed from
        "none": 8 * stream + 4 * heads + 3 * mlp,
    }


def layer_weights(config: DecoderConfig, tensor: int, expert: int) -> float:
    """Weights of one layer on a device that has gathered them."""
    c = config
    attention = 2 * (c.num_heads + c.num_kv_heads) * c.head_dim * c.hidden_size
    mlp = 3 * c.hidden_size * c.mlp_size
    return (attention + mlp * max(1, c.num_experts / expert)) / tensor


def sampler_bytes(planned: RunPlan) -> int:
    """Temporaries of a sampler's largest program: logits of a decode step, or a prefill's layer."""
    config, engine = planned.source.config, planned.sizes.engine
    item, tensor = jnp.dtype(engine.dtype).itemsize, planned.sizes.rollout_tensor
    slots = engine.decode_slots / planned.sizes.sampler_ranks
    logits = 3 * _FLOAT * slots * config.vocab_size / tensor
    prefill = item * engine.prefill_tokens * kept_widths(config, tensor)["none"] / 2
    return int(max(logits, prefill))
