"""Runs with workers that pages, --help and shipped presets name: each has a plan."""

import contextlib
import dataclasses
import importlib
import re

import pytest
from support.doc_blocks import blocks, commands
from support.paths import ROOT
from support.presets import PRESETS, least_machine

from distflow_jax.commands.subcommands import SUBCOMMANDS
from distflow_jax.config.config_dict import from_config_dict, override
from distflow_jax.config.run_config import Config
from distflow_jax.config.shipped import open_config
from distflow_jax.models.weights.source import open_shapes
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.machine_names import named_machine
from distflow_jax.planning.plan_run import plan_run, prepare
from distflow_jax.runtime.samplers.worker_nodes import read_nodes

WORKERS = "--config.stream.workers=True"
HERE = Machine(1, 1, 1, "cpu")


def with_workers():
    """Commands with workers of --help, and of all pages, as {name: words}."""
    found = commands("\n".join(f"worker {text}" for text in SUBCOMMANDS["worker"].examples))
    assert len(found) == 4
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for block in blocks(path):
            found += commands(block.text) if block.language in ("", "sh", "bash") else []
    kept = [words for words in found if WORKERS in words]
    assert len(kept) >= 10
    return kept


def plan_of(source, settings, machine):
    config = from_config_dict(Config, override(open_config(source), settings))
    return plan_run(config, machine, open_source=open_shapes)


@pytest.mark.parametrize("words", with_workers(), ids=lambda words: " ".join(words)[:60])
def test_every_command_with_workers_has_a_plan(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    (source,) = [w.partition("=")[2] for w in words if w.startswith("--config=")]
    settings = [w.removeprefix("--config.") for w in words if w.startswith("--config.")]
    planned = plan_of(source, settings, HERE)
    assert planned.config.stream.workers and not planned.own_samplers
    assert planned.config.algorithm.correction != "none"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_plans_with_workers_of_one_host(name):
    divisions = importlib.import_module(f"configs.{name}").DIVISIONS
    for (kind, context), division in divisions.items():
        least = least_machine(kind, division)
        machine = dataclasses.replace(Machine.of(named_machine(least)), host_memory=1 << 40)
        local = machine.local_devices
        source = f"configs/{name}.py:{least},{context}"
        flags = [f"model.source=configs/shapes/{name}", "stream.workers=True"]
        planned = plan_of(source, [*flags, "stream.max_staleness=1"], machine)
        assert planned.sizes.sampler_hosts == 1
        (row,) = [row for row in planned.table() if row[0] == "samplers"]
        assert row[1] == "workers"
        spread = division.rollout_tensor > local
        assert bool(re.search(f"does not fit a host of {local} devices", row[2])) == spread


def test_a_correction_is_chosen_where_tokens_may_be_old():
    ahead = ["stream.max_staleness=1"]

    def correction(*settings):
        return plan_of("tiny", [*settings, "eval.dataset="], HERE).config.algorithm.correction

    assert correction() == "none"
    assert correction(*ahead) == "token_tis"
    assert correction(*ahead, "algorithm.correction=token_mis") == "token_mis"
    assert correction(*ahead, "algorithm.rejection=k3") == "none"
    assert correction(*ahead, "algorithm.proximal=rollout") == "none"
    assert correction(*ahead, "dag=online_dpo", "rollout.num_samples=2") == "none"
    with pytest.raises(ValueError, match=r"set algorithm\.correction"):
        config = from_config_dict(Config, override(open_config("tiny"), ahead))
        plan_run(config, HERE, {"algorithm.correction"}, open_source=open_shapes)


def test_hosts_of_environments_try_one_in_place_of_trainers(tmp_path, caplog):
    """Where they have the data."""
    (tmp_path / "away.py").write_text(
        "class Away:\n"
        "    def __init__(self, tokenizer):\n"
        "        raise RuntimeError('no docker on this host')\n"
        "    reset = step = None.__init__\n"
    )
    settings = [
        *("stream.workers=True", "stream.max_staleness=1", "eval.dataset=", "eval.every=0"),
        *("reward.function=zero", "reward.kwargs={}", "reward.num_workers=1"),
        f"rollout.environment={tmp_path}/away.py:Away",
    ]
    hosts = "stream.worker_nodes=('environment',)"
    with pytest.raises(ValueError, match="failed on the first row: .*no docker on this host"):
        prepare(from_config_dict(Config, override(open_config("tiny"), settings)))
    prepare(from_config_dict(Config, override(open_config("tiny"), [*settings, hosts]))).close()

    def open_host(*own):
        run = plan_of("tiny", [*settings, *own], HERE)
        with contextlib.ExitStack() as files:
            read_nodes(["environment"], run.config, run.graph, run.source).open_host(files)

    with pytest.raises(ValueError, match="failed on the first row: .*no docker on this host"):
        open_host()
    open_host("data.train=/there/is/none.jsonl")
    assert "/there/is/none.jsonl" in caplog.text
