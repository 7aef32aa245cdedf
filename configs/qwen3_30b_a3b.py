"""GRPO of Qwen3-30B-A3B-Instruct-2507, a mixture of 128 experts, on pods.

    python scripts/train.py --config=configs/qwen3_30b_a3b.py:v5p-64,8k \
        --workdir=runs/qwen3_30b_a3b --config.data.train=DATA
    python scripts/plan.py --config=configs/qwen3_30b_a3b.py:v5p-64,8k --topology=TOPOLOGY \
        --config.model.source=configs/shapes/qwen3_30b_a3b

The text behind the colon is CHIPS,CONTEXT (distflow_jax/pods/preset.py). None of these has
been compiled: they are sizes that divide, and no more than that.

The release of July 2025 has 262,144 positions, and so 64k; its network is that of Qwen3-30B-A3B.
"""

from ml_collections import ConfigDict

from distflow_jax.config_dict import to_config_dict
from distflow_jax.pods.preset import Division, grpo

DIVISIONS = {
    ("v5e", "8k"): Division(fsdp=16, expert=16, tensor=1, rollout_tensor=8),
    ("v5p", "8k"): Division(fsdp=4, expert=16, tensor=1, rollout_tensor=4),
    ("v5p", "32k"): Division(fsdp=4, expert=16, tensor=1, rollout_tensor=4),
    ("v5p", "64k"): Division(fsdp=4, expert=16, tensor=1, context=2, rollout_tensor=4),
    ("h100", "8k"): Division(fsdp=2, expert=8, tensor=1, rollout_tensor=4),
    ("h200", "8k"): Division(fsdp=2, expert=8, tensor=1, rollout_tensor=4),
}


def get_config(choice: str = "v5p-64,8k") -> ConfigDict:
    """8 responses to each of 2 prompts per chip and step (at 8k), one update, a KL to the start."""
    return to_config_dict(
        grpo("hf:Qwen/Qwen3-30B-A3B-Instruct-2507", choice, DIVISIONS, positions=262_144)
    )
