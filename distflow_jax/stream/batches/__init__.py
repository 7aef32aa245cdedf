"""Groups as steps consume them: partial batches, their agreement, and recordings."""
