"""Rollouts that end by a budget of tokens, and steps that train what is complete by then."""
