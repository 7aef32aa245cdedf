"""What happens in which order: graph, planner, worker."""
