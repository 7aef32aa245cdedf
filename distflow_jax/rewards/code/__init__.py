"""The reward `code`: programs run in the sandbox, verdicts made outside of it."""
