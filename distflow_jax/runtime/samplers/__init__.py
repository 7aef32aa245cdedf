"""The samplers of a run: their source in a run, their links to trainers, and workers."""
