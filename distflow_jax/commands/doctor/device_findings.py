"""Devices, asked for in a process that may fail or hang, and what the answer means."""

import dataclasses
import glob
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distflow_jax.commands.doctor.finding import NOTE, OK, PROBLEM, Finding
from distflow_jax.commands.doctor.package_findings import installed
from distflow_jax.parsing.bounded_child import module_path
from distflow_jax.programs.units import format_bytes

PROBE = "distflow_jax.commands.doctor.device_probe"
# extra of this package: (device files of its accelerator, packages of which one must be installed)
ACCELERATORS = {
    "gpu": (("/dev/nvidia[0-9]*", "/dev/nvidiactl"), ("jax-cuda13-plugin", "jax-cuda12-plugin")),
    "tpu": (("/dev/accel[0-9]*", "/dev/vfio/[0-9]*"), ("libtpu",)),
}
_LEAVE_SECONDS = 2.0  # for a killed process: one that waits for a driver does not end


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """An accelerator that seems to be in the machine."""

    extra: str  # of this package: gpu or tpu
    file: str  # one of its device files
    plugin: str  # the package through which JAX uses it; "" if none is installed


@dataclasses.dataclass(frozen=True)
class Probed:
    """Facts that the probe printed, and the reason for which it ended early."""

    facts: Mapping[str, Any]
    error: str = ""


class Probe:
    """A process that looks for devices while the page begins; `command` is for tests."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-P", "-m", PROBE)):
        # memory may be in use by a run: the probe takes none in advance
        added = {"PYTHONPATH": module_path(), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | added,
        )

    def answer(self, seconds: float) -> Probed:
        """The answer, after at most so many seconds and those that the process needs to die."""
        try:
            out, err = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                out, _ = self._process.communicate(timeout=_LEAVE_SECONDS)
            except subprocess.TimeoutExpired as expired:
                out = expired.output or b""
            return Probed(facts_of(out), f"no answer within {seconds:g} s")
        return Probed(
            facts_of(out), ended_by(self._process.returncode, err.decode(errors="replace"))
        )


def facts_of(output: bytes) -> dict[str, Any]:
    """The facts among the lines of a probe's output; lists of one name are joined."""
    found: dict[str, Any] = {}
    for line in output.decode(errors="replace").splitlines():
        if not line.startswith("{"):
            continue
        try:
            fact = json.loads(line)
        except ValueError:  # a line of a plugin's, or one that was cut off
            continue
        for name, value in fact.items():
            found[name] = found.get(name, []) + value if isinstance(value, list) else value
    return found


def ended_by(code: int, errors: str) -> str:
    """The first line of the exception that ended a process, or its last line; "" for code 0."""
    if not code:
        return ""
    raised = re.findall(r"^Traceback .*\n(?:[ \t].*\n|\n)*(\S.*)$", errors, re.MULTILINE)
    if raised:
        return raised[-1]
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    last = [line for line in errors.splitlines() if line.strip()][-1:]
    return ": ".join([f"ended with {how}", *last])


def accelerators() -> list[Accelerator]:
    """Accelerators whose device files exist."""
    found = []
    for extra, (patterns, plugins) in ACCELERATORS.items():
        files = [file for pattern in patterns for file in sorted(glob.glob(pattern))]
        if files:
            plugin = next(filter(installed, plugins), "")
            found.append(Accelerator(extra, files[0], plugin))
    return found


def device_findings(
    answer: Probed, present: Sequence[Accelerator], environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Devices, the attention that they take, and whether they compute."""
    devices = answer.facts.get("devices")
    messages = [text.splitlines()[0] for text in answer.facts.get("messages", []) if text]
    chosen = environ.get("JAX_PLATFORMS", "")
    if answer.error:
        yield Finding(PROBLEM, "devices", answer.error, _remedy(answer.error, chosen))
    if not devices:
        return
    if not answer.error:
        yield Finding(OK, "devices", described(devices))
    for text in messages:
        if text.startswith("Jax plugin configuration error"):
            yield Finding(PROBLEM, "plugin", text, "reinstall or uninstall the plugin")
    for one in present if devices["platform"] == "cpu" else ():
        yield _unused(one, messages, chosen)
    if attention := answer.facts.get("attention"):
        text = f"training: {attention['rows']}; sampling: {attention['decode']}"
        yield Finding(OK, "attention", text)
    for device, error in answer.facts.get("errors", {}).items():
        fix = "restart the machine, or exclude the device"
        yield Finding(PROBLEM, f"device {device}", error.splitlines()[0], fix)


def described(devices: Mapping[str, Any]) -> str:
    """Number, kind and memory of devices: "8 NVIDIA H200, 104.8 GiB available on each"."""
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(Counter(devices["kinds"]).items()))
    least = min(devices["memory"], default=0)
    if devices["platform"] == "cpu":
        return f"{kinds}, using host memory"
    return f"{kinds}, " + (
        f"{format_bytes(least)} available on each" if least else "memory unknown"
    )


def _unused(one: Accelerator, messages: Sequence[str], chosen: str) -> Finding:
    """The finding about an accelerator that JAX does not use."""
    if chosen and "cpu" in chosen:
        text = f"JAX uses the CPU: JAX_PLATFORMS={chosen} excludes {one.file}"
        return Finding(NOTE, one.extra, text, f"unset JAX_PLATFORMS to use the {one.extra.upper()}")
    if not one.plugin:
        fix = f"pip install 'distflow_jax[{one.extra}]'"
        return Finding(NOTE, one.extra, f"JAX uses the CPU, but {one.file} exists", fix)
    names = {"gpu": ("cuda", "gpu"), "tpu": ("tpu",)}[one.extra]
    told = [text for text in messages if any(name in text.lower() for name in names)]
    text = f"{one.plugin} is installed and {one.file} exists, but JAX uses the CPU"
    fix = told[-1] if told else "check the driver"
    return Finding(PROBLEM, one.extra, text, fix)


def _remedy(error: str, chosen: str) -> str:
    """The remedy for a probe that failed."""
    if error.startswith("no answer"):
        return (
            "a driver or plugin hangs, or the hosts of a TPU slice wait for each other (run "
            "doctor on all hosts); --device_seconds=600 waits longer"
        )
    if "already in use" in error:
        return "stop the process that uses it"
    if "No module named" in error or "cannot import" in error or "is not installed" in error:
        return "install the packages as listed above"
    if chosen:
        return f"JAX_PLATFORMS={chosen} requires it: fix its plugin, or unset JAX_PLATFORMS"
    return "fix its driver or plugin, or set JAX_PLATFORMS=cpu to train on the CPU"
