"""Data sets, the loader, and the columns that a step begins with."""
