"""The subcommand train."""

import signal
import sys
from types import SimpleNamespace

from distflow_jax import run
from distflow_jax.cluster import processes
from distflow_jax.commands.command_line import config_name
from distflow_jax.commands.join_job import join_job
from distflow_jax.commands.printed_commands import PrintedCommands
from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.watchdog.supervision import stop_on_signals


def checked(options: SimpleNamespace) -> Config:
    """The config. Raises ValueError for one that does not hold."""
    if options.profile_steps is not None:
        options.config.observe.profile_steps = options.profile_steps
    return from_config_dict(Config, options.config)


def main(options: SimpleNamespace) -> int:
    """Joins a job of several processes, if there is one, and trains; returns the exit code."""
    config = checked(options)
    with stop_on_signals(signal.SIGTERM, signal.SIGINT) as stop:
        stop.before_leaving.append(processes.stop_others)
        stop.leave_at_once()  # joining may wait for minutes
        job = join_job(options, watched_next=True)
        code = run.train(
            config,
            options.workdir or f"runs/{config_name()}",
            job,
            chosen=options.chosen,
            stop=stop,
            replay=options.replay,
            commands=PrintedCommands(sys.argv),
        )
    processes.shutdown()
    return code
