"""Writes tests/golden/families.json: logits of transformers for a tiny model of each family.

The weights are drawn from NumPy (tests/support/family_models.py), so that none are stored.
transformers loads them from a folder that this package's `config_to_hf` and `to_hf` write, which
also checks that it reads what we write. The config.json that transformers writes is kept for the
test that we read it.

    python -m venv /tmp/golden && /tmp/golden/bin/pip install -r scripts/golden/requirements.txt
    PYTHONPATH=.:tests /tmp/golden/bin/python scripts/golden/make_golden_families.py
"""

import argparse
import importlib.metadata
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import transformers
from support.family_models import CASES, FAMILY_MODULES, ROPES, TOKENS, drawn_params
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.families.name_map import unstacked_arrays

POSITIONS = (0, 11, 23)  # positions whose logits are all kept; of the others only the logsumexp


def write_folder(config: DecoderConfig, folder: Path) -> dict[str, Any]:
    """The model as a Hugging Face folder; returns its config.json."""
    family = FAMILY_MODULES[config.family]
    settings = family.config_to_hf(config)
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = {
        name: np.ascontiguousarray(tensor)
        for path, array in drawn_params(config)
        for name, tensor in unstacked_arrays(family.hf_weights(config), path, array)
    }
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return settings


@torch.no_grad()
def entry_of(config: DecoderConfig, folder: Path) -> dict[str, Any]:
    """Outputs of transformers for the folder's model."""
    settings = write_folder(config, folder)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder),
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not any(report.values()), report
    assert type(model).__name__ == settings["architectures"][0]
    logits = model.eval()(torch.from_numpy(TOKENS)[None].long()).logits[0].double()
    model.config.save_pretrained(folder)
    return {
        "config": json.loads((folder / "config.json").read_text()),
        "logits": [[round(x, 6) for x in logits[p].tolist()] for p in POSITIONS],
        "logsumexp": [round(x, 6) for x in logits.logsumexp(-1).tolist()],
    }


def rope_of(scaling: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """transformers' float32 frequencies, and its factor of cosines and sines."""
    config = transformers.Qwen2Config(rope_scaling=scaling, **sizes)
    config.head_dim = sizes["head_dim"]
    frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](config)
    return {"frequencies": frequencies.tolist(), "scale": scale}


def lines_of(table: dict[str, Any]) -> str:
    """JSON with a line for each entry."""
    return "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in table.items()) + "\n}"


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("tests/golden/families.json"))
    out = parser.parse_args().out
    entries = {}
    for name, config in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            entries[name] = entry_of(config, Path(folder))
        print(name, np.abs(entries[name]["logits"]).max())
    packages = ("torch", "transformers", "numpy")
    head = {
        "made_by": "scripts/golden/make_golden_families.py",
        "versions": {name: importlib.metadata.version(name) for name in packages}
        | {"python": platform.python_version()},
        "positions": POSITIONS,
    }
    ropes = {name: rope_of(*numbers) for name, numbers in ROPES.items()}
    body = json.dumps(head, indent=1)[:-2]
    ropes, entries = (lines_of(table) for table in (ropes, entries))
    out.write_text(f'{body},\n "ropes": {ropes},\n "entries": {entries}}}\n', "utf-8")
    json.loads(out.read_text("utf-8"))


if __name__ == "__main__":
    main()
