"""A random model of half a million parameters that sees images: it counts shapes on pictures.

    python scripts/train.py --config=configs/vision_tiny.py --workdir=runs/vision_tiny

Of four possible answers a model that does not look finds one in four. Pictures are shrunk to 24 x
24 pixels, so that a feature stands for one cell of task:shapes, and a patch fits into a shape.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.config.run_config import Config


def get_config() -> ConfigDict:
    """64 pictures x 16 one-token answers on a one-layer model with a two-layer tower."""
    config = to_config_dict(Config())
    config.model.source = (
        "random:smolvlm?hidden=128&layers=1&heads=4&kv_heads=2&mlp=256&vocab=272&max_position=1024"
        "&vision_hidden=96&vision_layers=2&vision_heads=4&patch=4&merge=2&image=24"
    )
    config.data.train = "task:shapes?ask=count&question=How many?"
    config.data.prompts_per_step = 64
    config.data.max_prompt_length = 64
    config.rollout.num_samples = 16
    config.rollout.max_response_length = 1
    config.rollout.num_slots = 256
    config.rollout.tokens_per_call = 1
    config.reward.function = "exact"
    # until the model looks, each of the four numbers is right as often: none may be forgotten
    config.algorithm.entropy_coef = 0.1
    config.training.steps = 300
    config.training.row_tokens = 768  # 14 pictures, a whole chunk of patches
    # a larger one drowns what differs between pictures in what all answers have in common
    config.training.optimizer.lr = 4e-4
    config.training.optimizer.warmup_steps = 10
    config.training.optimizer.schedule = "cosine"
    config.training.optimizer.min_lr_ratio = 0.05
    config.eval.dataset = "task:shapes?ask=count&question=How many?&held_out=1"
    config.eval.num_prompts = 256
    config.checkpoint.every = 100
    return config
