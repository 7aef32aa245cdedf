"""Expected seconds beside published steps of reinforcement learning.

None of these steps is a source of pods/efficiency.py.

Nightly: the page has what the plan says of every run, and five of six take what is expected.

The runs are NeMo RL's: GRPO on OpenMathInstruct-2, 2,048 responses of up to 4,096 tokens with their
prompts, 4 optimizer steps, log-probs of policy and reference, vLLM on the trainer's GPUs.
Steps: NVIDIA-NeMo/RL docs/about/performance-summary.md of releases v0.4, v0.5 and v0.6, settings in
examples/configs/recipes/llm/performance. Phases: NVIDIA-NeMo/RL issue 959 (release v0.3).
"""

import dataclasses
import functools

import pytest
from support.paths import ROOT

from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.data_config import DataConfig
from distflow_jax.config.mesh_config import MeshConfig
from distflow_jax.config.rollout_config import RolloutConfig
from distflow_jax.config.run_config import Config, ModelSourceConfig
from distflow_jax.config.training_config import TrainingConfig
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.parameters import num_params
from distflow_jax.models.weights.source import open_shapes
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.pods.efficiency import Range
from distflow_jax.pods.pod_plan import plan_on
from distflow_jax.pods.response_lengths import spread
from distflow_jax.pods.topology import open_topology

