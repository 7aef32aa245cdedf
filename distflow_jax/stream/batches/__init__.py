"""Groups as steps take them: partial batches, rollouts with a budget, records of both."""
