"""A run that sees: it trains on drawn pictures and compiles nothing later.

A frozen tower stays as it was drawn. The placeholder of images is text where no image stands. An
image is encoded once in each row that has its prompt.

Nightly: a run that sees compiles nothing after step 1, whatever the sizes of images, and reads a
sampled placeholder as text. test_failures.py: it resumes bit for bit.
"""

import dataclasses
import pathlib
from types import SimpleNamespace

import jax
import numpy as np
import PIL.Image
import pytest
from support.picture_rows import PROSE, write_rows
from support.run_folders import json_lines
from support.seeing_models import CASES, drawn_params

import distflow_jax as df
from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.checkpoint.export import run_export
from distflow_jax.commands import generate_command
from distflow_jax.config.config_dict import override
from distflow_jax.config.shipped import open_config
from distflow_jax.config.upkeep_config import CheckpointConfig
from distflow_jax.coordinator import field_moves
from distflow_jax.data.dataset import open_dataset
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.models.weights.hf_folder import Export, write_hf_folder
from distflow_jax.report.run_writer import read_metrics

SETTINGS = {
    "mesh.devices": "0:1",
    "data.prompts_per_step": 4,
    "rollout.num_samples": 4,
    "eval.num_prompts": 8,
    "checkpoint.every": 2,
    "algorithm.entropy_coef": 0.01,  # a gradient where no answer is right yet
}


def train(folder: pathlib.Path, steps: int, **settings):
    config = df.load_config("vision_tiny", SETTINGS | {"training.steps": steps} | settings)
    df.train(config, str(folder))
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]]


@pytest.fixture
def packed(monkeypatch):
    """All rows that runs of the test pack, as NumPy arrays."""
    found, pack_rows = [], field_moves.pack_rows

    def kept(*arguments):
        rows = pack_rows(*arguments)
        found.append(jax.device_get(rows))
        return rows

    monkeypatch.setattr(field_moves, "pack_rows", kept)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("freeze", ["vision", "language", "none"])
def test_what_is_frozen_is_not_trained(tmp_path, freeze):
    """The frozen part alone stays as it is, and the optimizer has no moments for it."""
    changes = {"checkpoint.every": 1, "training.freeze": freeze, "eval.dataset": ""}
    rows = train(tmp_path / "run", 2, **changes)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 and row["data/images"] == 4 for row in rows)
    one, two = (dict(run_export(tmp_path / "run", step=n).export.params()) for n in (1, 2))
    moved = {path for path in one if not np.array_equal(one[path], two[path])}
    tower = {path for path in one if path.startswith("vision/")}
    trained = {"vision": one.keys() - tower, "language": tower, "none": set(one)}[freeze]
    assert tower and moved == trained
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints", CheckpointConfig())
    moments = [x for x in checkpointer.contents(2)[1] if "opt_state" in x and "layers" in x]
    checkpointer.close()
    assert any("vision" in x for x in moments) == (freeze != "vision")
    assert any("vision" not in x for x in moments) == (freeze != "language")


@pytest.mark.slow
def test_generate_answers_about_a_picture(tmp_path, capsys):
    train(tmp_path / "run", 1)
    rng = np.random.default_rng(0)
    PIL.Image.fromarray(rng.integers(0, 256, (60, 90, 3), np.uint8)).save(tmp_path / "a.png")
    settings = [f"{name}={value}" for name, value in SETTINGS.items()]

    def answer(image="a.png", model="", **changes):
        config = override(open_config("vision_tiny"), [*settings, *([model] if model else [])])
        options = dict(prompt="How many?", file=None, raw=False, samples=2, temperature=1.0)
        options |= dict(top_p=1.0, config=config, chosen=(), run=str(tmp_path / "run"))
        options |= dict(image=str(tmp_path / image))
        capsys.readouterr()
        assert generate_command.main(SimpleNamespace(**options | changes)) == 0
        return capsys.readouterr().out

    for changes in ({}, dict(raw=True)):
        found = answer(**changes)
        assert [found.count(f"--- How many? [{n}]\n") for n in (0, 1, 2)] == [1, 1, 0]
    with pytest.raises(FileNotFoundError, match="does not exist"):
        answer("b.png")
    with pytest.raises(ValueError, match="has no tower; use a vision model"):
        answer(model="model.source=random:llama?hidden=64&layers=2&heads=4&mlp=96&vocab=272")


