"""Traces of a few steps by JAX's profiler, for xprof and TensorBoard's profile tab.

    pip install xprof; xprof --logdir=RUN/profile/process_0

Spans (observe/spans.py) are in it by their names, so that it shows what the host did for each node;
a program on the devices bears the names of its nodes.
"""

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator

import jax

_STEPS = re.compile(r"(\d+)(?::(\d+))?")


def parse_steps(text: str) -> range:
    """Steps of "3:5" (3, 4 and 5) or "3"; none of "". Raises ValueError."""
    if not text:
        return range(0)
    found = _STEPS.fullmatch(text)
    first, last = (int(n or found[1]) for n in found.groups()) if found else (0, 0)
    if not 0 < first <= last:
        raise ValueError(
            f"observe.profile_steps={text!r} names no steps: write FIRST:LAST, both counted from 1 "
            "and both profiled, 3:5, or one step, 3"
        )
    return range(first, last + 1)


class Profile:
    """Writes `folder` while the steps asked for go by; one folder for each process.

    profile = Profile(folder, range(3, 6))
    with profile.step(3):
        ...
    """

    def __init__(self, folder: str | os.PathLike, steps: range):
        self._folder, self._steps = pathlib.Path(folder), steps
        self._tracing = False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A step: starts the trace before the first that is asked for."""
        if number not in self._steps:
            yield
            return
        if not self._tracing:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every call of Python would drown what is named
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._tracing = True
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield

    def ends_with(self, number: int) -> bool:
        """Whether this step is the last of a trace that is being made."""
        return self._tracing and number == self._steps[-1]

    def close(self) -> None:
        """Writes the trace, if there is one."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
