"""The commands that the quickstart and --help show do what they say, on a small model.

Where a command names the config grpo_smollm2 it runs on tiny made smaller still, and its folders
and files lie in a temporary one.

Nightly: `plan.py` prints every config's plan and exits with 2 if a run would not fit; every shown
command of serving, evaluation, generation, export, workers and launchers works.
"""

import ast
import json
import re
import shlex
import socket
import subprocess
import sys
import urllib.request

import grpc
import pytest
from support import haste
from support.doc_blocks import blocks
from support.paths import ROOT
from support.screen import run_on_terminal, shown_lines, without_waits
from support.text_tables import cells_of
from support.waiting import HANG

from distflow_jax.commands.command_help import shown
from distflow_jax.commands.launch import local
from distflow_jax.commands.subcommands import SUBCOMMANDS
from distflow_jax.config.shipped import shipped_configs
from distflow_jax.models.weights.source import open_model
from distflow_jax.programs.units import format_bytes
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.serving.client import SamplerClient

SCRIPTS = sorted(path.stem for path in ROOT.glob("scripts/*.py"))
PODS = {path.name for path in ROOT.glob("configs/shapes/*")}  # test_pod_configs.py plans these
CONFIGS = sorted({path.stem for path in ROOT.glob("configs/*.py")} - PODS)
SMALL = [
    "model.source=random:llama?hidden=32&layers=1&heads=4&kv_heads=2&mlp=64&vocab=300",
    "data.train=task:arithmetic?size=64",
    "data.max_prompt_length=96",
    "data.prompts_per_step=4",
    "rollout.max_response_length=8",
    "eval.dataset=task:arithmetic?size=64&held_out=1",
    "eval.num_prompts=4",
    "training.steps=1",
]
STAMP = r"\d\d-\d\d \d\d:\d\d:\d\d "
FLAGS = [f"--config.{assignment}" for assignment in SMALL]


def commands_in(text):
    """Every `python scripts/...` and `distflow ...` on lines of its own, as a script's arguments.

    They name the small config.
    """
    joined = re.sub(r"\\\n\s*", " ", text).replace("grpo_smollm2", "tiny")
    joined = re.sub(r"configs/tiny\.py(?=\s|$)", "tiny", joined, flags=re.MULTILINE)
    joined = re.sub(
        r"^( *)distflow launch local ", r"\1python scripts/launch_local.py ", joined, flags=re.M
    )
    names = "|".join(SUBCOMMANDS)
    joined = re.sub(rf"^( *)distflow ({names})\b", r"\1python scripts/\2.py", joined, flags=re.M)
    found = re.findall(r"^ *(python scripts/\w+\.py(?: .*)?)$", joined, re.MULTILINE)
    return [tuple(shlex.split(command)[1:]) for command in found]


def shown_commands():
    texts = {
        script: ast.get_docstring(ast.parse(read(f"scripts/{script}.py"))) for script in SCRIPTS
    }
    commands = [*commands_in(read("docs/quickstart.md"))]
    for script, text in texts.items():
        found = commands_in(text)
        assert found, f"the docstring of scripts/{script}.py shows no example"
        if script in SUBCOMMANDS:
            assert text.startswith(SUBCOMMANDS[script].summary)
            found += commands_in("\n".join(shown(SUBCOMMANDS[script], f"distflow {script}")))
        else:
            found += commands_in(local.__doc__)
        assert all(command[0] == f"scripts/{script}.py" for command in found)
        commands += found
    return list(dict.fromkeys(commands))


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


SHOWN = shown_commands()


