"""`distflow doctor`: what stops a run is a problem with its fix, and nothing makes it hang."""

import errno
import os
import resource
import signal
import socket
import sys

import pytest
from packaging.requirements import Requirement
from support import haste
from support.programs import finished

from distflow_jax.commands.doctor import host_findings, package_findings
from distflow_jax.commands.doctor.device_findings import (
    Accelerator,
    Probe,
    Probed,
    device_findings,
    ended_by,
    facts_of,
)
from distflow_jax.commands.doctor.finding import NOTE, OK, PROBLEM, Finding
from distflow_jax.programs import program_folder

CPU = {"platform": "cpu", "kinds": ["cpu", "cpu"], "memory": [0, 0]}
GPUS = {"platform": "gpu", "kinds": ["NVIDIA H200"] * 8, "memory": [113 << 30] * 8}
GPU = Accelerator("gpu", "/dev/nvidia0", "")
BROKEN = """
def initialize():
    raise OSError("no driver here\\nsecond line")
"""


def levels(found):
    return [one.level for one in found]


# -- packages ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version, level, text",
    [
        ("0.10.2", OK, "0.10.2"),
        ("0.12.1.dev7", OK, "0.12.1.dev7"),
        ("0.9.0", PROBLEM, "0.9.0; <0.13,>=0.10 is required"),
        ("0.13.0", NOTE, "0.13.0; <0.13,>=0.10 is required"),  # newer than what was tested
        (None, PROBLEM, "is not installed"),
    ],
)
def test_a_version_out_of_bounds_has_the_line_that_mends_it(version, level, text):
    found = package_findings.package_finding(Requirement("jax<0.13,>=0.10"), version)
    assert (found.level, found.text) == (level, text)
    assert found.fix == ("" if level == OK else "pip install 'jax<0.13,>=0.10'") or level == OK


def test_jetstream_is_installed_without_its_dependencies():
    install = package_findings.INSTALL
    found = package_findings.package_finding(Requirement("google-jetstream==0.2.2"), None, install)
    assert found.line().endswith("is not installed: pip install --no-deps google-jetstream==0.2.2")


def test_an_old_python_is_a_problem():
    assert package_findings.python_finding("3.11.0", ">=3.11").level == OK
    found = package_findings.python_finding("3.10.4", ">=3.11")
    assert found.level == PROBLEM and "Python >=3.11" in found.fix


def test_plugins_must_be_of_the_version_of_jax(monkeypatch):
    lines = {
        "distflow_jax": ["jax<0.13,>=0.10", 'wandb>=0.19; extra == "wandb"'],
        "jax": [
            "jaxlib<=0.10.2,>=0.10.1",
            'jaxlib==0.10.1; extra == "ci"',
            'kubernetes>=1; extra == "k8s"',
            'jax-cuda13-plugin[with-cuda]<=0.10.2,>=0.10.2; extra == "cuda13"',
        ],
    }
    versions = {"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda13-plugin": "0.9.1"}
    monkeypatch.setattr(package_findings.importlib.metadata, "requires", lines.get)
    monkeypatch.setattr(package_findings, "installed", versions.get)
    found = {one.name: one for one in package_findings.package_findings()}
    assert found["jaxlib"].level == OK and "wandb" not in found and "kubernetes" not in found
    assert found["jax-cuda13-plugin"].fix == (
        "pip install 'jax-cuda13-plugin[with-cuda]<=0.10.2,>=0.10.2'"
    )
    assert found["google-jetstream"].level == PROBLEM


# -- devices ----------------------------------------------------------------------------------


def test_a_probe_that_hangs_is_a_problem_and_is_ended():
    code = 'import time; print(\'{"messages": ["begun"]}\', flush=True); time.sleep(3600)'
    answer = Probe((sys.executable, "-S", "-c", code)).answer(1.0)
    assert answer.error == "no answer within 1 s"
    (found,) = device_findings(answer, [], {})
    assert found.level == PROBLEM and "--device_seconds=600" in found.fix


