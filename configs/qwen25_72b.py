"""GRPO of Qwen2.5-72B-Instruct on pods.

    python scripts/train.py --config=configs/qwen25_72b.py:v5p-128,8k --workdir=runs/qwen25_72b \
        --config.data.train=DATA
    python scripts/plan.py --config=configs/qwen25_72b.py:v5p-128,8k --topology=v5p:4x4x4 \
        --config.model.source=configs/shapes/qwen25_72b

A choice is MACHINE,CONTEXT (distflow_jax/pods/preset.py). All are found by `plan.py --sweep`, and
have run nowhere yet.

64k exceeds the 32,768 positions of its training: model.yarn_factor=4, as in its model card.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.pods.preset import Division, grpo

DIVISIONS = {
    ("v5e", "8k"): Division(
        fsdp=32,
        tensor=8,
        rollout_tensor=8,
        cache_fraction=0.25,
        sampler_dtype="int8",
        offload="idle",
    ),
    ("v5p", "8k"): Division(
        fsdp=64, rollout_tensor=4, micro_rows=2, cache_fraction=0.4, offload="idle"
    ),
    ("v5p", "32k"): Division(
        fsdp=64, rollout_tensor=8, context=2, cache_fraction=0.6, offload="idle"
    ),
    ("v5p", "64k"): Division(
        fsdp=16, tensor=4, rollout_tensor=8, cache_fraction=0.6, offload="idle"
    ),
    ("h100", "8k"): Division(
        fsdp=32, tensor=2, rollout_tensor=8, remat="attention", cache_fraction=0.6, offload="idle"
    ),
    ("h100", "32k"): Division(
        fsdp=8, tensor=8, rollout_tensor=8, remat="attention", cache_fraction=0.6, offload="idle"
    ),
    ("h200", "8k"): Division(
        fsdp=8, tensor=4, rollout_tensor=4, remat="dots", cache_fraction=0.4, offload="idle"
    ),
    ("h200", "32k"): Division(
        fsdp=16, tensor=4, rollout_tensor=4, remat="attention", cache_fraction=0.4, offload="idle"
    ),
}


def get_config(choice: str = "v5p-128,8k") -> ConfigDict:
    """2 prompts x 8 responses per chip and step (at 8k), one update, KL to the initial model."""
    return to_config_dict(
        grpo("hf:Qwen/Qwen2.5-72B-Instruct", choice, DIVISIONS, positions=32_768, yarn_factor=4.0)
    )
