"""The package as it is installed: dependencies, versions, the wheel away from the repository.

Nightly: the wheel trains from another folder, and alone in an empty environment, without JetStream
and TensorFlow.
"""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement
from support import haste
from support.paths import ROOT

import distflow_jax

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
JETSTREAM = "google-jetstream==0.2.2"
# {module: distribution} where the names differ
DISTRIBUTIONS = {
    **{"absl": "absl-py", "grpc": "grpcio", "orbax": "orbax-checkpoint"},
    **{"yaml": "pyyaml", "PIL": "pillow"},
    **dict.fromkeys(["sympy", "latex2sympy2_extended"], "math-verify"),  # its values are theirs
}
# imported where it is needed: an optional package, or one that a notebook has
OPTIONAL = {"IPython", "jetstream", "reasoning_gym", "wandb", "mlflow", "trackio"}
OPTIONAL |= {"tokamax", "transformer_engine"}  # attention of other libraries
OF_JETSTREAM = {"protobuf", "shortuuid"}  # what JetStream imports and its own install would bring
SMALL = [
    "--config.model.source=random:llama?hidden=32&layers=1&heads=4&kv_heads=2&mlp=64&vocab=300",
    "--config.data.train=task:arithmetic?size=64",
    "--config.data.prompts_per_step=4",
    "--config.rollout.max_response_length=8",
    "--config.eval.num_prompts=4",
    "--config.training.steps=1",
]
DONE = re.compile(r"^\d\d-\d\d \d\d:\d\d:\d\d done +step 1, after \S+$", re.MULTILINE)


def plain(name):
    """A distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _first_text(node):
    """The text with which an argument begins, "" for none."""
    first = node.values[0] if isinstance(node, ast.JoinedStr) else node
    return first.value if isinstance(first, ast.Constant) else ""


def imported(folder):
    """First words of what the modules of a folder import, importlib.import_module included."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                found |= {_first_text(x) for x in node.args}
    return {name.split(".")[0] for name in found} - {""}


def test_dependencies_are_what_is_imported():
    names = imported(ROOT / "distflow_jax") | imported(ROOT / "configs")
    names -= {"distflow_jax", *sys.stdlib_module_names, *OPTIONAL}
    listed = {plain(re.match(r"[\w-]+", line)[0]) for line in PROJECT["dependencies"]}
    assert listed == {plain(DISTRIBUTIONS.get(name, name)) for name in names} | OF_JETSTREAM


def test_jetstream_has_one_version():
    files = ["Makefile", "requirements.txt", "pyproject.toml", "Dockerfile"]
    files += ["distflow_jax/rollout/jetstream_install.py"]
    for file in files:
        found = set(re.findall(r"google-jetstream==[\d.]+", (ROOT / file).read_text()))
        assert found == {JETSTREAM}, file
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        assert set(re.findall(r"google-jetstream==[\d.]+", path.read_text())) <= {JETSTREAM}


