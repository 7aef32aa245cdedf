"""A killed run, started again, ends where an undisturbed one does, bit for bit.

Nightly: a killed run, its newest checkpoint damaged, ends bit for bit as the
undisturbed one; one of an older version too, with one warning.
"""

import json
import shutil
import subprocess
import sys

import pytest
from support import haste
from support.paths import ROOT
from support.run_folders import last_step, lasting
from support.waiting import HANG, until

from distflow_jax.report.run_writer import read_metrics

OVERRIDES = [
    "--config.model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512",
    "--config.training.steps=6",
    "--config.checkpoint.every=1",
    "--config.eval.every=2",
    "--config.training.mini_batches=2",  # old log-probs and two updates per batch
    "--config.dag=tests/graphs/everything.yaml",
]


def start(workdir):
    command = [sys.executable, "scripts/train.py", "--config=configs/tiny.py"]
    return subprocess.Popen(
        [*command, f"--workdir={workdir}", *OVERRIDES],
        cwd=ROOT,
        env=haste.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(workdir):
    process = start(workdir)
    output, _ = process.communicate(timeout=HANG)
    assert process.returncode == 0, output[-4000:]
    return output


def kill_at(workdir, step):
    """SIGKILL as soon as the step's metrics are written (its checkpoint is then under way)."""
    process = start(workdir)

    def is_written():
        assert process.poll() is None, process.stdout.read()
        return last_step(workdir) >= step

    until(is_written, pause=0.005)
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder of the undisturbed run."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    finish(workdir)
    # prompts and responses are for the run's owner alone
    assert not [path for path in workdir.rglob("*") if path.stat().st_mode & 0o077]
    return workdir


@pytest.fixture(scope="module")
def undisturbed(finished):
    return read_metrics(finished / "metrics.jsonl")


def check_same(workdir, undisturbed):
    rows = lasting(workdir)
    assert [row["step"] for row in rows] == list(range(7))  # each once; 0 is the baseline
    for row, whole in zip(rows, undisturbed, strict=True):
        assert row == {n: x for n, x in whole.items() if not n.startswith(("timing", "perf/"))}


def damage_newest(workdir):
    """Truncates the newest checkpoint; returns its step and that of the one before.

    Two are always complete: a save waits for the one before it, and the run keeps two.
    """
    steps = sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())
    files = (p for p in (workdir / "checkpoints" / str(steps[-1])).rglob("*") if p.is_file())
    data = max(files, key=lambda p: p.stat().st_size)
    data.write_bytes(data.read_bytes()[:100])
    return steps[-1], steps[-2]


@pytest.mark.slow
def test_a_killed_and_damaged_run_ends_as_the_undisturbed_one(undisturbed, tmp_path):
    kill_at(tmp_path, 4)
    newest, before = damage_newest(tmp_path)
    output = finish(tmp_path)
    assert f"checkpoint {newest}" in output
    assert f"continuing from checkpoint {before}" in output
    check_same(tmp_path, undisturbed)
    assert all(row["perf/compilations"] == 0 for row in undisturbed[2:])
    # or equality would say nothing
    last = undisturbed[-1]
    assert last["actor/grad_norm"] > 0 and last["critic/grad_norm"] > 0
    assert last["actor/reward_kl_penalty_coeff"] != undisturbed[1]["actor/reward_kl_penalty_coeff"]
    assert "actor/grad_norm" not in undisturbed[1]  # the critic alone
    assert any(row["training/sampling_rounds"] > 1 for row in undisturbed[1:])


def as_an_older_version_wrote_it(workdir, info_keys, config_keys):
    """Takes from a run's folder what version 0.2 did not write."""
    (workdir / "run.lock").unlink(missing_ok=True)
    config = json.loads((workdir / "config.json").read_text())
    for section, key in config_keys:
        del config[section][key]
    (workdir / "config.json").write_text(json.dumps(config))
    for checkpoint in (workdir / "checkpoints").iterdir():
        record = checkpoint / "record" / "metadata"
        content = json.loads(record.read_text())
        for key in info_keys:
            del content["info"][key]
        record.write_text(json.dumps(content))
        table = json.loads((checkpoint / "checksums.json").read_text())
        sizes = {name: (checkpoint / name).stat().st_size for name in table}
        (checkpoint / "sizes.json").write_text(json.dumps(sizes))
        (checkpoint / "checksums.json").unlink()


@pytest.mark.slow
def test_a_run_of_an_older_version_goes_on_with_one_warning(finished, undisturbed, tmp_path):
    """Without checksums, digests of its models, and the keys that its version did not know."""
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    shutil.rmtree(workdir / "checkpoints" / "6")
    as_an_older_version_wrote_it(
        workdir,
        ("starting_weights", "rejected"),
        [("observe", "private"), ("observe", "trackers"), ("training", "max_rejected")],
    )
    output = finish(workdir)
    warnings = [line for line in output.splitlines() if "warning" in line.lower()]
    assert len(warnings) == 1, warnings
    assert "written by an older version: it has no checksums" in warnings[0]
    assert "does not say which weights the run was started from" in warnings[0]
    check_same(workdir, undisturbed)
