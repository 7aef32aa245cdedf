"""Data: where they come from and how they move between stages."""
