"""The subcommand generate."""

import contextlib
import pathlib
from types import SimpleNamespace

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.data.encoded_rows import PromptEncoder
from distflow_jax.environments.sample_episodes import sample_episodes
from distflow_jax.images.picture_files import PictureFile
from distflow_jax.images.placing import SeeingTokenizer, read_image, size_in_layout
from distflow_jax.images.record import MARK
from distflow_jax.parsing.json_text import MOST_FILE_BYTES, read_text
from distflow_jax.planning.plan_run import (
    open_configured,
    open_environments,
    settled_config,
)
from distflow_jax.planning.run_data import prompt_encoder
from distflow_jax.programs.program_cache import kept_programs
from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.runtime.samplers.standalone_sampler import open_answerer


def checked(options: SimpleNamespace) -> tuple[Config, list[str]]:
    """(config, prompts). Raises ValueError or FileNotFoundError for flags that do not fit."""
    config = settled_config(from_config_dict(Config, options.config), options.chosen)
    texts = _prompts(options)
    if config.rollout.num_samples < options.samples:
        raise ValueError(
            f"--samples={options.samples} is above config.rollout.num_samples="
            f"{config.rollout.num_samples}; raise that too"
        )
    return config, texts


def main(options: SimpleNamespace) -> int:
    """Reads the prompts, samples responses, prints them."""
    config, texts = checked(options)
    source = open_configured(config)
    encoder = prompt_encoder(source, config.data.image_tokens)
    prompts = []
    for i, text in enumerate(texts):
        if options.image is not None:
            prompt = _seeing(i, text, options, config, encoder)
        else:
            asked = text if options.raw else [{"role": "user", "content": text}]
            rendered, tokens = source.tokenizer.encode_prompt(asked)
            prompt = Prompt(i, i, np.asarray(tokens, np.int32), rendered, "", None, {})
        if len(prompt.tokens) > config.data.max_prompt_length:
            raise ValueError(
                f"prompt {i + 1} has {len(prompt.tokens)} tokens, above "
                f"config.data.max_prompt_length={config.data.max_prompt_length}; raise that "
                "limit, or shorten the prompt"
            )
        prompts.append(prompt)
    sampling = SamplingParams(
        options.samples,
        config.rollout.max_response_length,
        options.temperature,
        top_p=options.top_p,
    )
    with contextlib.ExitStack() as files:
        files.enter_context(kept_programs(config.compilation_cache))
        environments = open_environments(config, encoder, prompts[0], files)
        model = open_answerer(config, source, options.run)
        _, episodes, _ = sample_episodes(model.engine, model.state, prompts, sampling, environments)
    for response in (episode.response for episode in episodes):
        if len(episodes) > 1:
            print(f"--- {texts[response.prompt.counter]} [{response.sample}]")
        print(source.tokenizer.decode(response.tokens))
    return 0


def _seeing(
    number: int, text: str, options: SimpleNamespace, config: Config, encoder: PromptEncoder
) -> Prompt:
    """A prompt with the picture of --image before its text."""
    if not isinstance(encoder, SeeingTokenizer):
        raise ValueError(
            f"--image={options.image}: {config.model.source} has no tower; use a vision model, or "
            "--config.model.vision"
        )
    source_of_image = PictureFile(f"--image={options.image}", pathlib.Path(options.image))
    image = read_image(source_of_image, encoder.layout)
    size = size_in_layout(source_of_image, encoder.layout)
    asked = [{"type": "image"}, {"type": "text", "text": text}]
    prompt = MARK + text if options.raw else [{"role": "user", "content": asked}]
    placed = encoder.place(prompt, [size])
    return Prompt(
        number,
        number,
        placed.tokens,
        placed.text,
        "",
        None,
        {},
        images=(image,),
        patch=placed.patch,
    )


def _prompts(options: SimpleNamespace) -> list[str]:
    if (options.prompt is None) == (options.file is None):
        raise ValueError("give either --prompt or --file")
    if options.prompt is not None:
        return [options.prompt]
    lines = read_text(pathlib.Path(options.file), MOST_FILE_BYTES).split("\n")
    texts = [line.removesuffix("\r") for line in lines if line.strip()]
    if not texts:
        raise ValueError(f"{options.file} contains no prompt: write one per line")
    return texts
