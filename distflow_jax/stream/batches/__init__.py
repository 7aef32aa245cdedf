"""Groups as steps consume them: partial batches, rollouts with a budget, and recordings of both."""
