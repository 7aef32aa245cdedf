"""The subcommand generate."""

import pathlib
from types import SimpleNamespace

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.environments.sample_episodes import sample_episodes
from distflow_jax.models.weights.source import open_model
from distflow_jax.planning.plan_run import open_environments
from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.runtime.samplers.standalone_sampler import open_answerer


def main(options: SimpleNamespace) -> int:
    """Reads the prompts, samples responses, prints them."""
    config = from_config_dict(Config, options.config)
    texts = _prompts(options)
    if config.rollout.num_samples < options.samples:
        raise ValueError(
            f"--samples={options.samples} is above config.rollout.num_samples="
            f"{config.rollout.num_samples}; raise that too"
        )
    source = open_model(config.model.source, **config.model.options())
    prompts = []
    for i, text in enumerate(texts):
        prompt = text if options.raw else [{"role": "user", "content": text}]
        rendered, tokens = source.tokenizer.encode_prompt(prompt)
        if len(tokens) > config.data.max_prompt_length:
            raise ValueError(
                f"prompt {i + 1} has {len(tokens)} tokens, above config.data.max_prompt_length="
                f"{config.data.max_prompt_length}; raise that, or shorten it"
            )
        prompts.append(Prompt(i, i, np.asarray(tokens, np.int32), rendered, "", None, {}))
    environments = open_environments(config, source, prompts[0])
    model = open_answerer(config, source, options.run)
    sampling = SamplingParams(
        options.samples,
        config.rollout.max_response_length,
        options.temperature,
        top_p=options.top_p,
    )
    _, episodes, _ = sample_episodes(model.engine, model.state, prompts, sampling, environments)
    for response in (episode.response for episode in episodes):
        if len(episodes) > 1:
            print(f"--- {texts[response.prompt.counter]} [{response.sample}]")
        print(source.tokenizer.decode(response.tokens))
    return 0


def _prompts(options: SimpleNamespace) -> list[str]:
    if (options.prompt is None) == (options.file is None):
        raise ValueError("give either --prompt or --file")
    if options.prompt is not None:
        return [options.prompt]
    lines = pathlib.Path(options.file).read_text(encoding="utf-8").splitlines()
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise ValueError(f"{options.file} contains no prompt: write one per line")
    return texts
