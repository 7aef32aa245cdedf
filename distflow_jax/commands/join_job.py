"""The job of a subcommand that runs in several processes."""

import os
from types import SimpleNamespace

from distflow_jax.cluster import job, processes


def join_job(options: SimpleNamespace, *, watched_next: bool = False) -> job.Job:
    """Joins the job that --coordinator, --num_processes and --process_id or the environment name.

    `watched_next` is for who starts watchdogs next, see processes.initialize.

    Raises ValueError for flags or variables that fit no job.
    """
    found = job.find(
        os.environ,
        coordinator=options.coordinator,
        num_processes=options.num_processes,
        process_id=options.process_id,
    )
    processes.initialize(found, watched_next=watched_next)
    return found
