"""Every command that a run prints, or a message names, passes the checks that it begins with."""

import ast
import re
import shlex

import pytest
from support.paths import ROOT

from distflow_jax.cluster import job
from distflow_jax.commands.printed_commands import PrintedCommands, check
from distflow_jax.commands.subcommands import SUBCOMMANDS
from distflow_jax.config.config_dict import unknown_key
from distflow_jax.config.shipped import open_config
from distflow_jax.report.run_end import RunEnd

# ml_collections 1.1 loads config files so; elsewhere commands are processes of their own
pytestmark = pytest.mark.filterwarnings("ignore:the load_module")
SCRIPT = ["scripts/train.py", "--config=configs/tiny.py", "--workdir=runs/a b", "--debug"]
FLAGS = ["--config.reward.kwargs={'a': 1}", "--config.dag", "ppo", "--noconfig.data.shuffle"]
DPO = ["--config=tiny", "--workdir=runs/a", "--config.dag=dpo", "--config.eval.dataset="]
INSTALLED = ["/venv/bin/distflow", "train"]
MODULE = ["/site-packages/distflow_jax/commands/__main__.py", "train"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder in which a run has ended that is called `a b`, and one called `a`."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name in ("a", "a b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(argv, folder="runs/a b", *, samples=True, stopped=False, environment=None):
    """The commands after a run; each is one that its own checks let pass."""
    found = PrintedCommands(argv, environment or {})(RunEnd(folder, samples, stopped))
    for command in found.values():
        check(command)
    return found


def test_the_next_commands_are_those_of_the_run(place):
    found = printed([*SCRIPT, *FLAGS])
    same = "--config=configs/tiny.py '--config.reward.kwargs={'\"'\"'a'\"'\"': 1}' --config.dag ppo"
    assert found["evaluate"] == (
        f"python scripts/evaluate.py {same} --noconfig.data.shuffle --run='runs/a b'"
    )
    assert found["generate"].endswith("--run='runs/a b' --prompt=\"...\"")
    assert found["export"] == "python scripts/export.py --workdir='runs/a b' --out='exports/a b'"
    installed = printed([*INSTALLED, *SCRIPT[1:]], "runs/a", samples=False)
    assert installed == {"export": "distflow export --workdir=runs/a --out=exports/a"}
    assert printed([*MODULE, *SCRIPT[1:]], "runs/a", samples=False) == installed
    assert printed(["pytest"]) == printed([]) == {}


def test_a_run_without_evaluation_data_is_not_evaluated(place):
    assert list(printed([*INSTALLED, *DPO], "runs/a")) == ["generate", "export"]
    with pytest.raises(ValueError, match="eval.dataset is empty"):
        check("distflow evaluate --config=tiny --config.eval.dataset= --run=runs/a")


def test_an_export_has_a_folder_of_its_own(place):
    (place / "exports/a").mkdir(parents=True)
    (place / "exports/a/config.json").write_text("{}")
    found = printed([*INSTALLED, *DPO], "runs/a")
    assert found["export"] == "distflow export --workdir=runs/a --out=exports/a-2"


def test_a_stopped_run_is_resumed_by_what_started_it(place):
    found = printed([*SCRIPT, *FLAGS], stopped=True)
    assert list(found) == ["resume"]
    assert shlex.split(found["resume"]) == ["python", *SCRIPT, *FLAGS]
    for launched, train in (
        ("distflow launch local --processes=2", "train"),
        ("python scripts/launch_local.py", "scripts/train.py"),
    ):
        launched += f" -- {shlex.join([train, *DPO])}"
        found = printed([*MODULE, *DPO], stopped=True, environment={job.LAUNCHED: launched})
        assert found == {"resume": launched}


def test_a_run_that_waits_for_workers_names_the_command_of_one(place):
    flags = ["--config.stream.workers=True", "--config.stream.max_staleness=1"]
    waits = RunEnd("runs/a b", True, waits=True)
    found = PrintedCommands([*SCRIPT, *flags], {})(waits)
    same = f"python scripts/worker.py --config=configs/tiny.py {' '.join(flags)}"
    assert found == {"worker": f"{same} --join='runs/a b'"}
    check(found["worker"])
    with pytest.raises(ValueError, match="engine"):
        check(f"{found['worker']} --engine=nothing")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("distflow train --config=tiny --workdir=w --config.seeds=1", "unknown key config.seeds"),
        ("distflow evaluate --config=tiny --prompt=x", "unknown flag --prompt"),
        ("distflow generate --config=tiny --prompt=x --samples=99", "--samples=99 is above"),
        ("distflow export --out=new", "give --workdir"),
        ("distflow evaluate --config=tiny --run=nowhere", "nowhere"),
        (
            "distflow launch local -- train --config=tiny --config.seeds=1",
            "unknown key config.seeds",
        ),
        ("ls -l", "no command"),
    ],
)
def test_what_a_command_would_end_with_is_found(place, command, words):
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(words)):
        check(command)


def texts():
    """(file, text) of every string in the package; what is filled in is a word."""
    for path in sorted((ROOT / "distflow_jax").rglob("*.py")):
        source = path.read_text()
        if "distflow " not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "X" for p in node.values)
                yield path.name, "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path.name, node.value


def test_commands_of_messages_have_flags_that_exist():
    config, found = open_config("tiny"), set()
    for file, text in texts():
        for command in re.finditer(rf"distflow ({'|'.join(SUBCOMMANDS)})((?: +-\S+)*)", text):
            flags = {flag.name for flag in SUBCOMMANDS[command[1]].flags}
            for word in command[2].split():
                name = word.lstrip("-").partition("=")[0]
                key = name.removeprefix("config.")
                known = name in flags or (key != name and unknown_key(config, key) is None)
                assert known, f"{file}: {command[0]}: {word}"
                found.add((command[1], name))
    assert {("worker", "join"), ("worker", "nodes")} <= found
