"""Answers in responses: where they stand, and which of them are equal."""
