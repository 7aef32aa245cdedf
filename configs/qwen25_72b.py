"""GRPO of Qwen2.5-72B-Instruct on pods.

    python scripts/train.py --config=configs/qwen25_72b.py:v5p-64,8k --workdir=runs/qwen25_72b \
        --config.data.train=DATA
    python scripts/plan.py --config=configs/qwen25_72b.py:v5p-64,8k --topology=TOPOLOGY \
        --config.model.source=configs/shapes/qwen25_72b

The text behind the colon is CHIPS,CONTEXT (distflow_jax/pods/preset.py). Compiled
(docs/scaling.md): all of v5p-64,8k fits v5p:4x4x4, 71.9 of 95.7 GiB, 24.9 % to spare; of v5e-256,8k
and v5p-128,32k the update alone, 12.0 of 15.75 GiB and 81.1 of 95.7. The others have not been.

64k is beyond the 32,768 positions of its training: model.yarn_factor=4, as its model card has it.
By formulas, without temporaries, v5p-256 at 64k holds 46.4 of 95.7 GiB; it was not compiled.
"""

from ml_collections import ConfigDict

from distflow_jax.config_dict import to_config_dict
from distflow_jax.pods.preset import Division, grpo

DIVISIONS = {
    ("v5e", "8k"): Division(
        fsdp=16, tensor=16, rollout_tensor=32, cache_fraction=0.33, offload="idle"
    ),
    ("v5p", "8k"): Division(fsdp=16, tensor=4, rollout_tensor=8),
    ("v5p", "32k"): Division(fsdp=16, tensor=4, context=2, rollout_tensor=8),
    ("v5p", "64k"): Division(fsdp=16, tensor=4, context=4, rollout_tensor=8),
    ("h100", "8k"): Division(fsdp=8, tensor=8, rollout_tensor=8),
    ("h200", "8k"): Division(fsdp=8, tensor=8, rollout_tensor=8),
}


def get_config(choice: str = "v5p-64,8k") -> ConfigDict:
    """8 responses to each of 2 prompts per chip and step (at 8k), one update, a KL to the start."""
    return to_config_dict(
        grpo("hf:Qwen/Qwen2.5-72B-Instruct", choice, DIVISIONS, positions=32_768, yarn_factor=4.0)
    )
