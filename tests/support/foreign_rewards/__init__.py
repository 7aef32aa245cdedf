"""Reward functions in the forms of other projects, which tests load by their paths."""