def commands_of(script, without="--help"):
    """The commands of a script that a page shows, as parameters; all but the longest are slow."""
    found = [c for c in SHOWN if c[0] == script and without not in c]
    longest, *others = sorted(found, key=len, reverse=True)
    return [longest, *(pytest.param(command, marks=pytest.mark.slow) for command in others)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where the commands run: a folder that looks like the repository's root."""
    path = tmp_path_factory.mktemp("place")
    for name in ("scripts", "configs"):
        (path / name).symlink_to(ROOT / name)
    (path / "questions.txt").write_text("What is 12 + 35?\n\nWhat is 7 + 8?\n")
    return path


def start(place, *arguments):
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=place,
        env=haste.environment() | {"COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    stdout, stderr = process.communicate(timeout=HANG)
    assert process.returncode == 0, stdout + stderr
    return stdout


def without_stamps(output):
    """The lines of a log, each without the time that it begins with; less those of long waits."""
    lines = without_waits(output).splitlines()
    found = [re.fullmatch(f"{STAMP}(.*)", line) for line in lines]
    assert all(found), output
    return [line[1] for line in found]


def run_shown(place, command):
    return finish(start(place, *command, *FLAGS))


@pytest.fixture(scope="module")
def first_run(place):
    """The run that the other commands read, runs/first: the quickstart's own."""
    (command,) = [c for c in SHOWN if c[0] == "scripts/train.py" and "--workdir=runs/first" in c]
    return run_shown(place, command)


def test_train_trains(place, first_run):
    lines = without_stamps(first_run)
    labels = ["model", "devices", "data", "algorithm", "memory", "run"]
    first = [line for line in lines if line.split()[0] in labels]
    assert [line.split()[0] for line in first] == labels
    assert first[-1] == "run       runs/first (new; plan.txt has the plan)"
    (step,) = [i for i, line in enumerate(lines) if line.startswith("step 1/1  reward 0.")]
    assert lines.index(first[-1]) < step
    evaluations = [line.partition("  evaluation ")[0] for line in lines[step + 1 : step + 3]]
    assert evaluations == ["before step 1", "after step 1"]
    assert re.fullmatch(r"done      step 1, after \S+", lines[step + 3])
    folded = " ".join(line.removesuffix("\\").strip() for line in lines[step + 4 :])
    for command in ("evaluate", "generate", "export"):
        assert f"{command}{' ' * (10 - len(command))}python scripts/{command}.py " in folded
    report = place / "runs/first/report.html"
    assert "report    runs/first/report.html" in lines[step:] and report.is_file()
    steps = [row["step"] for row in read_metrics(place / "runs/first/metrics.jsonl")]
    assert sorted(set(steps)) == [0, 1]
    config = json.loads((place / "runs/first/config.json").read_text())
    assert config["training"]["optimizer"]["lr"] == 2e-6


def test_a_run_takes_the_memory_that_it_said(place, first_run):
    """After step 1, and with the largest program's own figure."""
    tree = json.loads((place / "runs/first/memory.json").read_text())
    fullest = tree["fullest"]
    said = f"{format_bytes(fullest['total'])} of {format_bytes(tree['device'])} a device"
    assert f"memory    {said}, most in {fullest['segment']}" in without_stamps(first_run)
    assert "memory of a device" not in first_run
    plan = (place / "runs/first/plan.txt").read_text()
    assert f"\nmemory of a device, which has {format_bytes(tree['device'])}; in " in plan
    (first,) = [r for r in read_metrics(place / "runs/first/metrics.jsonl") if r["step"] == 1]
    live = first["perf/memory_live_gb"] * 2**30
    assert live == pytest.approx(tree["between_steps"], rel=0.15)
    temporaries = {s["name"]: s["temporaries"] for s in tree["segments"]}
    assert temporaries["rollout"] > 0 and temporaries["actor_train"] > 0
    largest = max(s["gradients"] + (s["temporaries"] or 0) for s in tree["segments"])
    assert live + largest == pytest.approx(tree["fullest"]["total"], rel=0.15)


def test_a_finished_run_says_so(place, first_run):
    (command,) = [c for c in SHOWN if c[0] == "scripts/train.py" and "--workdir=runs/first" in c]
    assert without_stamps(run_shown(place, command)) == [
        "runs/first is finished: step 1 of 1.",
        "Choose another --workdir, or raise training.steps to go on",
    ]


@pytest.mark.slow
def test_a_run_on_a_terminal_redraws_one_line_of_progress(place, first_run):
    """In 80 columns: what the log file of `first_run` has, without the time, and nothing else."""
    flags = [*FLAGS, "--config.training.steps=3", "--config.training.optimizer.lr=2e-6"]
    command = ["scripts/train.py", "--config=tiny", "--workdir=runs/terminal", *flags]
    env = haste.environment() | {"TERM": "xterm-256color", "LANG": "C.UTF-8"}
    env = {k: v for k, v in env.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    code, written = run_on_terminal([sys.executable, *command], cwd=place, env=env)
    assert code == 0, written
    lines = shown_lines(written)
    # of a command that is to be copied, a word that is wider has a line of its own
    wide = [line for line in lines if len(line) > 80]
    assert all(re.fullmatch(r" {12}\S+ \\", line) for line in wide), wide
    labels = ["model", "devices", "data", "algorithm", "memory", "run"]
    assert [line.split()[0] for line in lines[:6]] == labels
    assert lines[5] == "run       runs/terminal (new; plan.txt has the plan)"
    assert re.fullmatch(r"step 3/3 .*reward \d\.\d{3} .*evaluation \d\.\d{3}  left 0s", lines[6]), (
        lines[6]
    )
    # the line of each step, and the words of a wait, have stood in the same place
    drawn = re.findall(r"step (\d)/3 ", written)
    assert drawn == sorted(drawn) and {"0", "1", "2", "3"} == set(drawn)
    assert not re.search(r"step \d/3 [^\r\n]*…", written)  # words are left out, none is cut
    assert re.search(r"compiling the programs of the plan \d+s", written)
    end = [line.split()[0] for line in lines[7:] if line and not line.startswith(" ")]
    assert end == ["done", "accuracy", "reward", "report", "evaluate", "generate", "export"]
    assert re.fullmatch(r"done      step 3, after \S+", lines[7])
    report = [line for line in lines if line.startswith("report ")]
    assert report == ["report    runs/terminal/report.html"]
    assert (place / "runs/terminal/report.html").is_file()


REPORT, *LIVE = sorted((c for c in SHOWN if c[0] == "scripts/report.py"), key=len)


@pytest.mark.parametrize("command", [REPORT], ids=" ".join)
def test_report_makes_the_page_that_the_run_left(place, first_run, command):
    path = place / "runs/first/report.html"
    left = path.read_text(encoding="utf-8")
    assert "done: 1 steps" in left
    path.unlink()
    assert finish(start(place, *command)) == "wrote runs/first/report.html\n"
    assert path.read_text(encoding="utf-8") == left


@pytest.mark.parametrize("command", LIVE, ids=" ".join)
def test_report_serves_the_runs_until_a_signal(place, first_run, command):
    """Of the runs that the command names the second has not begun."""
    assert "runs/first" in command and "runs/second" in command
    (place / "runs/second").mkdir(exist_ok=True)
    port = ["--serve=0"]  # the one that is shown may be in use
    process = start(place, *(word for word in command if not word.startswith("--serve=")), *port)
    try:
        ready = process.stdout.readline()
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+/", ready)
        with urllib.request.urlopen(address, timeout=HANG) as reply:
            page = reply.read().decode()
        assert reply.status == 200 and "first" in page and "second" in page
    finally:
        process.terminate()
        finish(process)


@pytest.mark.parametrize("command", commands_of("scripts/evaluate.py"), ids=" ".join)
def test_evaluate_writes_json(place, first_run, command):
    output = run_shown(place, command)
    (out,) = [argument[6:] for argument in command if argument.startswith("--out=")]
    report = json.loads((place / out).read_text())
    samples = 8 if "--config.eval.num_samples=8" in command else 1
    trained = "--run=runs/first" in command
    assert (report["step"], report["run"]) == ((1, "runs/first") if trained else (0, ""))
    assert len(report["records"]) == 4
    assert all(len(r["responses"]) == len(r["scores"]) == samples for r in report["records"])
    mean = sum(sum(r["scores"]) for r in report["records"]) / (4 * samples)
    name = f"val-core/arithmetic/reward/mean@{samples}"
    assert report["metrics"][name] == pytest.approx(mean)
    assert (f"val-core/arithmetic/reward/best@{samples}/mean" in report["metrics"]) == (samples > 1)
    printed = dict(cells_of(output, ["metric", "value"]))
    assert printed.keys() == report["metrics"].keys()
    assert printed[name] == f"{mean:.4f}" and printed["val-aux/arithmetic/num_prompts"] == "4"
    assert output.endswith(f"\n\nwrote {out}\n")
    if trained:
        assert "model     runs/first at step 1\n" in output


@pytest.mark.parametrize("command", commands_of("scripts/generate.py"), ids=" ".join)
def test_generate_answers(place, first_run, command):
    output = run_shown(place, command)
    if "--file=questions.txt" in command:
        for question in ("What is 12 + 35?", "What is 7 + 8?"):
            assert output.count(f"--- {question} [0]\n") == 1
    else:
        assert output and "---" not in output


@pytest.mark.slow
def test_generate_samples_repeat_themselves_and_differ(place, first_run):
    flags = ["--config=configs/tiny.py", *FLAGS, "--prompt=x", "--samples=4", "--temperature=1.5"]
    first, again = (start(place, "scripts/generate.py", *flags) for _ in range(2))
    output = finish(first)
    assert output == finish(again)
    answers = re.split(r"--- x \[\d\]\n", output)[1:]
    assert len(answers) == 4 and len(set(answers)) > 1


# what needs a run with adapters is in test_lora.py
@pytest.mark.parametrize(
    "command", commands_of("scripts/export.py", without="--adapter"), ids=" ".join
)
def test_export_writes_a_folder_that_opens(place, first_run, command):
    output = finish(start(place, *command))
    (out,) = [argument[6:] for argument in command if argument.startswith("--out=")]
    from_run = "--workdir=runs/first" in command
    assert f"wrote {'actor of runs/first at step 1' if from_run else 'pypi:'}" in output
    model = open_model(str(place / out))
    assert model.config.hidden_size == (32 if from_run else 576)
    generate = ["--config=configs/tiny.py", *FLAGS, f"--config.model.source={out}", "--prompt=x"]
    if from_run:
        assert finish(start(place, "scripts/generate.py", *generate))


@pytest.mark.parametrize("command", commands_of("scripts/worker.py"), ids=" ".join)
def test_worker_names_the_trainers_that_do_not_answer(place, command, monkeypatch):
    """By exit code 75: started again, it may find those that tests/runs/test_workers.py starts."""
    monkeypatch.setenv("DISTFLOW_TOKEN", "0123456789abcdef" * 2)
    stream = ("--config.stream.workers=True", "--config.stream.max_staleness=1")
    process = start(place, *command, "--join_seconds=1", *FLAGS, *stream)
    error = process.stderr.read()
    assert process.wait(HANG) == 75, error
    (join,) = [word.removeprefix("--join=") for word in command if word.startswith("--join=")]
    address = join.split(",")[-1]
    assert f"no trainer answers at {address}" in error or f"has opened {join!r} within" in error


@pytest.mark.slow
@pytest.mark.parametrize("command", commands_of("scripts/serve.py"), ids=" ".join)
def test_serve_answers_until_it_is_told_to_end(place, first_run, command):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        metrics = probe.getsockname()[1]
    free = ["--port=0"]  # those that are shown may be in use
    if any(argument.startswith("--metrics_port") for argument in command):
        free.append(f"--metrics_port={metrics}")
    process = start(place, *command, *FLAGS, *free)
    ready = process.stdout.readline()
    assert ready.startswith("ready: random:llama"), ready + process.stderr.read()
    (address,) = re.findall(r" on (127\.0\.0\.1:\d+),$", ready)
    sizes, memory = process.stdout.readline(), process.stdout.readline()
    assert max(len(sizes), len(memory)) <= 81 and "slots for each of two protocols" in sizes
    shown_metrics = any(argument.startswith("--metrics_port") for argument in command)
    assert ("metrics on http://127.0.0.1:" in memory) == shown_metrics
    with SamplerClient(address) as client:
        version = 1 if "--run=runs/first" in command else 0
        assert client.status()["version"] == version
        (answer,) = client.responses(prompt="What is 12 + 35?", uid=0, temperature=0)
        assert answer["version"] == [version] * len(answer["tokens"])
        paths = ("runs/first/checkpoints/1", "runs/first")  # the step's folder, and the run's
        if not any(argument.startswith(("--run=", "--load_folders=")) for argument in command):
            with pytest.raises(grpc.RpcError, match="start it with --load_folders"):
                client.load_weights(paths[0])
            paths = ()
        for path in paths:
            assert client.load_weights(path) == {"version": 1, "step": 1}
        (again,) = client.responses(prompt="What is 12 + 35?", uid=0, temperature=0)
        assert set(again["version"]) == {1 if paths else version}
        assert (again["logp"] == answer["logp"]) == (version == 1 or not paths)
    process.terminate()
    assert finish(process) == "stopped\n"


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("command", commands_of("scripts/launch_local.py"), ids=" ".join)
def test_launch_local_trains_as_one_job(place, command):
    lines = run_shown(place, command).splitlines()
    assert all(line.startswith(("[p0] ", "[p1] ")) for line in lines)
    # one job, told once; parts of what JAX's runtime writes may stand before a line
    (workdir,) = [word[10:] for word in command if word.startswith("--workdir=")]
    of = {
        me: [m[1] for x in lines if (m := re.search(rf"^\[{me}\] .*?{STAMP}(.*)", x))]
        for me in ("p0", "p1")
    }
    (devices,) = [line for line in of["p0"] if line.startswith("devices ")]
    assert devices == "devices   8 cpu in 2 processes: training fsdp 8 x tensor 1, 2 samplers"
    assert len([x for x in of["p0"] if re.fullmatch(r"done +step 1, after \S+", x)]) == 1
    assert f"report    {workdir}/report.html" in of["p0"]
    # a slow machine adds lines on who is waited for
    (job,) = [line for line in of["p1"] if " so far" not in line and "no sign of" not in line]
    assert job.startswith("job: process 1 of 2, ")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_launch_local_keeps_the_exit_code_of_a_mistake(place):
    train = ["scripts/train.py", "--config=tiny", "--workdir=runs/none"]
    process = start(
        place, "scripts/launch_local.py", "--", *train, *FLAGS, "--config.data.train=nowhere.jsonl"
    )
    stdout, stderr = process.communicate(timeout=HANG)
    assert process.returncode == 2, stdout + stderr
    # one process may be stopped before it has come to it
    assert set(stdout.splitlines()) & {
        f"[p{me}] error: data file nowhere.jsonl does not exist" for me in range(2)
    }
    assert "Traceback" not in stdout


def test_grpo_of_the_readme_runs(place):
    """Its graph in YAML, trained by its Python."""
    shown = blocks(ROOT / "README.md")
    (graph,) = [block for block in shown if block.language == "yaml"]
    (python,) = [block for block in shown if block.language == "python"]
    assert len(graph.text.splitlines()) + len(python.text.splitlines()) <= 20
    (place / graph.title).write_text(graph.text)
    code = python.text
    assert code.count('"training.steps": 5') == code.count('"runs/notebook"') == 1
    pairs = dict(assignment.split("=", 1) for assignment in SMALL)
    small = {key: int(value) if value.isdigit() else value for key, value in pairs.items()}
    code = code.replace('"training.steps": 5', repr(small)[1:-1])
    finish(start(place, "-c", code))
    assert (place / "runs/notebook/checkpoints/1").is_dir()


@pytest.fixture(scope="module")
def plans(place):
    """Output of plan.py for each config, with every optional node and on eight devices."""
    flags = ["--config.algorithm.kl_coef=0.1", "--config.training.mini_batches=2", "--devices=8"]
    flags.append("--config.training.device_memory_gib=16")  # whatever an eighth of this machine has
    started = {
        config: start(place, "scripts/plan.py", f"--config=configs/{config}.py", *flags)
        for config in CONFIGS
    }
    return {config: finish(process) for config, process in started.items()}


@pytest.mark.slow  # test_configs.py plans each config, in this process
@pytest.mark.parametrize("config", CONFIGS)
def test_plan_prints_order_fields_and_sizes(plans, config):
    output = plans[config]
    for title in ("parameters", "training mesh", "fsdp 8 x tensor 1", "plan grpo, digest "):
        assert title in output
    ids = re.findall(r"^\d+ +\d+ +(\w+)", output, re.MULTILINE)
    assert sorted(ids[1:-1]) == ["advantage", "old_logp", "reference", "reward"]
    assert (ids[0], ids[-1]) == ("rollout", "actor_train")


@pytest.mark.slow
def test_a_plan_that_does_not_fit_ends_with_the_code_of_a_mistake(place):
    limit = "--config.training.device_memory_gib=0.001"
    process = start(place, "scripts/plan.py", "--config=configs/tiny.py", *FLAGS, limit)
    stdout, stderr = process.communicate(timeout=HANG)
    assert process.returncode == 2, stdout + stderr
    assert "memory of a device, which has 1.0 MiB" in stdout
    (line,) = [x for x in stderr.splitlines() if x.startswith("error: ")]
    assert line.startswith("error: a run would end before step 1: node 'actor_train' needs about ")
    assert " on each device, which has 1.0 MiB: " in line


# plans for pods need libtpu, which is not installed for tests: tests/pods has them
PLANS = [c for c in SHOWN if c[0] == "scripts/plan.py" and "--topology" not in " ".join(c)]


@pytest.mark.slow
@pytest.mark.parametrize("command", PLANS, ids=" ".join)
def test_plan_commands(place, command):
    output = run_shown(place, command)
    assert "plan grpo, digest " in output
    for out in [argument[6:] for argument in command if argument.startswith("--out=")]:
        folder = place / out
        assert (folder / "plan.txt").read_text() in output
        assert (folder / "plan.svg").read_text().startswith("<svg ")


@pytest.fixture(scope="module")
def helps(place):
    started = {script: start(place, f"scripts/{script}.py", "--help") for script in SCRIPTS}
    return {script: finish(process) for script, process in started.items()}


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_an_example_that_can_be_pasted(helps, script):
    shown = commands_in(helps[script])
    assert shown and set(shown) <= set(SHOWN)
    assert all(command[0] == f"scripts/{script}.py" for command in shown)


def test_every_shown_script_and_config_exists():
    for command in SHOWN:
        for path in command:
            for part in re.findall(r"(?:scripts|configs)/\w+\.py", path):
                assert (ROOT / part).is_file()
            for config in re.findall(r"^--config=(\w+)$", path):
                assert config in shipped_configs()
    tested = {"train", "evaluate", "generate", "export", "serve", "plan", "report", "launch_local"}
    tested |= {"worker", "doctor"}  # test_doctor.py runs the latter
    assert {command[0] for command in SHOWN} == {f"scripts/{name}.py" for name in tested}
