"""The wire protocol: calls with bytes between trainers and workers that hold the run's token."""