@pytest.mark.parametrize(
    "code, errors, why",
    [
        (0, "a warning", ""),
        (1, "x\nTraceback (most recent call last):\n  File\n    y\nOSError: a\nb\n", "OSError: a"),
        (-signal.SIGABRT, "F1129 xla.cc] Check failed\n\n", "ended with SIGABRT: F1129 xla.cc]"),
        (-signal.SIGKILL, "", "ended with SIGKILL"),
    ],
)
def test_the_end_of_a_probe_has_one_line(code, errors, why):
    assert ended_by(code, errors).startswith(why) and bool(why) == bool(code)


def test_facts_are_read_among_other_lines():
    lines = b'{"messages": ["a"]}\nWARNING: x\n{not json\n{"messages": ["b"]}\n{"devices": {}}\n{"e'
    assert facts_of(lines) == {"messages": ["a", "b"], "devices": {}}


@pytest.mark.parametrize(
    "facts, present, environ, expected",
    [
        ({"devices": CPU}, [], {}, [(OK, "2 cpu, using host memory")]),
        ({"devices": GPUS}, [GPU], {}, [(OK, "8 NVIDIA H200, 113.0 GiB available on each")]),
        (
            {"devices": CPU},
            [GPU],
            {},
            [(OK, "2 cpu"), (NOTE, "/dev/nvidia0 exists: pip install 'distflow_jax[gpu]'")],
        ),
        (
            {"devices": CPU},
            [GPU],
            {"JAX_PLATFORMS": "cpu"},
            [(OK, "2 cpu"), (NOTE, "JAX_PLATFORMS=cpu excludes /dev/nvidia0: unset")],
        ),
        (
            {"devices": CPU, "messages": ["CUDA backend failed to initialize: no driver.\nmore"]},
            [Accelerator("gpu", "/dev/nvidia0", "jax-cuda13-plugin")],
            {},
            [(OK, "2 cpu"), (PROBLEM, "JAX uses the CPU: CUDA backend failed to init")],
        ),
        (
            {"devices": GPUS, "errors": {"3": "JaxRuntimeError: INTERNAL: lost\nmore"}},
            [GPU],
            {},
            [(OK, "8 NVIDIA"), (PROBLEM, "JaxRuntimeError: INTERNAL: lost: restart")],
        ),
        (
            {"devices": GPUS, "attention": {"rows": "blocks of 64 tokens", "decode": "a loop"}},
            [],
            {},
            [(OK, "8 NVIDIA"), (OK, "training: blocks of 64 tokens; sampling: a loop")],
        ),
    ],
)
def test_what_an_answer_means(facts, present, environ, expected):
    found = list(device_findings(Probed(facts), present, environ))
    assert levels(found) == [level for level, _ in expected]
    for one, (_, text) in zip(found, expected, strict=True):
        assert text in one.line()


@pytest.mark.parametrize(
    "error, environ, fix",
    [
        ("RuntimeError: The TPU is already in use by process with pid 7", {}, "stop the process"),
        ("ModuleNotFoundError: No module named 'jax'", {}, "install the packages"),
        (
            "RuntimeError: Unable to initialize backend 'cuda'",
            {"JAX_PLATFORMS": "cuda"},
            "unset JAX_PLATFORMS",
        ),
        ("RuntimeError: Unable to initialize backend 'x'", {}, "JAX_PLATFORMS=cpu to train"),
    ],
)
def test_an_error_has_a_remedy(error, environ, fix):
    (found,) = device_findings(Probed({}, error), [], environ)
    assert found.level == PROBLEM and found.text == error and fix in found.fix


# -- host -------------------------------------------------------------------------------------


def test_little_memory_and_few_files_are_notes():
    assert host_findings.memory_finding(64 << 30, 60 << 30).level == OK
    assert host_findings.memory_finding(64 << 30, 1 << 30).level == NOTE
    assert host_findings.file_finding(256, resource.RLIM_INFINITY).level == OK
    assert "ulimit -Hn" in host_findings.file_finding(256, 512).fix


