"""A run's models and a model source go out as Hugging Face folders and come back bit for bit.

Nightly: the default model and a trained checkpoint leave as Hugging Face folders, come back bit for
bit, and train on.
"""

import json
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict
from support import haste
from support.exported_folder import assert_bits, random_params
from support.paths import ROOT
from support.text_tables import cells_of
from support.tiny_config import tiny_config
from support.waiting import HANG

from distflow_jax import run
from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.checkpoint.export import run_export, source_export, untied
from distflow_jax.checkpoint.trained_weights import read_trained
from distflow_jax.config.upkeep_config import CheckpointConfig
from distflow_jax.models.decoder_config import YarnScaling, scalar_model
from distflow_jax.models.weights.hf_folder import Export, write_hf_folder
from distflow_jax.models.weights.source import open_model
from distflow_jax.parallel.mesh import MeshSizes, role_mesh
from distflow_jax.programs.units import format_bytes, format_decimal

SPEC = "random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=300"
CONFIG = open_model(SPEC).config


def save_run(folder, steps, source=SPEC, **options):
    """A run's folder as training leaves it: {step: {model: parameters}}, an optimizer beside."""
    folder.mkdir(exist_ok=True)
    model = {"source": source, "cache_dir": ""} | options
    (folder / "config.json").write_text(json.dumps({"model": model}))
    checkpointer = Checkpointer(folder / "checkpoints", CheckpointConfig(keep=5))
    for step, models in steps.items():
        state = {
            key: {
                "params": unflatten_dict(params, sep="/"),
                "opt_state": {"0": {"mu": unflatten_dict(params, sep="/")}},
                "count": np.int32(step),
            }
            for key, params in models.items()
        }
        checkpointer.save(step, jax.device_put(state), {})
    checkpointer.close()
    return folder


@pytest.fixture(scope="module")
def models():
    """Parameters of three models at two steps."""
    critic = scalar_model(CONFIG)
    return {
        step: {
            "actor": random_params(CONFIG, step),
            "critic": random_params(critic, step + 10),
            "my.judge": random_params(critic, step + 20),
        }
        for step in (2, 4)
    }


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run") / "run", models)


@pytest.mark.parametrize("limit", [10**9, 30_000])
@pytest.mark.parametrize("step", [None, 2, 4])
def test_a_runs_weights_come_back_bit_for_bit(saved, models, tmp_path, step, limit):
    found = run_export(saved, step=step)
    assert (found.model, found.step) == ("actor", step or 4)
    written = write_hf_folder(tmp_path / "out", found.export, max_shard_bytes=limit)
    assert ("model.safetensors" in written.files) == (limit == 10**9)
    source = open_model(str(tmp_path / "out"))
    assert source.config == CONFIG
    assert_bits(dict(source.params()), models[step or 4]["actor"])


@pytest.mark.parametrize("key", ["critic", "my.judge"])
def test_a_runs_scalar_models_go_out_too(saved, models, tmp_path, key):
    found = run_export(saved, model=key)
    assert isinstance(found.export.network, type(scalar_model(CONFIG)))
    assert_bits(dict(found.export.params()), models[4][key])
    write_hf_folder(tmp_path / "out", found.export)
    tensors = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(tensors["score.weight"][0], models[4][key]["head"])


def test_the_only_model_needs_no_name(models, tmp_path):
    alone = save_run(tmp_path / "run", {1: {"reward": models[2]["critic"]}})
    assert run_export(alone).model == "reward"


@pytest.mark.slow
def test_the_default_model_comes_back_bit_for_bit(smollm2, tmp_path):
    write_hf_folder(tmp_path / "out", source_export(smollm2.spec), max_shard_bytes=10**8)
    again = open_model(str(tmp_path / "out"))
    assert again.config == smollm2.config
    assert again.tokenizer.stop_ids == smollm2.tokenizer.stop_ids
    for (path, loaded), (other, array) in zip(again.params(), smollm2.params(), strict=True):
        assert path == other and loaded.tobytes() == array.tobytes(), path


