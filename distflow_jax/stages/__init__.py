"""What one node of a graph does."""
