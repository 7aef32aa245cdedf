"""Sizes that no machine of this kind can hold, refused before anything is compiled.

These are bounds, not a plan: each takes one quantity alone, at its least, and refuses it if it is
several times what there is. planning/memory_plan.py says what a run really needs, and that a run
which is a little too large does not fit.
"""

from distflow_jax.config.run_config import Config
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.planning.machine import Machine
from distflow_jax.programs.units import format_bytes
from distflow_jax.rollout.cache_sizing import cache_bytes, page_bytes, weight_bytes
from distflow_jax.rollout.decode_state import EngineConfig

TOKEN_BYTES = 16  # of a token in a batch: its id, mask, log-prob and advantage
ABSURD = 8  # times the memory
SLOT_BYTES = 64  # of a slot, whatever its length
UNKNOWN_MEMORY = 1 << 40  # of a device whose memory is not known


def check_batch_room(config: Config, model: DecoderConfig, machine: Machine, ranks: int) -> None:
    """Raises ValueError for a step, an evaluation or a row that the devices' memory cannot hold.

    `ranks`: data ranks of the training mesh, which share a micro-batch.
    """
    device = machine.memory or UNKNOWN_MEMORY
    data, rollout, training, evaluated = config.data, config.rollout, config.training, config.eval
    longest = data.max_prompt_length + rollout.max_response_length
    longest_eval = data.max_prompt_length + evaluated.max_response_length
    _check(
        f"data.prompts_per_step={data.prompts_per_step} x rollout.num_samples="
        f"{rollout.num_samples} responses of {longest} tokens",
        data.prompts_per_step * rollout.num_samples * longest * TOKEN_BYTES,
        device * machine.devices,
    )
    if evaluated.every:
        _check(
            f"eval.num_prompts={evaluated.num_prompts} x eval.num_samples={evaluated.num_samples} "
            f"responses of {longest_eval} tokens",
            evaluated.num_prompts * evaluated.num_samples * longest_eval * TOKEN_BYTES,
            device * machine.devices,
        )
    rows = max(1, training.micro_batch_rows // ranks)
    _check(
        f"training.micro_batch_rows={training.micro_batch_rows} of training.row_tokens="
        f"{training.row_tokens}",
        # one activation, divided over the devices that share a row
        rows * training.row_tokens * model.hidden_size * 2 // max(1, config.mesh.context),
        device,
    )


def check_sampler_room(
    engine: EngineConfig, model: DecoderConfig, machine: Machine, *, ranks: int, tensor: int
) -> None:
    """Raises ValueError for a sampler with `ranks` data ranks that no device can hold."""
    device = machine.memory or UNKNOWN_MEMORY
    _check(
        f"rollout.num_slots ({engine.decode_slots} on a sampler), rollout.page_size="
        f"{engine.page_size} and rollout.cache_tokens ({engine.cache_tokens}): the cache",
        cache_bytes(model, engine, ranks=ranks, tensor=tensor) + engine.slots // ranks * SLOT_BYTES,
        device,
    )
    _check(
        f"the model's weights of {model.num_layers} layers, hidden_size={model.hidden_size} and "
        f"vocab_size={model.vocab_size}",
        weight_bytes(model, engine, tensor),
        device,
    )
    token = page_bytes(model, engine, tensor) // engine.page_size
    calls = {
        "rollout.prefix_tokens": engine.prefix_tokens * token,
        "rollout.prefill_tokens": engine.prefill_tokens * model.hidden_size * 2,
        "rollout.tokens_per_call": engine.tokens_per_call * engine.slots // ranks * TOKEN_BYTES,
        "rollout.speculative_tokens": engine.speculative_tokens * engine.slots // ranks * 4,
        "rollout.speculative_ngram": engine.speculative_ngram * 4 * engine.slots // ranks,
    }
    for name, needed in calls.items():
        _check(f"{name}={getattr(engine, name.partition('.')[2])}", needed, device)


def _check(what: str, needed: int, memory: int) -> None:
    if needed > ABSURD * memory:
        raise ValueError(
            f"{what}: takes {format_bytes(needed)} or more, but only {format_bytes(memory)} of "
            "memory is available; use smaller values"
        )
