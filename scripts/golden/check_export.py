"""Loads an exported folder with transformers and compares it with the file of export_logits.py.

    /tmp/golden/bin/python scripts/golden/check_export.py --folder=exports/first \\
        --logits=/tmp/logits.json
    /tmp/golden/bin/python scripts/golden/check_export.py --folder=exports/base \\
        --adapter=exports/adapter --logits=/tmp/logits.json

Prints the largest difference of logits (of scalars, for a sequence classifier), and exits with 1 if
ids, chat text or names of weights differ. With --adapter the folder is a base model, to which peft
adds the adapters of the other folder. The environment is that of make_golden.py.
"""

import argparse
import json
import sys
from pathlib import Path

import peft
import safetensors.torch
import torch
import transformers


def load(folder: Path) -> tuple[torch.nn.Module, dict]:
    """(the folder's model in float32, report of loading it)."""
    (name,) = json.loads((folder / "config.json").read_text("utf-8"))["architectures"]
    kind = (
        transformers.AutoModelForSequenceClassification
        if name.endswith("ForSequenceClassification")
        else transformers.AutoModelForCausalLM
    )
    model, report = kind.from_pretrained(
        str(folder), dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert type(model).__name__ == name, type(model).__name__
    return model.eval(), report


def with_adapters(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """The model as peft runs it, with every tensor of the folder in it and no other adapter."""
    wrapped = peft.PeftModel.from_pretrained(model, str(folder))
    ours = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    theirs = peft.get_peft_model_state_dict(wrapped)
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
    return wrapped.eval()


@torch.no_grad()
def compare(model: torch.nn.Module, entry: dict) -> tuple[float, float]:
    """(largest difference, largest size) over the numbers of one prompt."""
    ids = torch.tensor([entry["ids"]])
    if "scalars" in entry:
        # the classifier's single number of a text is ours at its last token
        ours, theirs = torch.tensor(entry["scalars"])[-1:], model(ids, use_cache=False).logits[0]
    else:
        ours = torch.tensor(entry["logits"])
        theirs = model(ids, use_cache=False).logits[0][:, entry["kept"]]
    return float((ours - theirs).abs().max()), float(ours.abs().max())


def main() -> int:
    """Compares, prints, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, help="a folder written by export.py --adapter")
    parser.add_argument("--logits", type=Path, required=True)
    args = parser.parse_args()
    entries = json.loads(args.logits.read_text("utf-8"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(args.folder))
    model, report = load(args.folder)
    if args.adapter:
        model = with_adapters(model, args.adapter)
    problems = [f"{kind}: {sorted(map(str, names))}" for kind, names in report.items() if names]
    for entry in entries:
        if tokenizer(entry["text"], add_special_tokens=False)["input_ids"] != entry["ids"]:
            problems.append(f"other ids of {entry['text']!r}")
        if not isinstance(entry["prompt"], str):
            text = tokenizer.apply_chat_template(
                entry["prompt"], tokenize=False, add_generation_prompt=True
            )
            if text != entry["text"]:
                problems.append(f"another chat text: {text!r}, ours {entry['text']!r}")
    compared = [compare(model, entry) for entry in entries]
    difference, size = (max(numbers) for numbers in zip(*compared, strict=True))
    ends = getattr(model, "generation_config", None) and model.generation_config.eos_token_id
    print(
        f"{args.folder}: {type(model).__name__}, {model.num_parameters():,} parameters, tokenizer "
        f"{type(tokenizer).__name__}, ends at {ends}"
    )
    print(f"largest difference {difference:.3g}, of numbers up to {size:.3g}")
    print("\n".join(problems) or "ids, chat text and names of weights agree")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
