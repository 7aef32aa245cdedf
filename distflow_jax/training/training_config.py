"""Settings of training."""

import dataclasses
from typing import Literal

from distflow_jax.parsing.setting_checks import check_least, check_one_of
from distflow_jax.training.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Settings of training. Sizes are global."""

    steps: int = 20  # steps of the run: one batch of prompts each
    # optimizer steps per pass over a batch of data.prompts_per_step prompts; fewer prompts: fewer
    mini_batches: int = 1
    epochs: int = 1  # passes over each batch
    row_tokens: int = 256  # L: tokens per packed row
    row_sequences: int = 0  # S: sequences per row at most; 0: row_tokens / 4
    micro_batch_rows: int = 0  # rows of a micro-batch over all data ranks; 0: one per rank
    # micro-batches of micro_batch_rows in the pipeline at once, a multiple of mesh.pipeline; more
    # of them leave stages idle for less time. 0: one per stage
    pipeline_microbatches: int = 0
    # times that a micro-batch passes all stages, each of which then has that many layer groups;
    # stages idle less, but their weights are redistributed in every pass. Must divide the layers of
    # a stage; needs a remat other than none
    pipeline_repeats: int = 1
    share_prompts: bool = True  # store a prompt once per row for all its responses there
    # type of activations and matrix products: bfloat16 or float32; auto: bfloat16 if the hardware
    # supports it, float32 on CPU
    compute_dtype: str = "auto"
    # attention of the trainer. masked: all scores of a row at once. blocks: tiles, without those
    # that packing masks. kernel: tiles by a kernel of the platform. auto: blocks on CPU and a
    # kernel elsewhere, masked if their sizes do not fit. A tower follows, by a mask where no tile
    # fits (attention_choice.py)
    attention: Literal["auto", "masked", "blocks", "kernel"] = "auto"
    # positions per row with logits in memory at a time; divides row_tokens. 0: chosen by the sizes
    logp_chunk: int = 0
    # results that the backward pass recomputes to save memory (models/remat.py): none; dots: all
    # but matrix products; attention: the MLP; full: the whole layer, a third more work
    remat: Literal["none", "dots", "attention", "full"] = "none"
    # the part that is not trained, without gradients and moments. vision: the vision tower.
    # language: all but the tower and the head of a critic or reward model (the first stage of
    # LLaVA, Liu et al. 2023, arxiv.org/abs/2304.08485)
    freeze: Literal["none", "vision", "language"] = "none"
    # weight of the load-balancing loss of a mixture's experts (expert_balance.py); 0: off.
    # DeepSeek-V3 uses 1e-4
    balance_coef: float = 0.0
    # train a mixture with the experts that the sampler chose for each token, weighed by its own
    # router (Ma et al. 2025, arxiv.org/abs/2510.11370)
    router_replay: bool = False
    fuse: bool = True  # compile adjacent nodes on one mesh into one program
    # none: everything stays on the devices. idle: models, optimizers and samplers that a node does
    # not use stay in host memory, and every node on a mesh is a program of its own
    offload: Literal["none", "idle"] = "none"
    # GiB of a device that the run may use; a run that needs more ends with an error before step 1.
    # 0: the memory that the device reports, for a CPU device its share of the host's memory
    device_memory_gib: float = 0.0
    max_nonfinite: int = 3  # consecutive steps with a non-finite loss or gradient that end the run
    # consecutive steps that end the run if algorithm.correction or rejection left nothing of them
    max_rejected: int = 3
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

    def __post_init__(self):
        ones = ("steps", "mini_batches", "epochs", "row_tokens", "pipeline_repeats")
        zeros = ("row_sequences", "micro_batch_rows", "logp_chunk", "pipeline_microbatches")
        zeros += ("max_nonfinite", "max_rejected", "balance_coef", "device_memory_gib")
        check_least("training", self, 1, *ones)
        check_least("training", self, 0, *zeros)
        if self.pipeline_repeats > 1 and self.remat == "none":
            raise ValueError(
                f"training.pipeline_repeats={self.pipeline_repeats} needs training.remat other "
                "than 'none', which would keep the weights of every tick; use training.remat='dots'"
            )
        if self.row_sequences > self.row_tokens // 2:
            raise ValueError(
                f"training.row_sequences={self.row_sequences} are more than fit "
                f"training.row_tokens={self.row_tokens}: a prompt and a response have at least two "
                f"tokens; use at most {self.row_tokens // 2}"
            )
        if self.logp_chunk and self.row_tokens % self.logp_chunk:
            fits = [n for n in range(1, self.row_tokens + 1) if self.row_tokens % n == 0]
            near = min(fits, key=lambda n: abs(n - self.logp_chunk))
            raise ValueError(
                f"training.logp_chunk={self.logp_chunk} does not divide "
                f"training.row_tokens={self.row_tokens}; use {near}"
            )
        check_one_of("training.compute_dtype", self.compute_dtype, ("auto", "float32", "bfloat16"))
