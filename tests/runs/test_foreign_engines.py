"""Runs whose workers sample with external engines: they learn, whatever goes wrong.

Nightly: workers that sample with external engines learn, whatever goes wrong; their log-
probs are ours.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from support.completions_server import CompletionsServer
from support.paths import ROOT
from support.programs import finished
from support.tiny_model import mesh_of, random_params
from support.waiting import HANG

from distflow_jax.models.weights.source import open_model
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.rollout.decode_state import EngineConfig
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.foreign.weight_probe import PROMPTS

STEPS = 20
MODEL = "random:llama?hidden=64&layers=2&heads=4&kv_heads=2&mlp=128&vocab=259"
SHARED = (
    f"model.source={MODEL}",
    "stream.workers=True",
    "stream.max_staleness=1",
    "algorithm.correction=token_tis",
    "observe.trackers=()",
    "eval.dataset=",
    f"training.steps={STEPS}",
    f"checkpoint.every={STEPS}",
    "training.optimizer.lr=3e-3",
    "reward.kwargs={}",
    "data.train=task:arithmetic?operands=2&operators=+&digits=1-9",
)


@contextlib.contextmanager
def program(*command, log):
    """A program of the package beside the test, on one CPU device; its output goes to a file."""
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(HANG)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def openai(tmp_path, faults=()):
    """--engine, and settings, of a server in this process."""
    source = open_model(MODEL)
    sizes = EngineConfig(
        slots=16, max_prompt=128, max_response=16, tokens_per_call=8, page_size=16, group_size=4
    )
    mesh = mesh_of(1, 1, names=("data", "tensor"))
    engine = RolloutEngine(source.config, sizes, mesh, stop_ids=source.tokenizer.stop_ids, seed=9)
    with CompletionsServer(engine, random_params(source.config, 9)) as server:
        server.faults.extend([""] * PROMPTS * bool(faults) + list(faults))  # after the first probe
        yield f"openai:{server.url}/v1", {"slots": 16, "try_seconds": HANG}
        assert server.loaded[0] == "version-0" and len(server.loaded) > STEPS / 2
        assert not server.faults


@contextlib.contextmanager
def distflow(tmp_path):
    """--engine, and settings, of scripts/serve.py with another random model."""
    weights, log = tmp_path / "weights", tmp_path / "serve.log"
    weights.mkdir()
    command = ("scripts/serve.py", "--config=configs/tiny.py", f"--config.model.source={MODEL}")
    flags = ("--config.seed=9", "--port=0", f"--load_folders={weights}", "--slots=16")
    with program(*command, *flags, log=log) as server:
        found = None
        while found is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(0.2)
            assert server.poll() is None, log.read_text()
            found = re.search(r"on (127\.0\.0\.1:\d+)", log.read_text())
        yield f"distflow:{found[1]}", {"folder": str(weights)}


FAULTS = ("error", "truncated", "wrong ids", "", "break", "no log-probs", "few log-probs")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "openai", "openai with faults", "distflow"])
def test_rewards_rise(tmp_path, kind):
    engines = {
        "own": lambda: contextlib.nullcontext(("own", None)),
        "openai": lambda: openai(tmp_path),
        "openai with faults": lambda: openai(tmp_path, FAULTS),
        "distflow": lambda: distflow(tmp_path),
    }
    shared = (*SHARED, "reward.function=tests/support/user_rewards.py:digits")
    config = ("--config=configs/tiny.py", *(f"--config.{key}" for key in shared))
    folder, log = tmp_path / "run", tmp_path / "worker.log"
    with engines[kind]() as (engine, settings):
        flags = [f"--engine={engine}"]
        if settings is not None:
            (tmp_path / "engine.json").write_text(json.dumps(settings))
            flags.append(f"--engine_settings={tmp_path / 'engine.json'}")
        train = ("scripts/train.py", *config, f"--workdir={folder}")
        worker = ("scripts/worker.py", *config, f"--join={folder}", *flags)
        with program(*train, log=tmp_path / "train.log") as trainer:
            while not (folder / "task_buffers.json").exists():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    trainer.wait(0.2)
                assert trainer.poll() is None, (tmp_path / "train.log").read_text()
            with program(*worker, log=log) as sampler:
                assert trainer.wait(HANG) == 0, (tmp_path / "train.log").read_text()[-3000:]
                assert sampler.wait(HANG) == 0, log.read_text()[-3000:]
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]]
    assert len(rows) == STEPS
    scores = [row["critic/score/mean"] for row in rows]
    assert np.mean(scores[-5:]) - scores[0] >= 0.05, scores
    for row in rows:
        assert row["training/off_policy/trajectory_staleness/max"] <= 1
    # step 1 is trained on by the weights that sampled it
    assert rows[0]["rollout_corr/log_ratio_abs_max"] <= 1e-4
    tries = re.findall(r"response \d+ of prompt \d+, try (\d) of 5", log.read_text())
    assert len(tries) == (sum(map(bool, FAULTS)) if "faults" in kind else 0), log.read_text()


@pytest.mark.slow
def test_worker_without_its_engine_ends_in_one_line(tmp_path):
    """Before it joins anything."""
    settings = tmp_path / "x.json"
    settings.write_text("{}")
    for flag, reason in (
        ("--engine=vllm:http://a", "give own, openai:http://HOST:PORT or distflow:HOST:PORT"),
        ("--engine=distflow:somewhere", "must be HOST:PORT, got 'somewhere'"),
        ("--engine=openai:ftp://a", "is no address of a server"),
        (f"--engine_settings={settings}", "is for external engines"),
    ):
        ahead = (
            "--config.stream.workers=True",
            "--config.stream.max_staleness=1",
            "--config.eval.dataset=",
        )
        flags = ("--config=configs/tiny.py", *ahead, "--join=nowhere", flag)
        done = finished("scripts/worker.py", *flags, codes=(2,))
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("error: ") and reason in line, line
