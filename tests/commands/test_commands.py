"""`distflow` and its subcommands: help without jax, flags that the functions read, mistakes."""

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
import types

import pytest
from support.paths import ROOT
from support.programs import finished
from support.waiting import HANG

from distflow_jax.commands import generate_command
from distflow_jax.commands.command_help import WIDTH, help_text, launch_overview, overview
from distflow_jax.commands.main import JAX
from distflow_jax.commands.subcommands import LAUNCHERS, SUBCOMMANDS, python_arguments
from distflow_jax.config import key_reference
from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.config.shipped import config_file, open_config, shipped_configs
from distflow_jax.models.weights.safetensors_writer import DTYPES

COMMANDS = ROOT / "distflow_jax" / "commands"


def distflow(*arguments):
    command = [sys.executable, "-m", "distflow_jax.commands", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG)


def attribute(node):
    """The attribute of `options` that a node reads; with getattr where its name is a keyword."""
    match node:
        case ast.Attribute(value=ast.Name(id="options"), attr=name):
            return name
        case ast.Call(
            func=ast.Name(id="getattr"), args=[ast.Name(id="options"), ast.Constant(value=name)]
        ):
            return name
    return None


def attributes(path):
    """Attributes of `options` that a module reads."""
    return {attribute(node) for node in ast.walk(ast.parse(path.read_text()))} - {None}


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_flag_is_read_and_every_option_is_a_flag(name):
    command = SUBCOMMANDS[name]
    read = attributes(COMMANDS / f"{command.module}.py")
    given = {flag.name for flag in command.flags}
    if "coordinator" in given:
        read |= attributes(COMMANDS / "join_job.py")
    assert read - {"chosen", "arguments"} == given


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_fits_the_terminal_and_has_every_flag_and_key(name):
    command = SUBCOMMANDS[name]
    text = help_text(command, f"distflow {name}")
    assert all(len(line) <= WIDTH for line in text.splitlines() if "://" not in line)
    assert all(re.search(rf"^  --{flag.name}\b", text, re.M) for flag in command.flags)
    keys = [key for key in key_reference.keys() if re.search(rf"^  {key} \(", text, re.M)]
    assert keys == (list(key_reference.keys()) if command.has_config else [])


def test_overviews_name_every_command_and_config():
    text = overview()
    assert all(re.search(rf"^  {name} ", text, re.M) for name in [*SUBCOMMANDS, "launch"])
    assert all(name in text for name in shipped_configs())
    assert all(re.search(rf"^  {name} ", launch_overview(), re.M) for name in LAUNCHERS)
    assert all((COMMANDS / "launch" / f"{name}.py").is_file() for name in LAUNCHERS)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["launch", "--help"]])
def test_help_imports_no_jax(arguments):
    code = (
        f"import sys; sys.argv = ['distflow', *{arguments}]\n"
        "from distflow_jax.commands.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'jax', 'numpy', 'flax'} & set(sys.modules)"
    )
    done = finished("-c", code)
    assert done.stdout.count("\n") > 5


NO_JAX = "sys.modules['jax'] = None"
NO_JAXLIB = "sys.modules['jaxlib'] = None"
OTHER_JAXLIB = """
sys.modules["jaxlib"] = jaxlib = types.ModuleType("jaxlib")
sys.modules["jaxlib.version"] = jaxlib.version = types.ModuleType("jaxlib.version")
jaxlib.version.__version__ = "99.0.0"
"""