PAGE = ROOT / "docs" / "scaling.md"
# of a step, what is planned. Refit (weights to the samplers, through hosts) and hosts take the
# rest: 7 and 12 % in the two runs whose phases are known
PLANNED = 0.9
PHASES = {"rollout": "rollout", "log-probs": "old_logp", "update": "actor_train"}


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run. `mesh`: its own, with fsdp in place of the ranks of a pipeline."""

    name: str
    model: str
    pod: str
    mesh: dict[str, int]
    width: int  # GPUs of a sampler
    mean: int  # tokens of a response
    prompt: int  # tokens: those trained, of the throughput, less the mean
    measured: float | dict[str, float]  # seconds of a step, or of its phases
    prompts: int = 64
    tokens: int = 4096
    mini_batches: int = 4
    remat: str = "none"
    rows: int = 1  # of a data rank at a time; 4 where fsdp gathers weights that a pipeline keeps
    pipeline: tuple[int, int] = (1, 1)  # (ranks of a pipeline, pipelines)

    @property
    def planned_seconds(self) -> float:
        """The measured seconds of what is planned."""
        if isinstance(self.measured, dict):
            return sum(self.measured.values())
        return PLANNED * self.measured

    @property
    def pipelined(self) -> float:
        """Time of a program over rows with a pipeline, over that without.

        1 + (P - 1) / M for P ranks and M rows of a pipeline in an optimizer step: ranks idle until
        the first row has reached them (Narayanan et al. 2021, arxiv.org/abs/2104.04473, section
        2.2).
        """
        ranks, pipelines = self.pipeline
        tokens = self.prompts * 32 * (self.prompt + self.mean) / self.mini_batches
        return 1 + (ranks - 1) / (tokens / self.tokens / pipelines)


L8, L70, Q32, A3, A22 = (
    "llama31_8b", "llama31_70b", "qwen3_32b", "qwen3_30b_a3b", "qwen3_235b_a22b"
)  # fmt: skip
RUNS = (
    Run("Llama3.1-8B, 8 H100, v0.3", L8, "h100-8", {"fsdp": 8}, 1, 795, 110,
        {"rollout": 58, "log-probs": 18, "update": 28}),
    Run("Llama3.1-70B, 64 H100, v0.3", L70, "h100-64", {"fsdp": 16, "tensor": 4}, 4, 398, 110,
        {"rollout": 84, "log-probs": 18, "update": 28}, rows=4, pipeline=(4, 4)),
    Run("Llama3.1-8B, 16 H100, v0.4", L8, "h100-16", {"data": 8, "fsdp": 2}, 1, 1060, 132, 97.7,
        remat="full", pipeline=(2, 8)),
    Run("Llama3.1-8B, 16 H100, v0.5", L8, "h100-16", {"data": 8, "fsdp": 2}, 1, 1019, 127, 92.8,
        remat="full", pipeline=(2, 8)),
    Run("Qwen3-32B, 32 H100, v0.4", Q32, "h100-32", {"fsdp": 8, "tensor": 4}, 4, 3206, 110, 393,
        rows=4, pipeline=(4, 2)),
    Run("Qwen3-32B, 32 H100, v0.5", Q32, "h100-32", {"fsdp": 8, "tensor": 4}, 4, 3251, 103, 376,
        rows=4, pipeline=(4, 2)),
    Run("Qwen3-30B-A3B, 32 H100, v0.4", A3, "h100-32", {"fsdp": 2, "expert": 8, "tensor": 2}, 4,
        3154, 98, 225, rows=4),
    Run("Qwen3-30B-A3B, 32 H100, v0.6", A3, "h100-32", {"fsdp": 4, "expert": 8}, 2, 3203, 103, 192,
        rows=4),
    Run("Qwen3-235B-A22B, 128 H100, v0.4", A22, "h100-128", {"fsdp": 8, "expert": 16}, 16, 5671,
        110, 506, prompts=16, tokens=8192, mini_batches=1, remat="full",
        pipeline=(8, 4)),
    Run("Qwen3-235B-A22B, 128 H100, v0.6", A22, "h100-128", {"fsdp": 8, "expert": 16}, 16, 5698,
        110, 395, prompts=16, tokens=8192, mini_batches=1, remat="full",
        pipeline=(8, 4)),
    Run("Llama3.1-8B, 8 GB200, v0.5", L8, "b200-8", {"fsdp": 8}, 1, 1066, 128, 91.0, remat="full"),
    Run("Qwen3-32B, 16 GB200, v0.5", Q32, "b200-16", {"fsdp": 8, "tensor": 2}, 1, 3253, 102, 381,
        rows=4),
    Run("Qwen3-30B-A3B, 16 GB200, v0.6", A3, "b200-16", {"expert": 16}, 1, 3199, 98, 221, rows=4),
)  # fmt: skip


@functools.cache
def plan_of(index):
    run = RUNS[index]
    source, pod = str(ROOT / "configs" / "shapes" / run.model), open_topology(run.pod)
    samplers = pod.size // run.width
    responses = run.prompts * 32 // samplers
    model = open_shapes(source).config
    assert isinstance(model, DecoderConfig)
    # vLLM takes 60 % of the memory, for weights and for the keys and values of as many responses as
    # fit with their tokens so far
    free = 0.6 * run.width * pod.chip.memory / 0.95 - 2 * num_params(model)
    token = 2 * 2 * model.num_layers * model.num_kv_heads * model.head_dim
    lengths = spread(run.mean, run.tokens - run.prompt, responses)
    so_far = run.prompt + (lengths**2).mean() / (2 * lengths.mean())
    slots = min(responses, int(free / token / so_far))
    ranks = pod.size // run.mesh.get("tensor", 1)
    config = Config(
        model=ModelSourceConfig(source),
        algorithm=AlgorithmConfig(kl_coef=0.01),
        data=DataConfig(prompts_per_step=run.prompts, max_prompt_length=run.prompt),
        rollout=RolloutConfig(
            num_samples=32,
            max_response_length=run.tokens - run.prompt,
            num_slots=slots * samplers,
        ),
        training=TrainingConfig(
            row_tokens=run.tokens,
            remat=run.remat,
            attention="kernel",
            share_prompts=False,
            mini_batches=run.mini_batches,
            micro_batch_rows=run.rows * ranks,
        ),
        mesh=MeshConfig(**run.mesh, rollout_tensor=run.width),
    )
    planned = plan_run(config, pod.machine, open_source=open_shapes)
    planned = dataclasses.replace(planned, devices=pod.devices)
    return plan_on(pod, planned, mean_response=run.mean, compiled=False)


def seconds_of(index, part=""):
    """(expected, bound) of the parts of a step whose names begin with `part`."""
    run, plan = RUNS[index], plan_of(index)
    expected, bound = Range(0.0, 0.0), 0.0
    for name, estimate in plan.parts.items():
        if name.startswith(part):
            whole = estimate * (run.pipelined if name in plan.programs else 1.0)
            expected, bound = expected + whole.expected(plan.pod.efficiency), bound + whole.total
    return expected, bound


def row(name, measured, seconds, expected, bound):
    inside = (
        "yes" if seconds in expected else f"no: {seconds / expected.middle:.2f} times the middle"
    )
    cells = name, measured, f"{seconds:.3g}", expected, f"{bound:.3g}", inside
    return f"| {' | '.join(map(str, cells))} |"


def rows(index):
    """The lines of a run in the page's table: its step, and its phases where they are known."""
    run = RUNS[index]
    phases = run.measured if isinstance(run.measured, dict) else {}
    whole = "-" if phases else run.measured
    found = [row(run.name, whole, run.planned_seconds, *seconds_of(index))]
    for phase, seconds in phases.items():
        found.append(row(f"its {phase}", seconds, seconds, *seconds_of(index, PHASES[phase])))
    return found


# a dense model, a mixture and a large one; all others are nightly
OFTEN = ("Llama3.1-8B, 8 H100", "Qwen3-30B-A3B, 32 H100, v0.4", "Qwen3-235B-A22B, 128 H100, v0.6")


def case(index):
    often = RUNS[index].name.startswith(OFTEN)
    return pytest.param(index, id=RUNS[index].name, marks=[] if often else pytest.mark.slow)


EVERY = [case(index) for index in range(len(RUNS))]


@pytest.mark.parametrize("index", EVERY)
def test_the_page_has_what_the_plan_says(index):
    page = PAGE.read_text(encoding="utf-8").splitlines()
    missing = [line for line in rows(index) if line not in page]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("index", EVERY)
def test_no_step_is_faster_than_its_bound(index):
    expected, bound = seconds_of(index)
    assert bound < RUNS[index].planned_seconds
    assert bound < expected.low < expected.high <= 1.6 * expected.low


@pytest.mark.slow
def test_five_steps_of_six_take_what_is_expected():
    inside = {run.name: run.planned_seconds in seconds_of(i)[0] for i, run in enumerate(RUNS)}
    assert 6 * sum(inside.values()) >= 5 * len(inside), inside
