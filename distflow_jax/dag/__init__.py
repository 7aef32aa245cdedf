"""Graphs, the planner, plans, and the loop that walks a plan."""
