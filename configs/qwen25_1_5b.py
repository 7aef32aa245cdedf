"""GRPO of Qwen2.5-1.5B-Instruct on one GPU or TPU VM.

    python scripts/train.py --config=configs/qwen25_1_5b.py:rtx4090-1,2k --workdir=runs/small \
        --config.data.train=hf:openai/gsm8k:main/train --config.reward.function=gsm8k
    python scripts/plan.py --config=configs/qwen25_1_5b.py:rtx4090-1,2k --topology=rtx4090-1 \
        --config.model.source=configs/shapes/qwen25_1_5b

A choice is MACHINE,CONTEXT (distflow_jax/pods/preset.py). docs/machines.md has the
results of plan.py for every choice.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.pods.preset import GPUS_OF_24_GB, Division, grpo

DIVISIONS = {
    **{(gpu, "2k"): Division(lora_rank=32, remat="dots") for gpu in GPUS_OF_24_GB},
    ("h100", "2k"): Division(),
    ("v5e", "2k"): Division(fsdp=8, rollout_tensor=2, micro_rows=8, offload="idle"),
}


def get_config(choice: str = "rtx4090-1,2k") -> ConfigDict:
    """8 prompts x 8 responses per device and step (at 2k), one update, KL to the initial model."""
    return to_config_dict(
        grpo("hf:Qwen/Qwen2.5-1.5B-Instruct", choice, DIVISIONS, positions=32_768)
    )
