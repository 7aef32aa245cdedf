"""Settings of the update."""

import dataclasses
from typing import Literal

from distflow_jax.training.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How the update runs. Sizes are global."""

    steps: int = 20  # RL steps: one batch of prompts each
    mini_batches: int = 1  # optimizer steps per pass over a batch
    epochs: int = 1  # passes over a batch
    row_tokens: int = 256  # L: tokens per packed row
    row_sequences: int = 0  # S: sequences per row at most; 0: row_tokens / 4
    micro_batch_rows: int = 0  # rows worked on at a time over all data ranks; 0: one per rank
    # micro-batches of micro_batch_rows that follow each other through the stages of mesh.pipeline,
    # a multiple of these: stages wait less the more there are; 0: as many as stages
    pipeline_microbatches: int = 0
    # times that a micro-batch goes round the stages, each of which then has that many parts of the
    # layers: stages wait less, at the price of their weights dealt out in every pass. It divides
    # the layers of a stage, and needs a remat other than none
    pipeline_repeats: int = 1
    share_prompts: bool = True  # a prompt stands once in a row for all its responses there
    compute_dtype: str = "auto"  # auto: bfloat16 where the hardware has it, float32 on CPU
    # masked: all scores of a row at once; blocks: tile by tile, without those that packing masks;
    # kernel: so by a kernel of the platform, see row_attention.py; auto: blocks on CPU and a kernel
    # elsewhere, where sizes fit
    attention: Literal["auto", "masked", "blocks", "kernel"] = "auto"
    # positions per row whose logits are worked on at a time; divides row_tokens. 0: by their sizes
    logp_chunk: int = 0
    # what the backward pass computes again to keep less (models/remat.py): none; dots: all but
    # matrix products; attention: the mlp; full: all of a layer, a third more work
    remat: Literal["none", "dots", "attention", "full"] = "none"
    # weight of the loss that keeps the experts of a mixture evenly loaded, see balance.py; 0: off.
    # DeepSeek-V3 took 1e-4
    balance_coef: float = 0.0
    # a policy that is a mixture is trained through the experts that the sampler sent each token
    # through (Ma et al. 2025, arxiv.org/abs/2510.11370), weighed by its own router
    router_replay: bool = False
    fuse: bool = True  # adjacent nodes on one mesh are one compiled program
    # idle: what a node does not use of models, optimizers and samplers waits in host memory, and
    # every node on a mesh is a program of its own
    offload: Literal["none", "idle"] = "none"
    # GiB of one device that the run may take: above it, it says so before step 1 and ends. 0: what
    # the device says that it has, of a CPU's its share of the host's memory
    device_memory_gib: float = 0.0
    max_nonfinite: int = 3  # steps in a row with a non-finite loss or gradient that end the run
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

    def __post_init__(self):
        for name in ("steps", "mini_batches", "epochs", "row_tokens", "pipeline_repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"training.{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "row_sequences",
            "micro_batch_rows",
            "logp_chunk",
            "pipeline_microbatches",
            "max_nonfinite",
            "balance_coef",
            "device_memory_gib",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"training.{name} must not be negative, got {getattr(self, name)}")
        if self.pipeline_repeats > 1 and self.remat == "none":
            raise ValueError(
                f"training.pipeline_repeats={self.pipeline_repeats} needs training.remat other "
                "than 'none', which would keep the weights of every tick; use training.remat='dots'"
            )
        if self.row_sequences > self.row_tokens // 2:
            raise ValueError(
                f"training.row_sequences={self.row_sequences} are more than fit "
                f"training.row_tokens={self.row_tokens}: a prompt and a response take two tokens "
                f"at least; use at most {self.row_tokens // 2}"
            )
        if self.logp_chunk and self.row_tokens % self.logp_chunk:
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