@pytest.mark.slow
def test_an_untied_export_has_the_head_and_the_log_probs_of_the_tied_model(tmp_path):
    tied = open_model("random:llama?hidden=32&layers=1&heads=4&kv_heads=2&mlp=64&vocab=300")
    params = random_params(tied.config)
    flat = flatten_dict(params, sep="/")
    export = Export(tied.config, tied.tokenizer, lambda: iter(flat.items()), None)
    write_hf_folder(tmp_path / "out", untied(export))
    own = open_model(str(tmp_path / "out"))
    assert not own.config.tie_embeddings
    read = dict(own.params())
    np.testing.assert_array_equal(read["head"], np.asarray(flat["embed/embedding"]).T)
    assert read.keys() - {"head"} == flat.keys()
    with pytest.raises(ValueError, match="--untie is for a model with tied embeddings"):
        untied(source_export(str(tmp_path / "out")))


@pytest.mark.slow
def test_what_training_leaves_can_be_exported_and_trained_on(tmp_path):
    small = [f"model.source={SPEC}", "training.steps=2", "checkpoint.every=1", "dag=ppo"]
    small += ["rollout.max_response_length=8", "eval.dataset=", "data.max_prompt_length=96"]
    config = tiny_config(*small)
    assert run.train(config, tmp_path / "run") == 0
    found = run_export(tmp_path / "run")
    assert found.step == 2
    write_hf_folder(tmp_path / "out", found.export)
    assert_bits(dict(open_model(str(tmp_path / "out")).params()), dict(found.export.params()))
    assert "head" in dict(run_export(tmp_path / "run", model="critic").export.params())
    small[:2] = [f"model.source={tmp_path / 'out'}", "training.steps=1"]
    config = tiny_config(*small)
    assert run.train(config, tmp_path / "next") == 0


# -- what cannot be exported -----------------------------------------------------------------------


