"""GRPO of a model on a machine: the common part of configs/qwen*.py.

Such a config takes an argument MACHINE,CONTEXT: `--config=configs/qwen25_7b.py:v5e-64,2k` is for
the TPU slice v5e-64 and sequences of up to 2,048 tokens. Machines have the names of
planning/machine_names.py: v5p-8 counts two cores of each chip, so it has 4; h100-8 has 8 GPUs.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.data_config import DataConfig, RewardConfig
from distflow_jax.config.mesh_config import MeshConfig
from distflow_jax.config.rollout_config import RolloutConfig
from distflow_jax.config.run_config import Config, ModelSourceConfig
from distflow_jax.config.training_config import LoraConfig, OptimizerConfig, TrainingConfig
from distflow_jax.config.upkeep_config import CheckpointConfig, HealthConfig
from distflow_jax.planning.machine_names import NamedMachine, named_machine

# tokens of the longest prompt and response
CONTEXTS = {"2k": 2048, "8k": 8192, "32k": 32_768, "64k": 65_536}
GPUS_OF_24_GB = ("rtx4090", "l4", "a10", "a10g")
_PROMPT = 1024  # tokens of the longest prompt, images left out
_SAMPLES = 8  # responses to a prompt


@dataclasses.dataclass(frozen=True)
class Division:
    """Division of a model over devices of one kind, and the settings that go with it, as
    `plan.py --sweep` finds them; mesh.data takes the devices that are left."""

    fsdp: int = 1
    tensor: int = 1
    rollout_tensor: int = 1
    expert: int = 1
    context: int = 1
    remat: str = "full"
    micro_rows: int = 1  # rows of a micro-batch, for each data rank
    cache_fraction: float = 0.15  # of HBM, for a sampler's keys and values
    # of a sampler's weights, keys and values; int8 turns the token_tis correction on
    sampler_dtype: str = "auto"
    offload: str = "none"
    moments: str = "float32"  # of the optimizer
    lora_rank: int = 0  # 0: all parameters are trained

    @property
    def devices(self) -> int:
        """The fewest devices of this division."""
        return self.fsdp * self.tensor * self.expert * self.context


def grpo(
    source: str,
    choice: str,
    divisions: Mapping[tuple[str, str], Division],
    *,
    positions: int,
    yarn_factor: float = 1.0,
    image_tokens: int = 0,
) -> Config:
    """The config for a choice of machine and context.

    The batch grows with the machine: the number of tokens per device is constant.

    Args:
      source: the model.
      choice: MACHINE,CONTEXT, for example "v5p-8,2k".
      divisions: by (kind of chip, context).
      positions: the longest sequence on which the model was trained.
      yarn_factor: extends `positions` by YaRN, where the context needs it.
      image_tokens: features of an image at most, for a model that sees; 0 for others.

    Raises ValueError for a choice that is malformed, or that the model has no division for.
    """
    machine, context = _read(choice)
    by = _division(source, choice, divisions, int(positions * yarn_factor))
    tokens, prompt = CONTEXTS[context], _PROMPT + image_tokens
    data = machine.devices // by.devices
    return Config(
        model=ModelSourceConfig(source, yarn_factor=yarn_factor if tokens > positions else 1.0),
        algorithm=AlgorithmConfig(
            kl_coef=0.001,
            clip_high=0.28,
            correction="none" if by.sampler_dtype == "auto" else "token_tis",
        ),
        # a rollout or an update of the largest takes half an hour where hardware is half as fast
        health=HealthConfig(stuck_seconds=7200.0),
        data=DataConfig(
            # the same number of tokens per device for every context
            prompts_per_step=max(1, 2 * machine.devices * CONTEXTS["8k"] // tokens),
            max_prompt_length=prompt,
            overlong="drop",
            image_tokens=image_tokens or DataConfig.image_tokens,
        ),
        rollout=RolloutConfig(
            num_samples=_SAMPLES,
            max_response_length=tokens - prompt,
            num_slots=0,
            cache_fraction=by.cache_fraction,
            cache_dtype=by.sampler_dtype,
            weights_dtype=by.sampler_dtype,
        ),
        reward=RewardConfig(function="geo3k" if image_tokens else "math"),
        training=TrainingConfig(
            steps=200,
            row_tokens=tokens,
            remat=by.remat,
            micro_batch_rows=by.micro_rows * data * by.fsdp * by.expert,
            # on TPUs auto would materialise the scores of a row where no kernel fits
            attention="kernel" if machine.chip.platform == "tpu" else "auto",
            offload=by.offload,
            optimizer=OptimizerConfig(lr=1e-5 if by.lora_rank else 1e-6, moments=by.moments),
        ),
        lora=LoraConfig(rank=by.lora_rank),
        mesh=MeshConfig(
            chip=machine.chip.name,
            data=data,
            fsdp=by.fsdp,
            expert=by.expert,
            context=by.context,
            tensor=by.tensor,
            rollout_tensor=by.rollout_tensor,
        ),
        checkpoint=CheckpointConfig(every=20),
    )


def _division(
    source: str, choice: str, divisions: Mapping[tuple[str, str], Division], longest: int
) -> Division:
    """The division of a choice; ValueError where there is none, or above `longest` positions."""
    machine, context = _read(choice)
    if CONTEXTS[context] > longest:
        raise ValueError(
            f"{source} has {longest:,} positions, too few for {context} ({choice!r}); use "
            f"{_listed(c for c, n in CONTEXTS.items() if n <= longest)}"
        )
    kind = machine.chip.name
    if (kind, context) not in divisions:
        known = _listed(sorted({f"{k},{c}" for k, c in divisions}))
        raise ValueError(f"{source} has no division for {kind} at {context}; use one of {known}")
    by = divisions[kind, context]
    if machine.devices % by.devices:
        least = by.devices // machine.chip.devices * machine.chip.counted
        raise ValueError(
            f"{choice!r} has {machine.devices} devices, but {source} at {context} is divided over "
            f"{by.devices} of {kind}: use {kind}-{least}, or a multiple of it"
        )
    return by


def _read(choice: str) -> tuple[NamedMachine, str]:
    """(machine, context) of "v5p-8,2k"."""
    name, _, context = choice.partition(",")
    if context not in CONTEXTS:
        raise ValueError(
            f"{choice!r} must be MACHINE,CONTEXT such as v5p-8,2k, with a context of "
            f"{_listed(CONTEXTS)}"
        )
    return named_machine(name), context


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
