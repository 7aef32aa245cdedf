"""Advantages, losses, KL estimators and correction weights: pure functions of arrays."""
