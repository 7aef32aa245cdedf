"""The trainer's programs, traced over shapes alone, and the work they execute, by a formula."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from distflow_jax.batch import Rows
from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.training_config import OptimizerConfig
from distflow_jax.models.decoder_config import DecoderConfig, scalar_model
from distflow_jax.models.grouped_matmul import block_size
from distflow_jax.parallel.rules import rows_spec
from distflow_jax.stages.predictions import make_logp, make_values
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.objectives.policy_objective import PolicyBatch, policy_objective
from distflow_jax.training.optimizer import learning_rate, make_optimizer
from distflow_jax.training.state import abstract_state, sharded_params
from distflow_jax.training.update import UpdateShape, make_update
from support.tiny_model import TINY, mesh_of

MODEL = dataclasses.replace(TINY, num_layers=3)
MIXTURE = dataclasses.replace(MODEL, mlp_size=32, num_experts=8, experts_per_token=2)
MINI_BATCHES, ROWS, TOKENS, SEQUENCES, MICRO = 2, 8, 64, 4, 2


def abstract_rows(mesh) -> Rows:
    layout = NamedSharding(mesh, rows_spec(mesh))

    def of(size, dtype=jnp.int32):
        return jax.ShapeDtypeStruct((MINI_BATCHES, ROWS, size), dtype, sharding=layout)

    tokens, sequences = of(TOKENS), of(SEQUENCES)
    return Rows(
        *[tokens] * 4,
        response_mask=of(TOKENS, bool),
        parent=sequences,
        group=sequences,
        member=sequences,
        valid=of(SEQUENCES, bool),
        length=sequences,
    )


def trace(
    kind: str,
    *,
    remat: str = "full",
    block: int = 0,
    chunk: int = 16,
    fsdp: int = 1,
    tensor: int = 1,
    expert: int = 1,
    model: DecoderConfig = MODEL,
):
    """jax.stages.Traced of logp, values or update."""
    mesh = mesh_of(fsdp, tensor, expert=expert)
    forward = ForwardConfig(remat=remat, logp_chunk=chunk, attention_block=block)
    shape = UpdateShape(mesh, MICRO, 14)
    rows, temperature = abstract_rows(mesh), jax.ShapeDtypeStruct((), jnp.float32)
    if kind == "logp":
        logp = make_logp(shape=shape, model=model, forward=forward)
        return logp.trace(sharded_params(model, mesh), rows, temperature)
    if kind == "values":
        critic = scalar_model(model)
        values = make_values(shape=shape, model=critic, forward=forward)
        return values.trace(sharded_params(critic, mesh), rows)
    config = OptimizerConfig()
    optimizer = make_optimizer(config, 4)
    objective = policy_objective(model, AlgorithmConfig(), forward, max_response=14)
    update = make_update(optimizer, learning_rate(config, 4), shape=shape, objective=objective)
    field = rows.tokens.update(dtype=jnp.float32)
    batch = PolicyBatch(rows, field, field, field, None)
    state = abstract_state(model, optimizer, mesh)
    return update.trace(state, batch, jax.ShapeDtypeStruct((), jnp.int32), temperature)


def expert_rows(model: DecoderConfig, devices: int = 1) -> float:
    """Rows that meet an expert's matrices for each token: blocks are counted as many as there may
    be, and whole. `devices` that share the experts have a part of them for the tokens of all."""
    tokens, experts = devices * MICRO * TOKENS, model.num_experts // devices
    rows = tokens * model.experts_per_token
    size = block_size(rows, experts)
    return (rows // size + experts) * size / tokens


def executed_flops(
    kind: str, *, remat: str = "full", model: DecoderConfig = MODEL, expert: int = 1
) -> float:
    """Where every row is full of response tokens. Attention is full: what is masked is computed."""
    c = model
    heads = c.num_heads * c.head_dim
    weights = 2 * c.hidden_size * (heads + c.num_kv_heads * c.head_dim)  # query, output; key, value
    mlp = 3 * c.hidden_size * c.mlp_size
    if c.num_experts:
        mlp = c.hidden_size * c.num_experts + expert_rows(c, expert) * mlp
    weights += mlp
    layers = c.num_layers * (2 * weights + 2 * 2 * TOKENS * heads)
    head = 2 * c.vocab_size * c.hidden_size
    if kind == "logp":
        return MINI_BATCHES * ROWS * TOKENS * (layers + head)
    if kind == "values":
        return MINI_BATCHES * ROWS * TOKENS * (layers + 2 * c.hidden_size)
    # the backward pass costs twice the forward; the head's logits are always computed again
    backward = 2 * layers + 3 * head
    return ROWS * TOKENS * (layers + head + backward) + flops_again(remat, layers, model=model)


def flops_again(
    remat: str, layers: float = 0.0, *, scores: bool = True, model: DecoderConfig = MODEL
) -> float:
    """Work of a backward pass that does not find everything in memory; `layers`: of a token's
    forward pass. `scores`: whether attention's have to be made for their gradient."""
    c = model
    heads = c.num_heads * c.head_dim
    again = {"none": 0, "dots": 2 * TOKENS * heads * scores}
    again["attention"] = again["dots"] + 2 * heads * c.hidden_size + 4 * c.hidden_size * c.mlp_size
    # all of a layer but its last product, whose value no gradient needs; of a mixture the router's
    # does
    last = 0 if c.num_experts else 2 * c.hidden_size * c.mlp_size
    again["full"] = layers / c.num_layers - last
    return ROWS * TOKENS * c.num_layers * again[remat]
