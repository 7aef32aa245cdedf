"""The wire: calls with bytes between trainers and workers that have the run's token."""