@pytest.mark.slow
def test_two_hundred_sizes_of_images_run_through_the_programs_of_step_1(tmp_path):
    data = "task:shapes?ask=count&sides=24-200&size=250"
    changes = {
        "model.source": "random:qwen2_5_vl?hidden=64&layers=2&heads=4&kv_heads=2&mlp=96&vocab=272"
        "&max_position=1024&vision_hidden=32&vision_layers=2&vision_heads=4&patch=14",
        "data.train": data,
        "data.max_prompt_length": 128,
        "training.row_tokens": 160,
        "data.prompts_per_step": 5,
        "rollout.num_samples": 2,
        "eval.dataset": "",
        "checkpoint.every": 100,
    }
    rows = train(tmp_path / "run", 50, **changes)
    assert len(rows) == 50 and all(row["data/images"] == 5 for row in rows)
    assert [row["perf/compilations"] for row in rows[1:]] == [0] * 49
    assert rows[-1]["training/epoch"] == 1  # each picture was read once
    images = [example.images[0] for example in map(open_dataset(data).__getitem__, range(250))]
    assert len({image.size() for image in images}) >= 200


@pytest.mark.slow
def test_an_image_is_encoded_once_in_each_row_that_has_its_prompt(tmp_path, packed):
    """With 8 samples per prompt that share it; groups do not fit into one row each."""
    changes = {"rollout.num_samples": 8, "rollout.max_response_length": 24, "eval.dataset": ""}
    metrics = train(tmp_path / "run", 2, **changes)
    assert len(packed) == 2
    for row, rows in zip(metrics, packed, strict=True):
        shape = rows.valid.shape[-1]
        groups = zip(rows.group.reshape(-1, shape), rows.valid.reshape(-1, shape), strict=True)
        pairs = sum(len(set(group[valid])) for group, valid in groups)
        assert row["perf/images_encoded"] == pairs
        # what a tower finds there: the segments of each chunk, which are numbered from 1
        assert rows.images.segments.max(axis=-1).sum() == pairs
        assert 4 == row["data/images"] < pairs < 32


@pytest.fixture
def eager(tmp_path):
    """A model that likes to write `<image>`, the id that stands where its images are."""
    tokenizer = Tokenizer.byte_level(300)
    tokenizer.backend.add_special_tokens(["<image>"])
    placeholder = tokenizer.backend.token_to_id("<image>")
    case = CASES["smolvlm whole"]
    tower = dataclasses.replace(case.vision, image_token=placeholder)
    network = dataclasses.replace(case, vocab_size=300, tie_embeddings=False, vision=tower)
    params = dict(drawn_params(network))
    params["head"][:, placeholder] *= 12
    folder = tmp_path / "model"
    write_hf_folder(folder, Export(network, tokenizer, lambda: iter(params.items())))
    return str(folder), placeholder


@pytest.mark.slow
def test_a_placeholder_without_an_image_is_text(tmp_path, packed, eager):
    """The policy samples it, and a question has it in its prose."""
    source, placeholder = eager
    changes = {
        "model.source": source,
        "data.train": write_rows(tmp_path / "data", pictures=2, prose=2),
        "data.max_prompt_length": 128,
        "rollout.max_response_length": 8,
        "reward.function": "pattern",
        "reward.kwargs": {"pattern": ".*[0-9].*"},
        "training.optimizer.lr": 1e-4,  # it goes on to sample it
        "eval.dataset": "",
        "checkpoint.every": 100,
    }
    metrics = train(tmp_path / "run", 20, **changes)
    assert len(metrics) == len(packed) == 20
    for row, rows in zip(metrics, packed, strict=True):
        assert row["data/images"] == 2 and np.isfinite(row["actor/loss"])
        assert row["training/rollout_probs_diff_max"] < 1e-4
        is_placeholder, is_image = rows.tokens == placeholder, rows.images.patch >= 0
        assert is_placeholder[is_image].all() and is_image.any()
        sampled = is_placeholder & rows.response_mask
        assert sampled.sum() > 16 and not (is_image & rows.response_mask).any()
        in_prose = is_placeholder & ~is_image & ~rows.response_mask
        assert in_prose.any()
    samples = json_lines(tmp_path / "run" / "samples" / "1.jsonl")
    assert any(PROSE in sample["prompt"] for sample in samples)
    assert any("<image>" in sample["response"] for sample in samples)
