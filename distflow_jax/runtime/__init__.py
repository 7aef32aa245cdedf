"""What a run holds while it runs: stages, engine, coordinator, step times, offload."""
