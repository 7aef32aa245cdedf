"""A random model of 0.85 M parameters that takes seconds per step: for tests and first experiments.

    python scripts/train.py --config=configs/tiny.py --workdir=/tmp/tiny

It only learns to write digits. With 4 heads and 2 key/value heads it runs on fsdp x tensor meshes.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.config.run_config import Config


def get_config() -> ConfigDict:
    """16 prompts x 4 samples of up to 16 tokens on a 4-layer model with a byte vocabulary."""
    config = to_config_dict(Config())
    config.model.source = (
        "random:llama?hidden=128&layers=4&heads=4&kv_heads=2&mlp=384&vocab=512&max_position=1024"
    )
    config.data.train = "task:arithmetic?operands=2&operators=+-&digits=2"
    config.data.prompts_per_step = 16
    config.data.max_prompt_length = 128
    config.rollout.num_samples = 4
    config.rollout.max_response_length = 16
    config.rollout.num_slots = 32
    config.rollout.tokens_per_call = 8
    # a digit anywhere: random weights sample one now and then, so that gradients are not zero
    config.reward.function = "pattern"
    config.reward.kwargs = {"pattern": ".*[0-9].*"}
    config.training.steps = 3
    config.training.row_tokens = 256
    config.training.optimizer.lr = 1e-3
    config.eval.dataset = "task:arithmetic?operands=2&operators=+-&digits=2&held_out=1"
    config.eval.num_prompts = 16
    config.checkpoint.every = 2
    return config
