"""Training as a service to a program of one's own: prompts and samples come from there."""
