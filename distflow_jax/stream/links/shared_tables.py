"""Comparison of a worker with the trainers: config, code and tokenizer."""

import dataclasses
import hashlib
from collections.abc import Mapping

from distflow_jax.models.tokenizer import Tokenizer

# sections and keys that change no token of a response, or that each process sets for itself
OWN_SECTIONS = frozenset("mesh checkpoint observe health eval reward coordinator critic".split())
OWN_KEYS = frozenset(
    """
    compilation_cache data.date training.device_memory_gib training.steps
    stream.listen stream.worker_nodes stream.save_seconds stream.lease_seconds
    stream.no_workers_seconds stream.max_tries
    rollout.environment_threads rollout.num_slots rollout.page_size rollout.attention
    rollout.cache_tokens rollout.tokens_per_call rollout.prefill_tokens rollout.prefix_tokens
    rollout.max_trajectories
    """.split()
)
# keys of these sections by which a worker's engine is made
SHARED_KEYS = frozenset({"eval.max_response_length", "eval.num_samples"})
# keys of the section reward that each process sets for itself
OWN_REWARD_KEYS = frozenset({"reward.num_workers", "reward.start_seconds"})
_PROBE = "What is 12 + 35? \u00e9\u4e2d\n\t<|im_end|>"


def shared_tables(
    config: Mapping[str, str], code: Mapping[str, str], tokenizer: Tokenizer
) -> dict[str, dict[str, str]]:
    """Tables that must be alike, by name and key.

    `config`: all keys as JSON; `code`: digests of files.
    """
    shared = {key: value for key, value in config.items() if not _is_own(key)}
    # a worker writes no prompts: it has neither the variables nor the date of the trainers
    tokenizer = dataclasses.replace(tokenizer, variables={}, date="2000-01-01")
    _, tokens = tokenizer.encode_prompt([{"role": "user", "content": _PROBE}])
    digest = hashlib.sha256(bytes(str((sorted(tokenizer.stop_ids), tokens.tolist())), "utf-8"))
    return {
        "config": shared,
        "code": dict(code),
        "tokenizer": {"of the model": digest.hexdigest()[:16]},
    }


def node_table(config: Mapping[str, str]) -> dict[str, str]:
    """Keys that a worker which serves nodes must have alike too, of `config` as above."""
    own = OWN_REWARD_KEYS
    return {k: v for k, v in config.items() if k.startswith("reward.") and k not in own}


def _is_own(key: str) -> bool:
    own = key in OWN_KEYS or key.partition(".")[0] in OWN_SECTIONS
    return own and key not in SHARED_KEYS
