"""GRPO of Qwen2.5-3B-Instruct on one GPU or TPU VM.

    python scripts/train.py --config=configs/qwen25_3b.py:v5e-8,2k --workdir=runs/qwen25_3b \
        --config.data.train=hf:openai/gsm8k:main/train --config.reward.function=gsm8k
    python scripts/plan.py --config=configs/qwen25_3b.py:v5e-8,2k --topology=v5e-8 \
        --config.model.source=configs/shapes/qwen25_3b

A choice is MACHINE,CONTEXT (distflow_jax/pods/preset.py). docs/machines.md has the
results of plan.py for every choice.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.pods.preset import GPUS_OF_24_GB, Division, grpo

DIVISIONS = {
    **{
        (gpu, "2k"): Division(lora_rank=32, sampler_dtype="int8", remat="dots", cache_fraction=0.1)
        for gpu in GPUS_OF_24_GB
    },
    ("h100", "2k"): Division(lora_rank=32, remat="none", cache_fraction=0.1),
    ("v4", "2k"): Division(
        fsdp=4, rollout_tensor=2, micro_rows=4, cache_fraction=0.1, offload="idle"
    ),
    ("v5e", "2k"): Division(
        fsdp=4,
        tensor=2,
        rollout_tensor=2,
        remat="attention",
        micro_rows=2,
        cache_fraction=0.25,
        offload="idle",
    ),
    ("v6e", "2k"): Division(fsdp=8, rollout_tensor=2, micro_rows=8, cache_fraction=0.1),
}


def get_config(choice: str = "v5e-8,2k") -> ConfigDict:
    """8 prompts x 8 responses per device and step (at 2k), one update, KL to the initial model."""
    return to_config_dict(grpo("hf:Qwen/Qwen2.5-3B-Instruct", choice, DIVISIONS, positions=32_768))
