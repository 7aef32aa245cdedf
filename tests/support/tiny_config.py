"""configs/tiny.py with other settings."""

from configs import tiny
from distflow_jax.config.config_dict import from_config_dict, override
from distflow_jax.config.run_config import Config

# settings of a run that ends in seconds, and whose samplers may run ahead
SMALL_AHEAD = (
    "model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512",
    "data.prompts_per_step=8",
    "rollout.num_slots=24",
    "training.optimizer.lr=0.003",
    "algorithm.correction=token_tis",
    "observe.trackers=()",
)


def tiny_config(*settings):
    """The config of configs/tiny.py with these settings, such as "training.steps=2"."""
    return from_config_dict(Config, override(tiny.get_config(), list(settings)))
