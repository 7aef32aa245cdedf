"""Homes: where the groups of a process lie that workers answer."""
