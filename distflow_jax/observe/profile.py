"""Traces of a few steps by JAX's profiler, for xprof and TensorBoard's profile tab.

    pip install xprof; xprof --logdir=RUN/profile/process_0

Spans (observe/spans.py) appear under their names, which shows the host's work for each node. A
program on the devices has the names of its nodes.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator

import jax


class Profile:
    """Writes a trace of `steps` to `folder`; each process needs a folder of its own.

    profile = Profile(folder, range(3, 6))
    with profile.step(3):
        ...
    """

    def __init__(self, folder: str | os.PathLike, steps: range):
        self._folder, self._steps = pathlib.Path(folder), steps
        self._tracing = False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Runs its body as step `number`; starts the trace before the first step to profile."""
        if number not in self._steps:
            yield
            return
        if not self._tracing:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # Python calls would bury the named spans
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._tracing = True
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield

    def ends_with(self, number: int) -> bool:
        """Whether this step is the last one of the running trace."""
        return self._tracing and number == self._steps[-1]

    def close(self) -> None:
        """Writes the trace, if there is one."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
