"""Writes tests/golden/vision.json: features and logits of transformers' image-text models.

Weights and images are drawn from NumPy (tests/support/seeing_models.py), so that none are stored.
transformers loads the weights from a folder that this package's `config_to_hf` and tables write,
and its image processors, which resize by Pillow, cut the images.

    python -m venv /tmp/golden && /tmp/golden/bin/pip install -r scripts/golden/requirements.txt
    PYTHONPATH=.:tests /tmp/golden/bin/python scripts/golden/make_golden_vision.py
"""

import argparse
import hashlib
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
from PIL import Image
from support.seeing_models import CASES, FAMILY_MODULES, IMAGES, NUM_IMAGES, drawn_params, tokens_of
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.families.name_map import unstacked_arrays
from distflow_jax.models.families.tower_config import preprocessor_to_hf

PROCESSORS = {
    "smolvlm": SmolVLMImageProcessorPil,
    "gemma3": Gemma3ImageProcessorPil,
    "qwen2_5_vl": Qwen2VLImageProcessorPil,
    "qwen3_vl": Qwen2VLImageProcessorPil,
}
KEPT = 7  # features of an image that are kept whole; of all others a sum
POSITIONS = (0, -3, -1)  # positions whose logits are kept; of the others the logsumexp


def write_folder(config: DecoderConfig, folder: Path) -> None:
    """The model as a Hugging Face folder."""
    family = FAMILY_MODULES[config.family]
    (folder / "config.json").write_text(json.dumps(family.config_to_hf(config)))
    tensors = {
        name: np.ascontiguousarray(tensor)
        for path, array in drawn_params(config)
        for name, tensor in unstacked_arrays(family.hf_weights(config), path, array)
    }
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def processor_of(config: DecoderConfig) -> Any:
    """transformers' image processor with the settings that this package writes."""
    settings = preprocessor_to_hf(config.vision)
    for key in ("image_processor_type", "processor_class"):
        settings.pop(key, None)
    return PROCESSORS[config.family](**settings)


def digest_of(config: DecoderConfig, inputs: dict[str, Any]) -> str:
    """Hash of the pixels uint8, as [pictures, height, width, 3] or [patches, rows, columns, 3]."""
    v = config.vision
    pixels = np.asarray(inputs["pixel_values"], np.float64)
    if config.family.startswith("qwen"):
        pixels = pixels.reshape(-1, 3, v.traits.frames, v.patch_size, v.patch_size)[:, :, 0]
    else:
        pixels = pixels.reshape(-1, *pixels.shape[-3:])
    pixels = (pixels.transpose(0, 2, 3, 1) * v.std + v.mean) * 255
    assert np.abs(pixels - pixels.round()).max() < 1e-2
    return hashlib.sha256(pixels.round().astype(np.uint8).tobytes()).hexdigest()


def features_of(model: Any, config: DecoderConfig, inputs: dict[str, Any]) -> list[np.ndarray]:
    """Features of one image [M, W], then those of DeepStack."""
    pixels = torch.from_numpy(np.asarray(inputs["pixel_values"], np.float32))
    if config.family.startswith("qwen"):
        grid = torch.from_numpy(np.asarray(inputs["image_grid_thw"]))
        found = model.model.get_image_features(pixels, grid, return_dict=True)
    else:
        found = model.model.get_image_features(pixels, return_dict=True)
    features = (found.pooler_output, *(getattr(found, "deepstack_features", None) or []))
    # a tuple of tensors has one for each image
    whole = [torch.cat(list(x)) if isinstance(x, list | tuple) else x for x in features]
    return [x.reshape(-1, x.shape[-1]).double().numpy() for x in whole]


def rounded(x: np.ndarray) -> list[Any]:
    """Six digits behind the point, as lists."""
    return np.round(x, 6).tolist()


def logits_of(
    model: Any, config: DecoderConfig, each: list[dict[str, Any]], counts: list[int]
) -> dict[str, Any]:
    """Logits of a prompt with these images."""
    ids, patch = tokens_of(config, counts)
    inputs: dict[str, Any] = {"input_ids": torch.from_numpy(ids)[None].long()}
    if each:
        pixels = [np.asarray(x["pixel_values"], np.float32) for x in each]
        if config.family == "smolvlm":
            inputs["pixel_values"] = torch.from_numpy(np.concatenate(pixels, axis=1))
        else:
            inputs["pixel_values"] = torch.from_numpy(np.concatenate(pixels))
        if config.family.startswith("qwen"):
            grids = [np.asarray(x["image_grid_thw"]) for x in each]
            inputs["image_grid_thw"] = torch.from_numpy(np.concatenate(grids))
    entry: dict[str, Any] = {}
    seen = torch.from_numpy((patch >= 0).astype(np.int64))[None]
    if config.family.startswith("qwen"):
        inputs["mm_token_type_ids"] = seen
        position, _ = model.model.get_rope_index(
            inputs["input_ids"],
            mm_token_type_ids=seen,
            image_grid_thw=inputs.get("image_grid_thw"),
        )
        entry["position_ids"] = position[:, 0].tolist()
    if config.family == "gemma3":
        inputs["token_type_ids"] = seen
    logits = model(**inputs).logits[0].double()
    kept = [rounded(logits[p].numpy()) for p in POSITIONS]
    return entry | {"logits": kept, "logsumexp": rounded(logits.logsumexp(-1).numpy())}


@torch.no_grad()
def entry_of(config: DecoderConfig, folder: Path) -> dict[str, Any]:
    """Outputs of transformers for the folder's model."""
    write_folder(config, folder)
    model, report = transformers.AutoModelForImageTextToText.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    model, processor = model.eval(), processor_of(config)
    each = [dict(processor([Image.fromarray(x)])) for x in IMAGES]
    images, counts = [], []
    for inputs in each:
        found = features_of(model, config, inputs)
        rows = np.linspace(0, len(found[0]) - 1, KEPT).astype(int)
        counts.append(len(found[0]))
        images.append(
            {
                "features": len(found[0]),
                "pixels": digest_of(config, inputs),
                "rows": rows.tolist(),
                "kept": [rounded(x[rows]) for x in found],
                "sums": [rounded(x.sum(axis=1)) for x in found],
            }
        )
    prompts = [logits_of(model, config, each[:n], counts[:n]) for n in NUM_IMAGES]
    model.config.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    return {"config": settings, "images": images, "prompts": prompts}


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("tests/golden/vision.json"))
    out = parser.parse_args().out
    entries = {}
    for name, config in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            entries[name] = entry_of(config, Path(folder))
        largest = np.abs(entries[name]["images"][1]["kept"]).max()
        print(name, [x["features"] for x in entries[name]["images"]], largest)
    packages = ("torch", "transformers", "numpy", "pillow")
    head = {
        "made_by": "scripts/golden/make_golden_vision.py",
        "versions": {name: importlib.metadata.version(name) for name in packages}
        | {"python": platform.python_version()},
        "positions": POSITIONS,
        "entries": entries,
    }
    out.write_text(json.dumps(head) + "\n", "utf-8")


if __name__ == "__main__":
    main()
