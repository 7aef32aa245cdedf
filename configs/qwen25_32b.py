"""GRPO of Qwen2.5-32B-Instruct on pods.

    python scripts/train.py --config=configs/qwen25_32b.py:v5p-128,8k --workdir=runs/qwen25_32b \
        --config.data.train=DATA
    python scripts/plan.py --config=configs/qwen25_32b.py:v5p-128,8k --topology=v5p:4x4x4 \
        --config.model.source=configs/shapes/qwen25_32b

A choice is MACHINE,CONTEXT (distflow_jax/pods/preset.py). Results of plan.py for the
fewest chips per choice: GiB of HBM in the fullest segment, and the share to spare. Rows by
formulas have no temporaries, which take some of that share.

choice      topology     fullest       to spare  how
v5e-256,8k  v5e:16x16    10.7 of 15.8     32 %   formulas; offload=idle
v5e-256,32k v5e:16x16    10.6 of 15.8     33 %   formulas; offload=idle
v5p-128,8k  v5p:4x4x4    49.2 of 95.7     49 %   compiled, all of it
v5p-256,32k v5p:4x4x8    38.6 of 95.7     60 %   formulas
v5p-512,64k v5p:4x8x8    36.9 of 95.7     61 %   formulas
h100-32,8k  h100:4x8     44.9 of 70.8     37 %   formulas
h100-32,32k h100:4x8     21.3 of 70.8     70 %   formulas; offload=idle
h200-8,8k   h200:1x8     61.1 of 124.8    51 %   formulas; offload=idle
h200-16,32k h200:2x8     33.9 of 124.8    73 %   formulas; offload=idle

64k exceeds the 32,768 positions of its training: model.yarn_factor=4, as in its model card.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.pods.preset import Division, grpo

DIVISIONS = {
    ("v5e", "8k"): Division(fsdp=16, tensor=8, rollout_tensor=8, offload="idle"),
    ("v5e", "32k"): Division(fsdp=16, tensor=8, context=2, rollout_tensor=8, offload="idle"),
    ("v5p", "8k"): Division(fsdp=16, tensor=4, rollout_tensor=4),
    ("v5p", "32k"): Division(fsdp=16, tensor=4, context=2, rollout_tensor=4),
    ("v5p", "64k"): Division(fsdp=16, tensor=4, context=4, rollout_tensor=4),
    ("h100", "8k"): Division(fsdp=4, tensor=8, rollout_tensor=4),
    ("h100", "32k"): Division(fsdp=4, tensor=8, rollout_tensor=8, offload="idle"),
    ("h200", "8k"): Division(fsdp=1, tensor=8, rollout_tensor=4, offload="idle"),
    ("h200", "32k"): Division(fsdp=2, tensor=8, rollout_tensor=8, offload="idle"),
}


def get_config(choice: str = "v5p-128,8k") -> ConfigDict:
    """2 prompts x 8 responses per chip and step (at 8k), one update, KL to the initial model."""
    return to_config_dict(
        grpo("hf:Qwen/Qwen2.5-32B-Instruct", choice, DIVISIONS, positions=32_768, yarn_factor=4.0)
    )
