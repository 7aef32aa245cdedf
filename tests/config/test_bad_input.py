"""A user error is one line that names the value and the fix, before any work."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import types

import pytest
from support.bad_input_cases import (
    DATA_CASES,
    ENVIRONMENTS,
    GRAPH_CASES,
    KEYS_AND_TYPES,
    MODEL_CASES,
    OF_COMMANDS,
    REWARD_CASES,
    SIZES,
)
from support.bad_input_files import QUICK, write_files
from support.paths import ROOT
from support.screen import without_waits
from support.tiny_config import tiny_config
from support.waiting import HANG

from distflow_jax import run
from distflow_jax.commands.parsed_command import parsed_apart
from distflow_jax.observe.compilations import Compilations
from distflow_jax.parsing.addresses import listen
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import plan_run, prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("user")
    write_files(path)
    return path


@pytest.fixture(scope="module")
def compiled():
    counter = Compilations()
    yield counter
    counter.close()


def refusal(assignments, folder, compiled, start=prepare):
    """The one line with which a run refuses to start; nothing was compiled until then."""
    compiled.take()
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        texts = [text.replace("{dir}", str(folder)) for text in [*QUICK, *assignments.split(" ; ")]]
        start(tiny_config(*filter(None, texts)))
    message = str(caught.value).replace(str(folder), "{dir}")
    assert "\n" not in message
    assert compiled.take() == 0
    return message


@pytest.mark.parametrize(
    "assignments, message",
    [
        *KEYS_AND_TYPES,
        *ENVIRONMENTS,
        *SIZES,
        *GRAPH_CASES,
        *DATA_CASES,
        *MODEL_CASES,
        *REWARD_CASES,
    ],
)
def test_it_is_said_in_one_line(folder, compiled, assignments, message):
    assert message in refusal(assignments, folder, compiled)


@pytest.mark.parametrize("assignments, message", OF_COMMANDS)
def test_a_key_of_a_command_has_an_effect(folder, compiled, assignments, message):
    chosen = {text.partition("=")[0] for text in assignments.split(" ; ")}

    def start(config):
        machine = dataclasses.replace(Machine.current(), processes=1)
        plan_run(config, machine, chosen)
        raise ValueError(message)

    assert message in refusal(assignments, folder, compiled, start)


def test_a_warmup_of_all_steps_is_said(folder, caplog):
    texts = [*QUICK, "training.steps=3", "training.optimizer.warmup_steps=3"]
    prepare(tiny_config(*texts)).close()
    assert "warmup_steps=3 takes all 3 optimizer steps of the run" in caplog.text


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # of ml_collections
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--config.training={'steps': 5}"], "config.training is a section of the config: set its"),
        (["--config.mesh.roles={'ACTOR': {'tensor': 2, 'tensor': 4}}"], "key 'tensor' is given tw"),
        (["--noconfig.training.fuse=false"], "--noNAME alone means false; leave out =VALUE"),
        (["--config.=5"], "unknown key config. (config has: "),
    ],
)
def test_an_override_that_parsing_would_lose(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parsed_apart("train", ["--config=tiny", "--workdir=run", *arguments])


@pytest.mark.parametrize(
    "workdir, reason",
    [
        ("/proc/no_such_process/run", "No such file or directory"),
        ("{dir}/table.csv/run", "Not a directory"),
        ("{dir}/table.csv", "Not a directory"),
    ],
)
def test_an_unwritable_workdir(folder, compiled, workdir, reason):
    def start(config):
        run.train(config, workdir.replace("{dir}", str(folder)))

    message = refusal("", folder, compiled, start)
    assert message.startswith(f"cannot write to --workdir '{workdir}' ({reason}); choose")


def test_a_port_that_another_process_has(folder, compiled):
    with listen("a test", "127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        message = refusal(
            "stream.workers=True ; stream.max_staleness=1 ; algorithm.correction=token_tis ; "
            f"eval.dataset= ; stream.listen=127.0.0.1:{port}",
            *(folder, compiled),
        )
    assert f"stream.listen: cannot listen on 127.0.0.1:{port} (Address already in use" in message


def test_a_function_finds_its_file_beside_a_module_of_the_same_name(folder, monkeypatch):
    """A user's file may be called like any module; neither hides the other."""
    (folder / "json.py").write_text("import dataclasses\n\ndef mine():\n    pass\n")
    other = types.ModuleType("rewards")
    monkeypatch.setitem(sys.modules, "rewards", other)
    with pytest.raises(ValueError, match="must return a Graph, got NoneType"):
        prepare(tiny_config(f"dag={folder}/json.py:mine"))
    assert sys.modules["json"] is json and sys.modules["rewards"] is other


# -- through the scripts --------------------------------------------------------------------------

SCRIPT_CASES = [
    ("train", "--config.trainin.steps=3", "did you mean config.training.steps?"),
    ("train", "--workdir=/proc/run", "/proc/run"),
    ("plan", "--devices=8 --processes=3", "--devices=8 is not divisible by --processes=3"),
    ("plan", "--sweep", "--sweep needs --topology: give it, such as v5p-128"),
    ("plan", "--processes=4", "--processes=4 needs --devices"),
    ("plan", "--mean_response=5", "--mean_response=5 needs --topology"),
    ("plan", "--topology=h100-8 --processes=4", "--processes=4 has no effect with --topology=h100"),
    ("plan", "--topology=h100-8 --sweep --async=x.json", "--async=x.json has no effect with --sw"),
    ("plan", "--only=actor_train", "selects programs to compile for one TPU --topology"),
    ("evaluate", "--out={dir}/table.csv/out.json", "table.csv is no folder for that"),
    ("generate", "", "give either --prompt or --file"),
    ("generate", "--prompt=x --config.data.max_prompt_length=10", "prompt 1 has 20 tokens, above"),
]


@pytest.fixture(scope="module")
def scripts_done(folder):
    """(script, arguments) -> its end; two at a time."""
    done, running, left = {}, {}, [case[:2] for case in SCRIPT_CASES]
    while left or running:
        while left and len(running) < 2:
            script, arguments = left.pop()
            command = [sys.executable, str(ROOT / "scripts" / f"{script}.py")]
            command += [f"--config={ROOT}/configs/tiny.py", *(f"--config.{q}" for q in QUICK)]
            if script == "train":
                command.append(f"--workdir={folder}/run")
            running[script, arguments] = subprocess.Popen(
                [*command, *arguments.replace("{dir}", str(folder)).split()],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"XLA_FLAGS": ""},
            )
        case, process = next(iter(running.items()))
        del running[case]
        stdout, stderr = process.communicate(timeout=HANG)
        done[case] = (process.returncode, stdout, stderr.replace(str(folder), "{dir}"))
    return done


@pytest.mark.parametrize("script, arguments, message", SCRIPT_CASES)
def test_a_script_ends_with_code_2_and_one_line(scripts_done, script, arguments, message):
    code, stdout, stderr = scripts_done[script, arguments]
    assert (code, without_waits(stdout)) == (2, ""), stderr
    assert re.fullmatch(r"error: [^\n]*\n", stderr)
    assert message in stderr
