"""The subcommand train."""

from types import SimpleNamespace

from distflow_jax import run
from distflow_jax.cluster import processes
from distflow_jax.commands.command_line import config_name
from distflow_jax.commands.join_job import join_job
from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.watchdog.supervision import stop_on_sigterm


def main(options: SimpleNamespace) -> int:
    """Joins a job of several processes, if there is one, and trains; returns the exit code."""
    if options.profile_steps is not None:
        options.config.observe.profile_steps = options.profile_steps
    config = from_config_dict(Config, options.config)
    with stop_on_sigterm() as stop:
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
        )
    processes.shutdown()
    return code
