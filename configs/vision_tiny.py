"""A random model of 1 M parameters that sees images: it counts shapes on drawn pictures.

    python scripts/train.py --config=configs/vision_tiny.py --workdir=runs/vision_tiny

Of four possible answers a model that does not look finds one in four.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.config.run_config import Config


def get_config() -> ConfigDict:
    """16 pictures x 16 one-token answers on a 4-layer model with a 3-layer tower."""
    config = to_config_dict(Config())
    config.model.source = (
        "random:smolvlm?hidden=128&layers=4&heads=4&kv_heads=2&mlp=384&vocab=272&max_position=1024"
        "&vision_hidden=96&vision_layers=3&vision_heads=4&patch=8&image=48"
    )
    config.data.train = "task:shapes?ask=count"
    config.data.prompts_per_step = 16
    config.data.max_prompt_length = 192
    config.rollout.num_samples = 16
    config.rollout.max_response_length = 1
    config.rollout.num_slots = 32
    config.rollout.tokens_per_call = 1
    config.reward.function = "exact"
    config.training.steps = 400
    config.training.row_tokens = 256
    config.training.optimizer.lr = 1e-3
    config.eval.dataset = "task:shapes?ask=count&held_out=1"
    config.eval.num_prompts = 64
    config.checkpoint.every = 100
    return config
