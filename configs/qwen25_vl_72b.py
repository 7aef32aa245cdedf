"""GRPO of Qwen2.5-VL-72B-Instruct on pods, with images of up to 1,024 features.

    python scripts/train.py --config=configs/qwen25_vl_72b.py:v5p-128,8k --workdir=runs/qwen25_vl \
        --config.data.train=DATA
    python scripts/plan.py --config=configs/qwen25_vl_72b.py:v5p-128,8k --topology=v5p:4x4x4 \
        --config.model.source=configs/shapes/qwen25_vl_72b

A choice is MACHINE,CONTEXT (distflow_jax/pods/preset.py). An image with more features
is shrunk (data.image_tokens); prompts have 1,024 tokens of text beside it. The tower is trained
with the rest: training.freeze=vision keeps it as it is.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.pods.preset import Division, grpo

DIVISIONS = {
    ("v5p", "8k"): Division(
        fsdp=16, tensor=4, rollout_tensor=8, remat="dots", cache_fraction=0.4, offload="idle"
    ),
    ("h100", "8k"): Division(
        fsdp=32, tensor=2, rollout_tensor=8, remat="attention", cache_fraction=0.6, offload="idle"
    ),
    ("h200", "8k"): Division(
        fsdp=8, tensor=4, rollout_tensor=4, remat="dots", cache_fraction=0.4, offload="idle"
    ),
}


def get_config(choice: str = "v5p-128,8k") -> ConfigDict:
    """2 prompts x 8 responses per chip and step (at 8k), one update, KL to the initial model."""
    return to_config_dict(
        grpo(
            "hf:Qwen/Qwen2.5-VL-72B-Instruct",
            choice,
            DIVISIONS,
            positions=128_000,
            image_tokens=1024,
        )
    )
