"""Settings of training, of its optimizer and of adapters."""

import dataclasses

from distflow_jax.config.implementation_table import ROWS, names
from distflow_jax.parsing.checked_fields import above, at_least, between, one_of
from distflow_jax.parsing.setting_checks import Section, setting

MOMENTS = ("float32", "bfloat16", "int8")  # formats of Adam's moments
# projections of a layer that may have adapters
LORA_TARGETS = ("query", "key", "value", "output", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Section, name="optimizer"):
    """AdamW (Loshchilov & Hutter 2019, arxiv.org/abs/1711.05101) and its schedule."""

    lr: float = setting(1e-6, at_least(0))  # peak learning rate
    # after the warmup: constant, or cosine to min_lr_ratio * lr
    schedule: str = setting("constant", one_of(("constant", "cosine")))
    # optimizer steps of linear warmup, starting at lr/(n+1)
    warmup_steps: int = setting(0, at_least(0))
    # learning rate at the end of the cosine schedule, as a share of lr
    min_lr_ratio: float = setting(0.0, between(0, 1), needs={"schedule": ("cosine",)})
    b1: float = setting(0.9, between(0, 1, "[)"))  # decay of the first moment
    # decay of the second moment; below the usual 0.999, because runs are short and gradients noisy
    b2: float = setting(0.95, between(0, 1, "[)"))
    eps: float = setting(1e-8, above(0))  # added to the square root of the second moment
    # decoupled weight decay of matrices; not applied to norms and biases
    weight_decay: float = setting(0.0, at_least(0))
    # maximum global norm of the gradient; 0: no clipping
    clip_norm: float = setting(1.0, at_least(0))
    # dtype of both moments: float32 (8 bytes per parameter), bfloat16 (4) or int8 (2.1, with a
    # scale per block; see compressed_moments.py). Arithmetic is float32
    moments: str = setting("float32", one_of(MOMENTS))


@dataclasses.dataclass(frozen=True)
class TrainingConfig(Section, name="training"):
    """Settings of training. Sizes are global."""

    # number of training steps, with one batch of prompts each
    steps: int = setting(20, at_least(1))
    # optimizer steps per pass over a batch of data.prompts_per_step prompts; a batch with fewer
    # prompts has fewer steps
    mini_batches: int = setting(1, at_least(1))
    epochs: int = setting(1, at_least(1))  # passes over each batch
    row_tokens: int = setting(256, at_least(1))  # L: tokens per packed row
    row_sequences: int = setting(0, at_least(0))  # S: maximum sequences per row; 0: row_tokens / 4
    # rows per micro-batch, over all data ranks; 0: one per rank
    micro_batch_rows: int = setting(0, at_least(0))
    # micro-batches of micro_batch_rows in the pipeline at the same time, a multiple of
    # mesh.pipeline; more of them reduce the time that stages are idle. 0: one per stage
    pipeline_microbatches: int = setting(0, at_least(0))
    # number of times that a micro-batch passes through all stages, and of layer groups per stage.
    # More repeats reduce the time that stages are idle, but redistribute weights in every pass.
    # Must divide the layers of a stage; needs a remat other than none
    pipeline_repeats: int = setting(1, at_least(1))
    share_prompts: bool = True  # store a prompt once per row for all of its responses in that row
    # dtype of activations and matrix products; auto: bfloat16 if the hardware supports it, float32
    # on CPU
    compute_dtype: str = setting("auto", one_of(("auto", "float32", "bfloat16")))
    # attention implementation of the trainer, see [implementations](implementations.md). auto:
    # blocks on a CPU, or masked if no tile fits the rows; elsewhere the fastest in a short trial,
    # among those that support the run and agree with float32
    attention: str = setting("auto", one_of(names(ROWS)))
    # positions per row whose logits are in memory at the same time; must divide row_tokens. 0:
    # derived from the sizes
    logp_chunk: int = setting(0, at_least(0))
    # results that the backward pass recomputes to save memory (models/remat.py): none; dots: all
    # but matrix products; attention: the MLP; full: the whole layer, which takes a third more
    # compute
    remat: str = setting("none", one_of(("none", "dots", "attention", "full")))
    # the part that is frozen, without gradients and moments. vision: the vision tower. language:
    # all but the tower and the head of a critic or reward model (the first stage of LLaVA, Liu et
    # al. 2023, arxiv.org/abs/2304.08485)
    freeze: str = setting("none", one_of(("none", "vision", "language")))
    # weight of the load-balancing loss of a mixture's experts (expert_balance.py); 0: off.
    # DeepSeek-V3 uses 1e-4
    balance_coef: float = setting(0.0, at_least(0))
    # train a mixture with the experts that the sampler chose for each token, weighted by the
    # trainer's router (Ma et al. 2025, arxiv.org/abs/2510.11370)
    router_replay: bool = False
    fuse: bool = True  # compile adjacent nodes on one mesh into one program
    # none: keep everything on the devices. idle: keep models, optimizers and samplers in host
    # memory while no node uses them; every node on a mesh is then a separate program
    offload: str = setting("none", one_of(("none", "idle")))
    # GiB per device that the run may use; a run that needs more exits with an error before step 1.
    # 0: the memory that the device reports, or on a CPU its share of host memory
    device_memory_gib: float = setting(0.0, at_least(0))
    # number of consecutive steps with a non-finite loss or gradient after which the run exits
    max_nonfinite: int = setting(3, at_least(0))
    # number of consecutive steps in which algorithm.correction or rejection drops every token,
    # after which the run exits
    max_rejected: int = setting(3, at_least(0))
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

    def __post_init__(self):
        super().__post_init__()
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


@dataclasses.dataclass(frozen=True)
class LoraConfig(Section, name="lora"):
    """Low-rank adapters: a projection W x becomes W x + (alpha / rank) B A x.

    Only A and B are trained. Hu et al. 2021 (arxiv.org/abs/2106.09685), eq. 3.
    """

    # rows of A and columns of B; 0: no adapters, all parameters are trained
    rank: int = setting(0, at_least(0))
    # adapters are scaled by alpha / rank
    alpha: float = setting(32.0, above(0), needs={"rank": ()})
    # projections with adapters
    targets: tuple[str, ...] = setting(LORA_TARGETS, needs={"rank": ()})

    def __post_init__(self):
        super().__post_init__()
        unknown = [name for name in self.targets if name not in LORA_TARGETS]
        if unknown or not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(
                f"lora.targets must be some of {', '.join(LORA_TARGETS)}, each once, got "
                f"{self.targets}"
            )

    @property
    def scale(self) -> float:
        """Factor alpha / rank of B A x; 0 without adapters."""
        return self.alpha / self.rank if self.rank else 0.0
