"""Sizes that no machine of this kind can hold, refused before anything is compiled.

These are bounds, not a plan: each takes one quantity alone, at its least, and refuses it if it is
several times what there is. planning/memory_plan.py says what a run really needs, and that a run
which is a little too large does not fit.
"""

from distflow_jax.config.run_config import Config
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.planning.machine import Machine
from distflow_jax.rollout.cache_sizing import TOKEN_BYTES, check_room

UNKNOWN_MEMORY = 1 << 40  # of a device whose memory is not known


def check_batch_room(config: Config, model: DecoderConfig, machine: Machine, ranks: int) -> None:
    """Raises ValueError for a step, an evaluation or a row that the devices' memory cannot hold.

    `ranks`: data ranks of the training mesh, which share a micro-batch.
    """
    device = machine.memory or UNKNOWN_MEMORY
    data, rollout, training, evaluated = config.data, config.rollout, config.training, config.eval
    longest = data.max_prompt_length + rollout.max_response_length
    longest_eval = data.max_prompt_length + evaluated.max_response_length
    responses = data.prompts_per_step * rollout.num_samples
    step = (
        f"data.prompts_per_step={data.prompts_per_step} x rollout.num_samples="
        f"{rollout.num_samples} responses of {longest} tokens"
    )
    needed = {step: responses * longest * TOKEN_BYTES}
    if evaluated.every:
        evaluation = (
            f"eval.num_prompts={evaluated.num_prompts} x eval.num_samples={evaluated.num_samples} "
            f"responses of {longest_eval} tokens"
        )
        responses = evaluated.num_prompts * evaluated.num_samples
        needed[evaluation] = responses * longest_eval * TOKEN_BYTES
    check_room(needed, device * machine.devices)
    rows = max(1, training.micro_batch_rows // ranks)
    activation = (
        f"training.micro_batch_rows={training.micro_batch_rows} of training.row_tokens="
        f"{training.row_tokens}"
    )
    # one, divided over the devices that share a row
    size = rows * training.row_tokens * model.hidden_size * 2 // max(1, config.mesh.context)
    check_room({activation: size}, device)
