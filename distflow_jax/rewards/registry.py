"""The built-in reward functions by name."""

from distflow_jax.rewards import math_answer, reasoning_gym
from distflow_jax.rewards.exact import exact
from distflow_jax.rewards.format import pattern_format, tagged_format
from distflow_jax.rewards.geo3k import geo3k
from distflow_jax.rewards.gsm8k import gsm8k
from distflow_jax.rewards.zero import zero

REWARDS = {
    "gsm8k": gsm8k,
    "math": math_answer.math,
    "geo3k": geo3k,
    "exact": exact,
    "format": tagged_format,
    "pattern": pattern_format,
    "reasoning_gym": reasoning_gym.reasoning_gym,
    "zero": zero,
}

# They take microseconds for any text, and need no process of their own.
QUICK = frozenset({"gsm8k", "exact", "format", "zero"})

# Packages that a function imports at its first call; workers import them before any deadline runs.
LOAD = {"math": math_answer.load, "geo3k": math_answer.load, "reasoning_gym": reasoning_gym.load}
