"""Data sets, the loader, and the columns of a step's first fields."""
