"""GRPO of Qwen2.5-0.5B-Instruct on one GPU of 24 GB.

    python scripts/train.py --config=configs/qwen25_0_5b.py:rtx4090-1,2k --workdir=runs/small \
        --config.data.train=hf:openai/gsm8k:main/train --config.reward.function=gsm8k
    python scripts/plan.py --config=configs/qwen25_0_5b.py:rtx4090-1,2k --topology=rtx4090-1 \
        --config.model.source=configs/shapes/qwen25_0_5b

A choice is MACHINE,CONTEXT (distflow_jax/pods/preset.py). docs/machines.md has the
results of plan.py for every choice.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.pods.preset import GPUS_OF_24_GB, Division, grpo

DIVISIONS = {
    **{(gpu, "2k"): Division(remat="attention") for gpu in GPUS_OF_24_GB},
}


def get_config(choice: str = "rtx4090-1,2k") -> ConfigDict:
    """8 prompts x 8 responses per device and step (at 2k), one update, KL to the initial model."""
    return to_config_dict(
        grpo("hf:Qwen/Qwen2.5-0.5B-Instruct", choice, DIVISIONS, positions=32_768)
    )
