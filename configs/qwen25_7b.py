"""GRPO of Qwen2.5-7B-Instruct on pods.

    python scripts/train.py --config=configs/qwen25_7b.py:v5p-64,8k --workdir=runs/qwen25_7b \
        --config.data.train=DATA
    python scripts/plan.py --config=configs/qwen25_7b.py:v5p-64,8k --topology=TOPOLOGY \
        --config.model.source=configs/shapes/qwen25_7b

The text behind the colon is CHIPS,CONTEXT (distflow_jax/pods/preset.py). None of these has
been compiled. By formulas, without temporaries, v5p-64 at 8k holds 11.8 of 95.7 GiB; the others are
sizes that divide, and no more than that.

64k is beyond the 32,768 positions of its training: model.yarn_factor=4, as its model card has it.
By formulas, without temporaries, v5p-128 at 64k holds 12.3 of 95.7 GiB; it was not compiled.
"""

from ml_collections import ConfigDict

from distflow_jax.config_dict import to_config_dict
from distflow_jax.pods.preset import Division, grpo

DIVISIONS = {
    ("v5e", "8k"): Division(fsdp=16, tensor=4, rollout_tensor=4),
    ("v5e", "32k"): Division(fsdp=16, tensor=4, context=4, rollout_tensor=4, offload="idle"),
    ("v5p", "8k"): Division(fsdp=16, tensor=4, rollout_tensor=4),
    ("v5p", "32k"): Division(fsdp=16, tensor=4, rollout_tensor=4),
    ("v5p", "64k"): Division(fsdp=16, tensor=4, context=2, rollout_tensor=4),
    ("h100", "8k"): Division(fsdp=8, tensor=1, rollout_tensor=1),
    ("h200", "8k"): Division(fsdp=8, tensor=1, rollout_tensor=1),
}


def get_config(choice: str = "v5p-64,8k") -> ConfigDict:
    """8 responses to each of 2 prompts per chip and step (at 8k), one update, a KL to the start."""
    return to_config_dict(
        grpo("hf:Qwen/Qwen2.5-7B-Instruct", choice, DIVISIONS, positions=32_768, yarn_factor=4.0)
    )
