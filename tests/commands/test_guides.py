"""Commands that pages show: each is run, here or by a named test, or is left out with a reason.

Nightly: the commands of guides, and the tutorial to the letter, do what the pages say.
"""

import ast
import json
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
from support.doc_blocks import blocks, commands, documents
from support.follow_page import SHELL, environment, follow, place, run
from support.paths import ROOT
from support.waiting import HANG

from distflow_jax.commands.subcommands import SUBCOMMANDS
from distflow_jax.report.run_writer import read_metrics

# pages whose commands another test reads and runs
ELSEWHERE = {
    "README.md": "tests/commands/test_readme.py",
    "docs/quickstart.md": "tests/commands/test_scripts.py",
    "docs/tasks.md": "tests/commands/test_tasks.py",
    "docs/clusters.md": "tests/commands/test_launch_cluster.py",
    "docs/sandbox.md": "tests/sandbox/test_sandbox.py",
}
# pages that are followed here; pages with none but commands of --help need no entry
FOLLOWED = {
    "docs/adapters.md",
    "docs/asynchronous.md",
    "docs/data.md",
    "docs/from_prime_rl.md",
    "docs/from_trl.md",
    "docs/from_tunix.md",
    "docs/from_verl.md",
    "docs/memory.md",
    "docs/parallelism.md",
    "docs/report.md",
    "docs/rewards.md",
    "docs/tutorial.md",
    "docs/workers.md",
}
# why no test runs a page's commands, or those commands of a page that have these words
NOT_RUN = {
    "CONTRIBUTING.md": "they run these tests",
    "docs/benchmarks.md": "measurements of hours, some beside packages that tests do not install",
    "docs/tools.md": "dozens of steps; tests/environments/test_interpreters.py runs the tools",
    "docs/peers.md": "measurements beside packages that tests do not install",
    "docs/machines.md": "TPUs and data of the hub; tests/planning/test_machine_names.py plans",
    "docs/scaling.md": "plans for pods of minutes to hours; tests/pods plans smaller ones",
    "docs/vision.md": "hundreds of steps; test_seeing_runs.py and test_shown_turns.py run a few",
    "docs/trackers.md": "wandb has an account or a folder; tests/report/test_trackers.py runs both",
}
LANGUAGES = {*SHELL, "python", "yaml", "json", "text"}  # a block of another one would be no command
OF_A_MACHINE = ("timing", "perf/", "val-")  # metrics that a replay has otherwise, or not at all
WORDS_NOT_RUN = {
    "openssl": "it makes a secret; tests/serving/test_access.py runs it for a certificate",
    "--token_file": "an open port; tests/serving/test_serve_process.py serves with these flags",
    "--config.dag=orpo": "400 pairs; tests/runs/test_learning.py trains on as many",
    "--config.dag=kto": "400 pairs, split in two; tests/runs/test_learning.py trains on as many",
    "hf:": "tests use no network; tests/data/test_columns.py reads a cache of the hub",
}


def lines(path):
    """The commands of a page, without comments at their end."""
    shell = [block for block in blocks(path) if block.language in SHELL]
    found = [command for block in shell for command in commands(block.text)]
    return [command[: command.index("#")] if "#" in command else command for command in found]


def is_left_out(command):
    return any(word in argument for argument in command for word in WORDS_NOT_RUN)


def of_help():
    """Commands that --help and the quickstart show, as test_scripts.py runs them."""
    found = lines(ROOT / "docs" / "quickstart.md")
    for path in (ROOT / "scripts").glob("*.py"):
        text = re.sub(r"\\\n\s*", " ", ast.get_docstring(ast.parse(path.read_text())))
        found += commands("\n".join(re.findall(r"^ +(python .*)$", text, re.MULTILINE)))
    for name, subcommand in SUBCOMMANDS.items():
        found += commands("\n".join(f"distflow {name} {x}" for x in subcommand.examples))
    return {in_a_checkout(command) for command in found}


def in_a_checkout(command):
    """The arguments of a command without its program, with configs by name."""
    first, second, *rest = command
    script = second.removeprefix("scripts/").removesuffix(".py") if first == "python" else second
    rest = [re.sub(r"^--config=configs/(.*)\.py$", r"--config=\1", argument) for argument in rest]
    return (script, *rest)


def test_every_command_is_run_or_left_out_with_a_reason():
    known = of_help()
    pages = {str(p.relative_to(ROOT)): p for p in [*documents(), ROOT / "CONTRIBUTING.md"]}
    shown = {name: lines(path) for name, path in pages.items()}
    listed = FOLLOWED | set(ELSEWHERE) | set(NOT_RUN)
    assert listed <= {name for name, found in shown.items() if found}
    assert {block.language for path in pages.values() for block in blocks(path)} <= LANGUAGES
    for name in set(shown) - listed:
        left = [c for c in shown[name] if not is_left_out(c) and in_a_checkout(c) not in known]
        assert not left, f"{name}: no test runs {left}"
    for name, test in ELSEWHERE.items():
        assert name.removeprefix("docs/") in (ROOT / test).read_text(encoding="utf-8"), test


def test_every_followed_page_is_followed():
    text = (ROOT / __file__).read_text(encoding="utf-8")
    for name in FOLLOWED:
        assert f'page("{name.removeprefix("docs/")}")' in text


def page(name):
    return ROOT / "docs" / name


