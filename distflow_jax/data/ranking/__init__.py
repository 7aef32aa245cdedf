"""Ranking: expected response lengths of prompts that were never answered."""