def test_mistakes_name_what_there_is(saved, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 3 .* there are: \[2, 4\]"):
        run_export(saved, step=3)
    with pytest.raises(ValueError, match="no model 'judge'; there are: actor, critic, my.judge"):
        run_export(saved, model="judge")
    with pytest.raises(FileNotFoundError, match="holds no checkpoints/"):
        run_export(tmp_path)
    with pytest.raises(ValueError, match="a run draws them at its start; export a run"):
        source_export(SPEC)
    other = SPEC.replace("mlp=64", "mlp=96")
    with pytest.raises(ValueError, match=r"layers/down \[2, 64, 32\], there \[2, 96, 32\]"):
        run_export(saved, source=other)


def test_several_models_without_an_actor_must_be_named(models, tmp_path):
    two = {"critic": models[2]["critic"], "judge": models[2]["my.judge"]}
    with pytest.raises(ValueError, match="name one of critic, judge with --model"):
        run_export(save_run(tmp_path / "run", {1: two}))


def test_a_source_that_moved_can_be_named(models, tmp_path):
    params = {1: {"actor": models[2]["actor"]}}
    moved = save_run(tmp_path / "run", params, source="nowhere/model")
    with pytest.raises(FileNotFoundError, match="nowhere/model.* Give its source now with"):
        run_export(moved)
    assert_bits(dict(run_export(moved, source=SPEC).export.params()), models[2]["actor"])


@pytest.mark.parametrize("source", ["", SPEC])
def test_a_stretched_run_goes_out_stretched(models, tmp_path, source):
    params = {1: {"actor": models[2]["actor"]}}
    run = save_run(tmp_path / "run", params, yarn_factor=2.0, yarn_positions=512)
    config = run_export(run, source=source).export.network
    assert config.rope_scaling == YarnScaling(2.0, 512)
    assert config.max_position == CONFIG.max_position  # more than twice 512


def test_a_damaged_checkpoint_names_the_others(models, tmp_path):
    folder = save_run(tmp_path / "run", models)
    for path in (folder / "checkpoints/4/arrays").rglob("*"):
        if path.is_file():
            path.unlink()
    with pytest.raises(ValueError, match=r"checkpoint 4 .* is missing.*others are: \[2\]"):
        run_export(folder)
    assert_bits(dict(run_export(folder, step=2).export.params()), models[2]["actor"])


def flip_largest(folder):
    """Inverts one bit in the largest file below a folder; returns its name."""
    path = max(folder.rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path.name


def test_a_flipped_bit_is_no_export(models, tmp_path):
    folder = save_run(tmp_path / "run", models)
    damaged = flip_largest(folder / "checkpoints" / "4" / "arrays")
    with pytest.raises(ValueError, match=rf"checkpoint 4 .*/{damaged} has another content"):
        write_hf_folder(tmp_path / "out", run_export(folder).export)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=rf"checkpoint 4 .*/{damaged} has another content"):
        read_trained(folder, "actor", CONFIG, role_mesh(MeshSizes(fsdp=8, tensor=1)))
    assert dict(run_export(folder, step=2).export.params())


def test_a_checkpoint_of_an_older_version_is_exported_with_one_warning(models, tmp_path, caplog):
    """However many parameters are read, each by itself."""
    folder = save_run(tmp_path / "run", models)
    table = folder / "checkpoints" / "4" / "checksums.json"
    sizes = {name: entry[0] for name, entry in json.loads(table.read_text()).items()}
    table.with_name("sizes.json").write_text(json.dumps(sizes))
    table.unlink()
    caplog.clear()
    assert_bits(dict(run_export(folder).export.params()), models[4]["actor"])
    assert ["older version" in record.getMessage() for record in caplog.records] == [True]


# -- the script, killed ----------------------------------------------------------------------------


# scripts/export.py that is killed once it has written some of the tensors
DYING = """
import os, signal
from distflow_jax.commands.main import run_script
from distflow_jax.models.weights.safetensors_writer import SafetensorsWriter

write, left = SafetensorsWriter.write, iter(range(20, -1, -1))

def dying(self, *arguments):
    write(self, *arguments)
    if next(left) == 0:
        os.kill(os.getpid(), signal.SIGKILL)

SafetensorsWriter.write = dying
run_script("export")
"""


def start_export(*flags, script=("scripts/export.py",)):
    return subprocess.Popen(
        [sys.executable, *script, *flags],
        cwd=ROOT,
        env=haste.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("before", ["nothing", "a model"])
def test_a_killed_export_leaves_nothing_under_the_name(saved, models, smollm2, tmp_path, before):
    out = tmp_path / "folder" / "out"
    if before == "a model":
        write_hf_folder(out, run_export(saved).export)
    flags = (f"--source={smollm2.spec}", f"--out={out}", "--overwrite")
    process = start_export(*flags, script=("-c", DYING))
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == -signal.SIGKILL, errors
    (partial,) = out.parent.glob(".out.partial-*/model.safetensors")
    assert partial.stat().st_size < 4 * 134_515_008  # it was in the midst
    if before == "nothing":
        assert not out.exists()
    else:
        assert_bits(dict(open_model(str(out)).params()), models[4]["actor"])


def test_the_script_says_what_it_wrote_and_what_is_wrong(saved, models, tmp_path):
    out = tmp_path / "out"
    writing = start_export(f"--workdir={saved}", f"--out={out}", "--dtype=bfloat16")
    mistaken = start_export(f"--workdir={saved}", "--step=3", f"--out={tmp_path / 'none'}")
    text, errors = writing.communicate()
    assert writing.returncode == 0, errors
    assert "out of the range of bfloat16: 0 values became infinite, 0 became 0" in text
    count = sum(array.size for array in models[4]["actor"].values())
    sizes = {path.name: path.stat().st_size for path in out.iterdir()}
    files = dict(cells_of(text, ["file", "size"]))
    assert files == {name: format_bytes(size) for name, size in sizes.items()}
    first, second = text.splitlines()[-2:]
    assert first == f"wrote actor of {saved} at step 4 as bfloat16 to {out}:"
    total = format_bytes(sum(sizes.values()))
    said = f"  {format_decimal(count, '')} parameters in 6 files, {total}, in "
    assert re.fullmatch(re.escape(said) + r"\S+", second)
    _, errors = mistaken.communicate()
    assert mistaken.returncode == 2
    last = errors.strip().splitlines()[-1]
    assert last.startswith("error: no checkpoint of step 3 in ") and "there are: [2, 4]" in last
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
