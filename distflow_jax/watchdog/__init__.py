"""The process beside each controller that names who died, stopped or hangs."""