def test_an_extra_does_not_replace_a_checkout_by_a_copy():
    for path in [ROOT / "requirements.txt", ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        assert not re.search(r"install (?!-e )\S*\.\[", path.read_text()), path


def locked(path):
    """{(name, marker): version} of a lock file; every entry must have a hash."""
    entries = re.split(r"\n(?=[a-z])", re.sub(r"(?m)^\s*#.*\n", "", (ROOT / path).read_text()))
    assert all("--hash=sha256:" in entry for entry in entries)
    parsed = [Requirement(entry.split("\\")[0].strip()) for entry in entries]
    return {(plain(p.name), str(p.marker)): str(p.specifier).removeprefix("==") for p in parsed}


def test_the_lock_has_every_dependency_within_its_bounds():
    versions = locked("requirements.lock")
    for text in PROJECT["dependencies"]:
        wanted = Requirement(text)
        found = [v for (name, _), v in versions.items() if name == plain(wanted.name)]
        assert found and all(wanted.specifier.contains(v) for v in found), text


def test_the_locked_jetstream_is_the_one_of_the_makefile():
    ((_, version),) = locked("requirements-jetstream.lock").items()
    assert f"google-jetstream=={version}" == JETSTREAM


def test_the_version_is_the_same_everywhere():
    (version,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert version == distflow_jax.__version__


# -- the wheel --------------------------------------------------------------------------------


def build(folder):
    """The wheel of this checkout."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def environment_of_a_stranger():
    """The variables of a process that knows nothing of this checkout."""
    return {k: v for k, v in haste.environment().items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}


def train(python, folder):
    """Trains one step with `distflow` from an empty folder; returns what it printed."""
    folder.mkdir()
    command = [str(python.parent / "distflow"), "train", "--config=tiny", "--workdir=run", *SMALL]
    done = subprocess.run(
        command, cwd=folder, env=environment_of_a_stranger(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps_in(folder):
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def files_in(wheel):
    """Its files, without those that describe it."""
    names = zipfile.ZipFile(wheel).namelist()
    return sorted(name for name in names if ".dist-info/" not in name)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel of this checkout."""
    pytest.importorskip("hatchling")
    return build(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_what_git_does_not_ignore(built):
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "distflow_jax"]
    done = subprocess.run(
        [*command, "configs"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]
    inside = [re.sub("^configs/", "distflow_jax/configs/", name) for name in files]
    assert files_in(built) == sorted(inside)


def test_an_editable_install_copies_nothing(tmp_path):
    pytest.importorskip("hatchling")
    code = f"import hatchling.build as b; print(b.build_editable({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    (path,) = files_in(wheel)
    assert path.endswith(".pth")
    assert zipfile.ZipFile(wheel).read(path).decode().split() == [str(ROOT)]


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The interpreter of an environment with the wheel, which finds this one's packages too."""
    wheel = built
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    # .pth files of that folder are not read: an editable install of the checkout is not seen
    others = os.path.join(own.strip(), "others.pth")
    with open(others, "w") as file:
        file.write(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return python


@pytest.mark.slow
def test_the_wheel_trains_from_another_folder(installed, tmp_path):
    """With a graph and a config that it brings."""
    output = train(installed, tmp_path / "empty")
    assert DONE.search(output)
    # the commands that follow are those of the installed program
    assert re.search(r"^\S+ \S+ export +distflow export --workdir=run ", output, re.MULTILINE)
    assert steps_in(tmp_path / "empty") == [0, 1]
    config = json.loads((tmp_path / "empty/run/config.json").read_text())
    assert config["dag"] == "grpo" and config["training"]["optimizer"]["lr"] == 1e-3


def test_the_wheel_takes_no_top_level_name_but_its_own(installed):
    code = (
        "import importlib.util, importlib.metadata as m, pathlib, distflow_jax as d\n"
        "files = m.files('distflow_jax')\n"
        "print(sorted({f.parts[0] for f in files if '.dist-info' not in f.parts[0]}))\n"
        "print(pathlib.Path(d.__file__).with_name('py.typed').is_file())\n"
        "print([importlib.util.find_spec(n) for n in ('configs', 'scripts', 'tests')])"
    )
    done = subprocess.run(
        [installed, "-c", code],
        cwd=installed.parent,
        env=environment_of_a_stranger(),
        capture_output=True,
        text=True,
    )
    first, typed, others = done.stdout.splitlines()
    assert set(ast.literal_eval(first)) - {"..", "__pycache__"} == {"distflow_jax"}, done.stderr
    assert typed == "True" and others == "[None, None, None]"


@pytest.mark.slow
def test_an_empty_environment_needs_nothing_but_the_wheel(tmp_path):
    """From the package index, with the commands of README in an empty folder."""
    pytest.importorskip("hatchling")
    wheel = build(tmp_path)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    command = "distflow train --config=tiny"
    assert f"\n{command} " in (ROOT / "README.md").read_text()
    folder = tmp_path / "empty"
    folder.mkdir()
    env = environment_of_a_stranger() | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(command.split(), cwd=folder, env=env, check=True)
    assert (folder / "runs/tiny/report.html").is_file()
    installed = subprocess.run(
        [python, "-m", "pip", "list", "--format=json"], check=True, capture_output=True, text=True
    )
    names = {plain(package["name"]) for package in json.loads(installed.stdout)}
    assert not names & {"google-jetstream", "tensorflow", "seqio", "torch", "ray", "vllm"}


def test_names_of_the_package_are_there():
    assert all(callable(getattr(distflow_jax, name)) for name in distflow_jax.__all__)
    assert importlib.import_module("distflow_jax.commands.main").main.__doc__
