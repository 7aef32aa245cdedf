"""The subcommand worker."""

import signal
from types import SimpleNamespace

from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.config.user_error import user_error
from distflow_jax.runtime.samplers.foreign_engines import read_engine
from distflow_jax.runtime.samplers.run_worker import WorkerFailed, WorkerLeft, run_worker
from distflow_jax.stream.links.buffer_links import NobodyAnswers, Patience
from distflow_jax.watchdog.exit_codes import EXIT_FAILED, EXIT_PREEMPTED
from distflow_jax.watchdog.supervision import OF_A_WORKER, stop_on_signals


def checked(options: SimpleNamespace) -> Config:
    """The config. Raises ValueError for one that does not hold, or an engine that is none."""
    read_engine(options.engine, options.engine_settings)
    return from_config_dict(Config, options.config)


def main(options: SimpleNamespace) -> int:
    """Joins a run and samples for it until it ends; returns the exit code."""
    config = checked(options)
    foreign = read_engine(options.engine, options.engine_settings)
    try:
        with stop_on_signals(signal.SIGTERM, signal.SIGINT, words=OF_A_WORKER) as stop:
            return run_worker(
                config,
                options.join,
                stop,
                Patience(options.join_seconds, options.orphan_seconds),
                chosen=options.chosen,
                foreign=foreign,
                nodes=options.nodes,
            )
    except (NobodyAnswers, WorkerLeft) as error:  # trainers may come back
        user_error(str(error))
        return EXIT_PREEMPTED
    except WorkerFailed as error:
        user_error(str(error))
        return EXIT_FAILED  # no user error, after which launchers start nothing again
