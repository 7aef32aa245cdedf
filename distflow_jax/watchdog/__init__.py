"""The process beside each controller that names the process that died, stopped or hangs."""
