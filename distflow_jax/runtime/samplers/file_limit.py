"""The open-file limit of a process with many connections."""

import resource

FILES_OF_A_WORKER = 4  # of a trainer's limit: a connection, others while it pulls weights, and as
# many for the rest of the process


def raise_file_limit() -> int:
    """Raises the limit to what the system allows this process; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS names a hard limit that it does not give
        return soft
    return hard


def most_workers(files: int) -> int:
    """Workers that a task buffer has room for by its limit of open files."""
    return 1 << 30 if files < 0 else max(1, files // FILES_OF_A_WORKER)
