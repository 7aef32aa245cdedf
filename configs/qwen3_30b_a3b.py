"""GRPO of Qwen3-30B-A3B-Instruct-2507, a mixture of 128 experts, on pods.

    python scripts/train.py --config=configs/qwen3_30b_a3b.py:v5p-128,8k \
        --workdir=runs/qwen3_30b_a3b --config.data.train=DATA
    python scripts/plan.py --config=configs/qwen3_30b_a3b.py:v5p-128,8k --topology=v5p:4x4x4 \
        --config.model.source=configs/shapes/qwen3_30b_a3b

A choice is MACHINE,CONTEXT (distflow_jax/pods/preset.py). Results of plan.py for the
fewest chips per choice: GiB of HBM in the fullest segment, and the share to spare. Rows by
formulas have no temporaries, which take some of that share.

choice      topology     fullest       to spare  how
v5e-256,8k  v5e:16x16    10.0 of 15.8     36 %   formulas; offload=idle, int8 samplers
v5p-128,8k  v5p:4x4x4    55.4 of 95.7     42 %   compiled, all of it
v5p-128,32k v5p:4x4x4    36.3 of 95.7     62 %   formulas
v5p-256,64k v5p:4x4x8    36.4 of 95.7     62 %   formulas
h100-16,8k  h100:2x8     38.4 of 70.8     46 %   formulas; offload=idle
h100-32,32k h100:4x8     28.6 of 70.8     60 %   formulas; offload=idle
h200-8,8k   h200:1x8     76.8 of 124.8    38 %   formulas; offload=idle
h200-16,32k h200:2x8     34.2 of 124.8    73 %   formulas; offload=idle
h200-32,64k h200:4x8     30.2 of 124.8    76 %   formulas; offload=idle

The release of July 2025 has 262,144 positions, enough for 64k; its network is Qwen3-30B-A3B's.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.pods.preset import Division, grpo

DIVISIONS = {
    ("v5e", "8k"): Division(
        fsdp=64, expert=4, tensor=1, rollout_tensor=4, sampler_dtype="int8", offload="idle"
    ),
    ("v5p", "8k"): Division(fsdp=16, expert=4, tensor=1, rollout_tensor=4),
    ("v5p", "32k"): Division(fsdp=16, expert=4, tensor=1, rollout_tensor=4),
    ("v5p", "64k"): Division(fsdp=16, expert=4, tensor=1, context=2, rollout_tensor=4),
    ("h100", "8k"): Division(fsdp=2, expert=8, tensor=1, rollout_tensor=4, offload="idle"),
    ("h100", "32k"): Division(fsdp=8, expert=4, tensor=1, rollout_tensor=4, offload="idle"),
    ("h200", "8k"): Division(fsdp=1, expert=8, tensor=1, rollout_tensor=4, offload="idle"),
    ("h200", "32k"): Division(fsdp=4, expert=4, tensor=1, rollout_tensor=4, offload="idle"),
    ("h200", "64k"): Division(fsdp=8, expert=4, tensor=1, rollout_tensor=4, offload="idle"),
}


def get_config(choice: str = "v5p-128,8k") -> ConfigDict:
    """2 prompts x 8 responses per chip and step (at 8k), one update, KL to the initial model."""
    return to_config_dict(
        grpo("hf:Qwen/Qwen3-30B-A3B-Instruct-2507", choice, DIVISIONS, positions=262_144)
    )
