"""Dispatch: which worker gets which of the groups that may begin, by measured times."""
