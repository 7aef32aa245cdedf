"""The runtime of a run: stages, engine, coordinator, state, instruments, offload."""
