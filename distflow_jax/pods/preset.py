"""GRPO of a large model on a pod: the common part of configs/qwen*.py.

Such a config takes an argument CHIPS,CONTEXT: `--config=configs/qwen25_72b.py:v5p-64,8k` means 64
v5p chips (Google Cloud's names count two cores per chip) and sequences of up to 8,192 tokens.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.data_config import DataConfig, RewardConfig
from distflow_jax.config.mesh_config import MeshConfig
from distflow_jax.config.rollout_config import RolloutConfig
from distflow_jax.config.run_config import Config, ModelSourceConfig
from distflow_jax.config.training_config import TrainingConfig
from distflow_jax.config.upkeep_config import CheckpointConfig, HealthConfig

CONTEXTS = {"8k": 8192, "32k": 32_768, "64k": 65_536}  # tokens of the longest prompt and response
CHIPS = {"v5e": (256, 256), "v5p": (64, 1024), "h100": (8, 1024), "h200": (8, 1024)}
_PROMPT = 1024  # tokens of the longest prompt, images left out
_SAMPLES = 8  # responses to a prompt


@dataclasses.dataclass(frozen=True)
class Division:
    """Division of a model over chips of one kind; mesh.data takes the chips that are left."""

    fsdp: int
    tensor: int
    rollout_tensor: int
    expert: int = 1
    context: int = 1
    cache_fraction: float = 0.15  # of HBM, for a sampler's keys and values
    # of a sampler's weights, keys and values; int8 turns the token_tis correction on
    sampler_dtype: str = "auto"
    offload: str = "none"

    @property
    def chips(self) -> int:
        """The fewest chips of this division."""
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
    """The config for a choice of chips and context.

    The batch grows with the pod: the number of sequences per chip is constant.

    Args:
      source: the model.
      choice: CHIPS,CONTEXT, for example "v5p-64,8k".
      divisions: by (kind of chip, context).
      positions: the longest sequence on which the model was trained.
      yarn_factor: extends `positions` by YaRN, where the context needs it.
      image_tokens: features of an image at most, for a model that sees; 0 for others.

    Raises ValueError for a choice that is malformed, or that the model has no division for.
    """
    kind, chips, context = _read(choice)
    by = _division(source, choice, divisions, int(positions * yarn_factor))
    tokens, prompt = CONTEXTS[context], _PROMPT + image_tokens
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
            # the same number of tokens per chip for every context
            prompts_per_step=max(1, 2 * chips * CONTEXTS["8k"] // tokens),
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
            remat="full",
            attention="kernel",  # auto would materialise the scores of a row where no kernel fits
            offload=by.offload,
        ),
        mesh=MeshConfig(
            data=chips // by.chips,
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
    kind, chips, context = _read(choice)
    if CONTEXTS[context] > longest:
        raise ValueError(
            f"{source} has {longest:,} positions, too few for {context} ({choice!r}); use "
            f"{_listed(c for c, n in CONTEXTS.items() if n <= longest)}"
        )
    if (kind, context) not in divisions:
        known = _listed(sorted({f"{k},{c}" for k, c in divisions}))
        raise ValueError(f"{source} has no division for {kind} at {context}; use one of {known}")
    by = divisions[kind, context]
    if chips % by.chips:
        raise ValueError(
            f"{choice!r}: {source} at {context} is divided over {by.chips} chips of {kind}; use a "
            f"multiple of {by.chips}"
        )
    return by


def _read(choice: str) -> tuple[str, int, str]:
    """(kind of chip, chips, context) of "v5p-64,8k"."""
    found = re.fullmatch(r"(\w+)-(\d+),(\w+)", choice)
    if not found:
        raise ValueError(
            f"{choice!r} must be CHIPS,CONTEXT such as v5p-64,8k, with {_listed(CHIPS)} and "
            f"{_listed(CONTEXTS)}"
        )
    kind, chips, context = found[1], int(found[2]), found[3]
    if kind not in CHIPS:
        raise ValueError(f"{choice!r}: unknown chip {kind!r}; use {_listed(CHIPS)}")
    if context not in CONTEXTS:
        raise ValueError(f"{choice!r}: unknown context {context!r}; use {_listed(CONTEXTS)}")
    low, high = CHIPS[kind]
    if not low <= chips <= high:
        raise ValueError(f"{choice!r}: a pod of {kind} has {low} to {high} chips")
    return kind, chips, context


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
