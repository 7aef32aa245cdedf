"""Writes what `save_pretrained` of the installed transformers makes of a tiny model of each family.

    .venv-torch/bin/python scripts/golden/save_pretrained.py --out=/tmp/saved

with PYTHONPATH=.:tests gives /tmp/saved/CASE/FORM/, see FORMS, and version.txt.
tests/models/test_saved_models.py reads the folders back; weights are those of the cases there.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from support.rewritten import CASES, wider, written

from distflow_jax.models.decoder_config import DecoderConfig


def made(model: Any, folder: Path) -> None:
    """A model that was made here and not read from files, whose names transformers would keep."""
    other = type(model)(model.config)
    other.load_state_dict(model.state_dict())
    other.save_pretrained(folder)


def with_another_head(model: Any, folder: Path) -> None:
    """A head of its own in a model whose config says that it is tied."""
    head = torch.roll(model.get_input_embeddings().weight.data, 1, 0)
    model.lm_head.weight = torch.nn.Parameter(head)
    model.save_pretrained(folder)


def without_head(model: Any, folder: Path) -> None:
    """The model as `AutoModel` has it; the head of a tied model is its embedding."""
    model.model.save_pretrained(folder)


FORMS: dict[str, Callable[[Any, Path], None]] = {
    "read": lambda model, folder: model.save_pretrained(folder),
    "made": made,
    "current names": lambda m, folder: m.save_pretrained(folder, save_original_format=False),
    "shards": lambda model, folder: model.save_pretrained(folder, max_shard_size="20KB"),
    "bfloat16": lambda m, folder: m.to(torch.bfloat16).save_pretrained(folder),
}

OF_TIED = {
    "another head": with_another_head,
    "without head": without_head,
    "without head, current names": lambda model, folder: model.model.save_pretrained(
        folder, save_original_format=False
    ),
}


def loaded(config: DecoderConfig, folder: Path) -> Any:
    """transformers' model of a folder, after a check that it has found all tensors."""
    kind = "CausalLM" if config.vision is None else "ImageTextToText"
    model, report = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
        str(folder), dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return model


def main() -> None:
    """Writes the folders."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    for case in CASES:
        config, params = wider(case)
        written(out / case / "ours", config, params)
        forms = FORMS | (OF_TIED if config.tie_embeddings else {})
        for form, save in forms.items():
            save(loaded(config, out / case / "ours"), out / case / form)
    (out / "version.txt").write_text(transformers.__version__)


if __name__ == "__main__":
    main()