@pytest.mark.slow
def test_adapters(tmp_path):
    place(tmp_path)
    follow(blocks(page("adapters.md")), tmp_path)
    assert (tmp_path / "exports/adapter/adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_asynchronous(tmp_path):
    (tmp_path / "lengths.json").write_text(json.dumps([[200, 7], [900, 2], [4000, 1]]))
    shown = [block for block in blocks(page("asynchronous.md")) if block.language != "text"]
    follow(shown, place(tmp_path), environment(tmp_path))
    rows = read_metrics(tmp_path / "runs/ahead/metrics.jsonl")
    assert max(row["training/off_policy/trajectory_staleness/max"] for row in rows[1:]) == 1
    recorded, replayed = (
        [
            {name: repr(value) for name, value in row.items() if not name.startswith(OF_A_MACHINE)}
            for row in read_metrics(tmp_path / f"runs/{name}/metrics.jsonl")
            if row["step"]
        ]
        for name in ("recorded", "again")
    )
    assert recorded == replayed and len(recorded) == 3


@pytest.mark.slow
def test_data(tmp_path):
    rows = [{"instruction": f"Write {i}.", "output": str(i)} for i in range(64)]
    (tmp_path / "alpaca.json").write_text(json.dumps(rows))
    (printed,) = [run(place(tmp_path), c) for c in lines(page("data.md")) if not is_left_out(c)]
    assert "alpaca" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "names"),
    [
        (page("from_verl.md"), {"reward/acc", "reward/characters"}),
        (page("from_trl.md"), {"reward/accuracy", "reward/brevity", "reward/longest"}),
        (page("from_tunix.md"), {"reward/check_format", "reward/check_answer"}),
        (page("from_prime_rl.md"), {"reward/correct", "reward/length"}),
    ],
    ids=lambda value: value.stem if isinstance(value, pathlib.Path) else "",
)
def test_coming_from(tmp_path, path, names):
    """Files and functions in another project's forms train, and each function is a metric."""
    place(tmp_path)
    for block in blocks(path):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
    for command in lines(path):
        if not is_left_out(command):
            run(tmp_path, command)
    found = [set(read_metrics(p)[-1]) for p in tmp_path.glob("runs/*/metrics.jsonl")]
    assert found and names <= set().union(*found)


@pytest.mark.slow
@pytest.mark.parametrize("path", [page("memory.md"), page("parallelism.md")], ids=lambda p: p.stem)
def test_plans(tmp_path, path):
    place(tmp_path)
    for command in lines(path):
        assert "plan " in run(tmp_path, command)


@pytest.mark.slow
def test_rewards(tmp_path):
    place(tmp_path)
    for command in lines(page("rewards.md")):
        run(tmp_path, command)
    for name, metric in (("scored", "reward/no_answer"), ("programs", "critic/score/mean")):
        rows = read_metrics(tmp_path / f"runs/{name}/metrics.jsonl")
        assert all(metric in row for row in rows if row["step"])


@pytest.mark.slow
def test_report(tmp_path):
    """Of two runs: the page of one, a comparison, and the server that shows both."""
    place(tmp_path)
    shown = lines(page("report.md"))
    for name in ("first", "second"):
        train = ["python", "scripts/train.py", "--config=configs/tiny.py"]
        run(tmp_path, [*train, f"--workdir=runs/{name}", "--config.training.steps=1"])
    (serve,) = [c for c in shown if any(x.startswith("--serve") for x in c)]
    (tmp_path / "runs/first/report.html").unlink()
    printed = [run(tmp_path, command) for command in shown if command != serve]
    assert printed == ["wrote runs/first/report.html\n", "wrote compare.html\n"]
    assert (tmp_path / "runs/first/report.html").is_file()
    assert "runs/second" in (tmp_path / "compare.html").read_text(encoding="utf-8")
    free = [re.sub(r"^--serve=\d+$", "--serve=0", x) for x in serve[1:]]  # its port may be in use
    with subprocess.Popen(
        [sys.executable, *free],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        (url,) = re.findall(r"^2 runs at (http://\S+) ", server.stdout.readline())
        with urllib.request.urlopen(url, timeout=HANG) as answer:
            assert "second" in answer.read().decode()
        server.send_signal(signal.SIGINT)
    assert server.returncode == 0


@pytest.mark.slow
def test_workers(tmp_path):
    """Trainers and a worker that joins them, one that scores too; then both by the launcher."""
    place(tmp_path)
    train, worker, launched, *turns, train_apart, worker_apart = lines(page("workers.md"))
    assert len(turns) == 2  # hosts of environments: tests/runs/test_worker_environments.py
    train = [argument for argument in train if "training.steps" not in argument]  # 3 are enough
    for name, trainers, joins in (("far", train, worker), ("apart", train_apart, worker_apart)):
        with subprocess.Popen(
            [sys.executable, *trainers[1:]], cwd=tmp_path, env=environment(tmp_path)
        ) as job:
            while not (tmp_path / "runs" / name / "task_buffers.json").exists():
                assert job.poll() is None
                time.sleep(0.1)
            printed = run(tmp_path, joins)
        assert job.returncode == 0 and ", version 0, for 1 trainer" in printed
    run(tmp_path, launched)
    for name in ("far", "both", "apart"):
        assert read_metrics(tmp_path / "runs" / name / "metrics.jsonl")[-1]["step"] == 3


@pytest.mark.slow
def test_tutorial(tmp_path):
    """To the letter, with the real model: the reward rises, and the answer is one of the words."""
    printed = follow(
        blocks(page("tutorial.md")), place(tmp_path), environment(tmp_path, hurried=False)
    )
    first, *_, last = read_metrics(tmp_path / "runs/weather/metrics.jsonl")
    name = "val-core/weather_test/reward/mean@1"
    assert last["step"] == 15 and last[name] > first[name]
    assert printed[-2].strip(". \n").lower() in ("rain", "sun", "snow")
    assert (tmp_path / "exports/weather/config.json").is_file()
    assert (tmp_path / "plan/plan.svg").is_file()
