"""Rows of a data set as tokens, and those that are short enough."""
