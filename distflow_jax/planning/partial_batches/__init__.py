"""Plans of steps in partial batches."""
