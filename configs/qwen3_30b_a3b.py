"""GRPO of Qwen3-30B-A3B-Instruct-2507, a mixture of 128 experts, on pods.

    python scripts/train.py --config=configs/qwen3_30b_a3b.py:v5p-128,8k \
        --workdir=runs/qwen3_30b_a3b --config.data.train=DATA
    python scripts/plan.py --config=configs/qwen3_30b_a3b.py:v5p-128,8k --topology=v5p:4x4x4 \
        --config.model.source=configs/shapes/qwen3_30b_a3b

A choice is MACHINE,CONTEXT (distflow_jax/pods/preset.py). All are found by `plan.py --sweep`, and
have run nowhere yet.

The release of July 2025 has 262,144 positions, enough for 64k; its network is Qwen3-30B-A3B's.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.pods.preset import Division, grpo

DIVISIONS = {
    ("v5e", "8k"): Division(
        fsdp=64,
        rollout_tensor=4,
        expert=4,
        cache_fraction=0.4,
        sampler_dtype="int8",
        offload="idle",
    ),
    ("v5p", "8k"): Division(fsdp=16, expert=4, tensor=1, rollout_tensor=4),
    ("v5p", "32k"): Division(fsdp=16, expert=4, tensor=1, rollout_tensor=4),
    ("v5p", "64k"): Division(fsdp=16, expert=4, tensor=1, context=2, rollout_tensor=4),
    ("h100", "8k"): Division(fsdp=4, expert=8, tensor=1, rollout_tensor=4, offload="idle"),
    ("h100", "32k"): Division(fsdp=8, expert=4, tensor=1, rollout_tensor=4, offload="idle"),
    ("h200", "8k"): Division(fsdp=2, expert=8, tensor=1, rollout_tensor=4, offload="idle"),
    ("h200", "32k"): Division(fsdp=4, expert=4, tensor=1, rollout_tensor=4, offload="idle"),
    ("h200", "64k"): Division(fsdp=8, expert=4, tensor=1, rollout_tensor=4, offload="idle"),
}


def get_config(choice: str = "v5p-128,8k") -> ConfigDict:
    """2 prompts x 8 responses per chip and step (at 8k), one update, KL to the initial model."""
    return to_config_dict(
        grpo("hf:Qwen/Qwen3-30B-A3B-Instruct-2507", choice, DIVISIONS, positions=262_144)
    )
