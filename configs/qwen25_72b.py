"""GRPO of Qwen2.5-72B-Instruct on pods.

    python scripts/train.py --config=configs/qwen25_72b.py:v5p-128,8k --workdir=runs/qwen25_72b \
        --config.data.train=DATA
    python scripts/plan.py --config=configs/qwen25_72b.py:v5p-128,8k --topology=v5p:4x4x4 \
        --config.model.source=configs/shapes/qwen25_72b

A choice is MACHINE,CONTEXT (distflow_jax/pods/preset.py). Results of plan.py for the
fewest chips per choice: GiB of HBM in the fullest segment, and the share to spare. Rows by
formulas have no temporaries, which take some of that share.

choice      topology     fullest       to spare  how
v5e-256,8k  v5e:16x16    13.8 of 15.8     12 %   compiled, all of it; offload=idle, int8 samplers
v5p-128,8k  v5p:4x4x4    74.0 of 95.7     23 %   compiled, all of it
v5p-256,32k v5p:4x4x8    80.6 of 95.7     16 %   compiled, all of it
v5p-512,64k v5p:4x8x8    50.7 of 95.7     47 %   formulas
h100-64,8k  h100:8x8     31.7 of 70.8     55 %   formulas; offload=idle
h100-64,32k h100:8x8     31.0 of 70.8     56 %   formulas; offload=idle
h200-32,8k  h200:4x8     44.0 of 124.8    65 %   formulas; offload=idle
h200-64,32k h200:8x8     39.5 of 124.8    68 %   formulas; offload=idle

64k exceeds the 32,768 positions of its training: model.yarn_factor=4, as in its model card.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.pods.preset import Division, grpo

DIVISIONS = {
    ("v5e", "8k"): Division(
        fsdp=16,
        tensor=16,
        rollout_tensor=8,
        cache_fraction=0.15,
        sampler_dtype="int8",
        offload="idle",
    ),
    ("v5p", "8k"): Division(fsdp=16, tensor=4, rollout_tensor=8),
    ("v5p", "32k"): Division(fsdp=16, tensor=4, context=2, rollout_tensor=8),
    ("v5p", "64k"): Division(fsdp=16, tensor=4, context=4, rollout_tensor=8),
    ("h100", "8k"): Division(fsdp=8, tensor=8, rollout_tensor=8, offload="idle"),
    ("h100", "32k"): Division(fsdp=8, tensor=8, rollout_tensor=8, offload="idle"),
    ("h200", "8k"): Division(fsdp=4, tensor=8, rollout_tensor=8, offload="idle"),
    ("h200", "32k"): Division(fsdp=8, tensor=8, rollout_tensor=8, offload="idle"),
}


def get_config(choice: str = "v5p-128,8k") -> ConfigDict:
    """2 prompts x 8 responses per chip and step (at 8k), one update, KL to the initial model."""
    return to_config_dict(
        grpo("hf:Qwen/Qwen2.5-72B-Instruct", choice, DIVISIONS, positions=32_768, yarn_factor=4.0)
    )
