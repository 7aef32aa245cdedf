"""The subcommand doctor."""

import os
from collections.abc import Iterator
from types import SimpleNamespace

from distflow_jax.commands.doctor.device_findings import Probe, accelerators, device_findings
from distflow_jax.commands.doctor.finding import PROBLEM, Finding
from distflow_jax.commands.doctor.host_findings import host_findings
from distflow_jax.commands.doctor.package_findings import package_findings
from distflow_jax.config.user_error import user_error
from distflow_jax.parsing.one_line import one_line


def main(options: SimpleNamespace) -> int:
    """Prints a line for each thing that a run needs; returns 2 if one of them would stop it."""
    problems = []
    for found in findings(options.device_seconds):
        print(one_line(found.line()), flush=True)
        problems += [found.name] * (found.level == PROBLEM)
    return user_error(f"a run would not start: see {', '.join(problems)} above") if problems else 0


def findings(device_seconds: float) -> Iterator[Finding]:
    """All findings; those on devices come last, and take at most about `device_seconds`."""
    probe = Probe()  # looks for devices meanwhile
    yield from package_findings()
    yield from host_findings(os.environ)
    yield from device_findings(probe.answer(device_seconds), accelerators(), os.environ)