@pytest.mark.parametrize("broken", [NO_JAX, NO_JAXLIB, OTHER_JAXLIB], ids=["jax", "lib", "other"])
def test_a_jax_that_does_not_load_is_one_line_with_the_command(broken):
    code = (
        f"import sys, types\n{broken}\nsys.argv = ['distflow', 'train', '--config=tiny']\n"
        "from distflow_jax.commands.main import main; main()"
    )
    done = finished("-c", code, codes=(2,))
    assert done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: jax cannot be imported: ")
    reason = {NO_JAX: "import of jax", NO_JAXLIB: "requires jaxlib"}.get(broken, "99.0.0 is newer")
    bounds = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert (
        reason in done.stderr
        and JAX in bounds
        and f'pip install --force-reinstall "{JAX}"' in done.stderr
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["trian"], "unknown command 'trian' (did you mean 'train'?"),
        (["launch", "slrum"], "unknown launcher 'slrum' (did you mean 'slurm'? "),
    ],
)
def test_a_mistake_is_one_line_with_the_nearest_name(arguments, message):
    done = distflow(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1


def test_types_of_exported_weights_are_those_of_the_writer():
    (flag,) = [flag for flag in SUBCOMMANDS["export"].flags if flag.name == "dtype"]
    assert set(flag.choices) == set(DTYPES)


def test_a_subcommand_or_a_script_is_launched():
    train = ["train", "--config=tiny"]
    assert python_arguments(train) == ["-P", "-m", "distflow_jax.commands", *train]
    assert python_arguments(["distflow", *train]) == python_arguments(train)
    assert python_arguments(["scripts/train.py", "--x"]) == ["scripts/train.py", "--x"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("command", [["trian", "--config=tiny"], ["distflow", "trian"]])
def test_a_mistyped_subcommand_is_not_launched(launcher, command):
    flags = {
        "local": [],
        "slurm": ["--time=60"],
        "gke": ["--name=a", "--image=b", "--tpu=v5e", "--topology=1x1"],
        "skypilot": ["--name=a", "--volume=b:/c"],
        "tpu_vm": ["--name=a", "--zone=b", "--accelerator_type=v5p-8"],
    }
    module = importlib.import_module(f"distflow_jax.commands.launch.{launcher}")
    with pytest.raises(ValueError, match=r"unknown command 'trian' after -- .*'train'"):
        module.parse_arguments([*flags[launcher], "--", *command])


@pytest.mark.parametrize(
    "launcher, flag, near",
    [("local", "--procesess=2", "--processes"), ("gke", "--imgae=x", "--image")],
)
def test_a_mistyped_flag_of_a_launcher_names_the_nearest(launcher, flag, near, capsys):
    module = importlib.import_module(f"distflow_jax.commands.launch.{launcher}")
    given = {"gke": ["--name=a", "--image=b"]}.get(launcher, [])
    with pytest.raises(SystemExit, match="2"):
        module.parse_arguments([*given, flag, "--", "train", "--config=tiny"])
    name = flag.partition("=")[0]
    assert f"error: unknown flag {name} (did you mean {near}?" in capsys.readouterr().err


def test_a_file_of_the_working_folder_replaces_no_module(tmp_path):
    """As with `distflow` itself."""
    (tmp_path / "ml_collections.py").write_text("raise SystemExit('the wrong module')")
    path = os.pathsep.join(map(str, filter(None, sys.path)))
    command = python_arguments(["train", "--config=trainy"])
    done = finished(*command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, codes=(2,))
    assert done.stdout == ""
    assert done.stderr.startswith("error: unknown config 'trainy'")


# -- configs by name --------------------------------------------------------------------------


def test_a_name_is_the_file_of_the_shipped_config():
    assert set(shipped_configs()) == {path.stem for path in ROOT.glob("configs/*.py")}
    assert config_file("tiny") == str(ROOT / "configs" / "tiny.py")
    assert config_file("qwen25_7b:v5p-128,8k").endswith("/qwen25_7b.py:v5p-128,8k")
    assert config_file("my/own.py:x") == "my/own.py:x"


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(ValueError, match="unknown config 'tinny' .did you mean 'tiny'.*; or give"):
        config_file("tinny")


def test_an_argument_that_a_config_does_not_take_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="^config 'tiny' takes no argument, got 'x'$"):
        open_config("tiny:x")
    (tmp_path / "own.py").write_text("def get_config(size):\n    return size\n")
    with pytest.raises(ValueError, match="own.py' needs an argument: .*own.py:ARGUMENT"):
        open_config(tmp_path / "own.py")


def test_a_config_of_ones_own_starts_from_a_shipped_one(tmp_path):
    (tmp_path / "own.py").write_text(
        "from distflow_jax.config.shipped import open_config\n"
        "def get_config(steps='7'):\n"
        "    config = open_config('tiny')\n"
        "    config.training.steps = int(steps)\n"
        "    return config\n"
    )
    own = from_config_dict(Config, open_config(tmp_path / "own.py"))
    assert own.training.steps == 7
    assert own.model == from_config_dict(Config, open_config("tiny")).model
    assert open_config(f"{tmp_path / 'own.py'}:9").training.steps == 9


def test_prompts_of_a_file_have_the_line_ends_of_any_system(tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"hi\r\n\r\nyou\n")
    options = types.SimpleNamespace(prompt=None, file=str(tmp_path / "prompts.txt"))
    assert generate_command._prompts(options) == ["hi", "you"]
