"""Scores for responses, and the processes that compute them."""
