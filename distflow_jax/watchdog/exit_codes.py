"""Exit codes of a training process."""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_PREEMPTED = 75  # EX_TEMPFAIL: stopped by a signal, with nothing lost; start me again
EXIT_INTERRUPTED = 130  # as shells report SIGINT: a second Ctrl-C
