"""Generates responses to a prompt, or to every line of a file.

Examples:
  python scripts/generate.py --config=configs/grpo_smollm2.py --prompt="What is 12 + 35?"
  python scripts/generate.py --config=configs/grpo_smollm2.py --run=runs/first --file=questions.txt

Each prompt is a user's message in the model's chat template, unless --raw. If the config names an
environment (rollout.environment), responses are generated in turns with it.
"""

import pathlib

import numpy as np
from absl import flags
from ml_collections import config_flags

from distflow_jax.batch import Prompt
from distflow_jax.config.command_line import run_main
from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.environments.sample_episodes import sample_episodes
from distflow_jax.models.weights.source import open_model
from distflow_jax.planning.plan_run import open_environments
from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.runtime.standalone_sampler import open_answerer

CONFIG = config_flags.DEFINE_config_file("config", None, "The run's configuration.")
RUN = flags.DEFINE_string("run", "", "Folder of a run: use its newest weights.")
PROMPT = flags.DEFINE_string("prompt", None, "The prompt.")
FILE = flags.DEFINE_string("file", None, "A text file with one prompt per line.")
RAW = flags.DEFINE_boolean("raw", False, "Continue the text itself, without the chat template.")
SAMPLES = flags.DEFINE_integer("samples", 1, "Responses to each prompt.", 1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Sampling temperature; 0: greedy.", 0.0)
TOP_P = flags.DEFINE_float("top_p", 1.0, "Probability mass to sample from; 1: all.", 0.0, 1.0)
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> int:
    """Reads the prompts, samples responses, prints them."""
    config = from_config_dict(Config, CONFIG.value)
    texts = _prompts()
    if config.rollout.num_samples < SAMPLES.value:
        raise ValueError(
            f"--samples={SAMPLES.value} is above config.rollout.num_samples="
            f"{config.rollout.num_samples}; raise that too"
        )
    source = open_model(config.model.source, **config.model.options())
    prompts = []
    for i, text in enumerate(texts):
        prompt = text if RAW.value else [{"role": "user", "content": text}]
        rendered, tokens = source.tokenizer.encode_prompt(prompt)
        if len(tokens) > config.data.max_prompt_length:
            raise ValueError(
                f"prompt {i + 1} has {len(tokens)} tokens, above config.data.max_prompt_length="
                f"{config.data.max_prompt_length}; raise that, or shorten it"
            )
        prompts.append(Prompt(i, i, np.asarray(tokens, np.int32), rendered, "", None, {}))
    environments = open_environments(config, source, prompts[0])
    model = open_answerer(config, source, RUN.value)
    sampling = SamplingParams(
        SAMPLES.value, config.rollout.max_response_length, TEMPERATURE.value, top_p=TOP_P.value
    )
    _, episodes, _ = sample_episodes(model.engine, model.state, prompts, sampling, environments)
    for response in (episode.response for episode in episodes):
        if len(episodes) > 1:
            print(f"--- {texts[response.prompt.counter]} [{response.sample}]")
        print(source.tokenizer.decode(response.tokens))
    return 0


def _prompts() -> list[str]:
    if (PROMPT.value is None) == (FILE.value is None):
        raise ValueError("give either --prompt or --file")
    if PROMPT.value is not None:
        return [PROMPT.value]
    lines = pathlib.Path(FILE.value).read_text(encoding="utf-8").splitlines()
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise ValueError(f"{FILE.value} contains no prompt: write one per line")
    return texts


if __name__ == "__main__":
    run_main(main)
