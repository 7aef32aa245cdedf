"""The work of benchmarks/grpo_step.py that all sides do: models, flags, prompts.

Needs NumPy, and no package of any side. S samples of a prompt.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

RESERVED = 3  # prompts hold none of the first ids, which pad and end for some sides
MODELS: Mapping[str, Mapping[str, int]] = {
    "5m": {"hidden": 256, "layers": 6, "heads": 4, "kv_heads": 2, "mlp": 768, "vocab": 512},
    "135m": {"hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "mlp": 1536, "vocab": 49_152},
}
HEAD_DIM = 64
_FIRST_CHARACTER = 0x20000  # of a plane without surrogates; letters that nothing strips


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the work; the defaults are those of the case "short"."""
    parser.add_argument("--model", choices=sorted(MODELS), default="5m")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="responses per prompt")
    parser.add_argument("--prompt-length", type=int, default=32, help="ids of each prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="ids of a response at most")
    parser.add_argument(
        "--eos-frac", type=float, default=0.0, help="share of the vocabulary that ends a response"
    )
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the KL; 0: no reference")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=8, help="steps, warm-up included")
    parser.add_argument("--defaults", action="store_true", help="settings as the package has them")
    parser.add_argument("--paced", action="store_true", help="a line of stdin starts each step")


def parse_arguments(doc: str) -> argparse.Namespace:
    """The flags of a peer, whose module has this docstring."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    add_flags(parser)
    return parser.parse_args()


def source_of(model: str) -> str:
    """The model.source with random weights for a name of MODELS."""
    options = "&".join(f"{name}={value}" for name, value in MODELS[model].items())
    return f"random:llama?{options}&tied={int(model == '135m')}"


def end_ids(vocab: int, share: float) -> list[int]:
    """The last `share` of the vocabulary, which ends a response; [] for 0."""
    return list(range(vocab - max(1, round(vocab * share)), vocab)) if share else []


def prompt_ids(args: argparse.Namespace) -> Iterator[np.ndarray]:
    """Random prompts of each step, int32 [prompts, prompt_length]."""
    rng, vocab = np.random.default_rng(0), MODELS[args.model]["vocab"]
    for _ in range(args.steps):
        shape = (args.prompts, args.prompt_length)
        yield rng.integers(RESERVED, vocab, size=shape, dtype=np.int32)


def lower_half(ids: Sequence[int] | np.ndarray, vocab: int) -> float:
    """The reward: the share of a response's ids in the lower half of the vocabulary."""
    return float(np.mean(np.asarray(ids) < vocab // 2)) if len(ids) else 0.0


def as_text(ids: Sequence[int] | np.ndarray) -> str:
    """A character for every id, for sides that take text; `as_ids` is its inverse."""
    return "".join(chr(_FIRST_CHARACTER + int(i)) for i in ids)


def as_ids(text: str) -> list[int]:
    """The ids of a text of as_text."""
    return [ord(character) - _FIRST_CHARACTER for character in text]
