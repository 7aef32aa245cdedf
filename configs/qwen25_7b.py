"""GRPO of Qwen2.5-7B-Instruct on pods.

    python scripts/train.py --config=configs/qwen25_7b.py:v5p-128,8k --workdir=runs/qwen25_7b \
        --config.data.train=DATA
    python scripts/plan.py --config=configs/qwen25_7b.py:v5p-128,8k --topology=v5p:4x4x4 \
        --config.model.source=configs/shapes/qwen25_7b

A choice is MACHINE,CONTEXT (distflow_jax/pods/preset.py). All are found by `plan.py --sweep`, and
have run nowhere yet.

64k exceeds the 32,768 positions of its training: model.yarn_factor=4, as in its model card.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.pods.preset import Division, grpo

DIVISIONS = {
    ("v5e", "2k"): Division(
        fsdp=16, tensor=2, rollout_tensor=2, micro_rows=4, cache_fraction=0.4, offload="idle"
    ),
    ("v6e", "2k"): Division(
        fsdp=2, tensor=4, rollout_tensor=4, micro_rows=4, cache_fraction=0.15, offload="idle"
    ),
    ("v5p", "2k"): Division(fsdp=4, rollout_tensor=2, micro_rows=8, cache_fraction=0.1),
    ("h100", "2k"): Division(fsdp=8, rollout_tensor=2, remat="dots", cache_fraction=0.1),
    ("v5e", "8k"): Division(
        fsdp=32, tensor=2, rollout_tensor=4, remat="attention", cache_fraction=0.6, offload="idle"
    ),
    ("v5e", "32k"): Division(
        fsdp=32,
        tensor=2,
        rollout_tensor=4,
        context=4,
        remat="attention",
        cache_fraction=0.6,
        offload="idle",
    ),
    ("v5p", "8k"): Division(fsdp=16, rollout_tensor=4, remat="dots", cache_fraction=0.1),
    ("v5p", "32k"): Division(fsdp=16, tensor=4, rollout_tensor=4),
    ("v5p", "64k"): Division(fsdp=16, tensor=4, context=2, rollout_tensor=4),
    ("h100", "8k"): Division(fsdp=4, tensor=2, rollout_tensor=4, remat="dots", cache_fraction=0.1),
    ("h100", "32k"): Division(fsdp=4, tensor=2, rollout_tensor=2),
    ("h200", "8k"): Division(fsdp=4, rollout_tensor=2, remat="dots", cache_fraction=0.1),
    ("h200", "32k"): Division(fsdp=4, tensor=2, rollout_tensor=2, remat="dots", cache_fraction=0.1),
}


def get_config(choice: str = "v5p-128,8k") -> ConfigDict:
    """2 prompts x 8 responses per chip and step (at 8k), one update, KL to the initial model."""
    return to_config_dict(
        grpo("hf:Qwen/Qwen2.5-7B-Instruct", choice, DIVISIONS, positions=32_768, yarn_factor=4.0)
    )
