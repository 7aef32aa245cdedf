"""Exit codes of a training process."""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_PREEMPTED = 75  # EX_TEMPFAIL: stopped by SIGTERM, with nothing lost; start me again