@pytest.mark.parametrize(
    "free, level", [(1 << 40, OK), (1 << 30, NOTE), (program_folder.LEAST_FREE - 1, PROBLEM)]
)
def test_a_full_disk_is_a_problem(tmp_path, monkeypatch, free, level):
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr(host_findings.shutil, "disk_usage", lambda _: usage)
    assert host_findings.disk_finding("disk", tmp_path / "new" / "run", "fix").level == level


def test_a_folder_that_cannot_be_written_has_a_fix(tmp_path, monkeypatch):
    def refuse(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(host_findings.tempfile, "TemporaryFile", refuse)
    found = host_findings.disk_finding("cache", tmp_path, "set DISTFLOW_CACHE")
    text = f"{tmp_path} is not writable (Read-only file system)"
    assert found == Finding(NOTE, "cache", text, "set DISTFLOW_CACHE")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    monkeypatch.setenv("DISTFLOW_CACHE", "$NO_HOME_HERE/x")
    (found,) = host_findings.cache_findings()
    assert found.level == NOTE and "DISTFLOW_CACHE" in found.fix


def test_the_folder_of_programs_is_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTFLOW_CACHE", str(tmp_path))
    assert host_findings.program_finding({}).text.endswith("does not exist yet")
    folder = program_folder.automatic_folder()
    folder.mkdir(parents=True)
    (folder / "a-cache").write_bytes(b"x" * 2048)
    (folder / "b-atime").write_bytes(b"x")
    owner = host_findings.owner_of(folder)
    found = host_findings.program_finding({})
    assert found == Finding(OK, "programs", f"{folder}, 1 programs, 2.0 KiB, owned by {owner}")
    other = host_findings.program_finding({program_folder.VARIABLE: str(tmp_path / "other")})
    assert f"other ({program_folder.VARIABLE}) does not exist yet" in other.text
    bucket = host_findings.program_finding({program_folder.VARIABLE: "gs://bucket/x"})
    assert bucket.level == NOTE and "pip install gcsfs" in bucket.text  # tests have none


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = list(host_findings.port_findings({port: "distflow serve"}))
    assert levels(found) == [OK, NOTE]
    assert found[1].text == f"{port} (distflow serve) is in use"


def test_variables_are_shown_without_secrets():
    environ = {"JAX_PLATFORMS": "cpu", "DISTFLOW_TOKEN": "hush", "PATH": "/bin"}
    assert host_findings.variables(environ) == "DISTFLOW_TOKEN=... JAX_PLATFORMS=cpu"


# -- the whole --------------------------------------------------------------------------------


def test_a_broken_plugin_is_a_problem_and_all_else_is_said(tmp_path):
    """A whole run of `distflow doctor`: all else here is well enough for tests."""
    plugin = tmp_path / "jax_plugins" / "broken"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(BROKEN)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = haste.environment() | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    command = ("-m", "distflow_jax.commands", "doctor", "--device_seconds=600")
    done = finished(*command, env=environment, codes=(2,))
    found = {line[9:27].strip(): (line[:9].strip(), line[27:]) for line in done.stdout.splitlines()}
    assert [name for name, (level, _) in found.items() if level == PROBLEM] == ["plugin"]
    assert "OSError: no driver here" in found["plugin"][1]
    assert done.stderr == "error: a run would not start: see plugin above\n"
    named = {"python", "distflow_jax", "jax", "jaxlib", "memory", "disk", "cache", "programs"}
    assert named | {"google-jetstream", "open files", "devices", "attention"} <= set(found)
    assert "cpu" in found["devices"][1]


def test_the_page_begins_without_jax():
    """So a JAX that is missing or broken is a line of the page."""
    code = "import sys, distflow_jax.commands.doctor_command; print('jax' in sys.modules)"
    assert finished("-c", code).stdout == "False\n"
