"""Settings that a run would not read, or not reach: refused where a command gives them."""

import logging
from collections.abc import Callable, Collection
from typing import NamedTuple

from distflow_jax.config.graph_settings import value_at
from distflow_jax.config.run_config import Config
from distflow_jax.dag.graph import Graph
from distflow_jax.dag.graph_yaml import built_in
from distflow_jax.stages.registry import sections_read

log = logging.getLogger("distflow_jax")


class _Idle(NamedTuple):
    """Keys without an effect: the key that switches them on, and why it does not."""

    keys: tuple[str, ...]  # each a key, or the start of several
    switch: str
    is_on: Callable[[Config], object]
    why: str


_SWITCHED = (
    _Idle(("eval.",), "eval.dataset", lambda c: c.eval.dataset, "eval.dataset is empty"),
    _Idle(
        ("reward.overlong_penalty", "reward.overlong_cap"),
        "reward.overlong_buffer",
        lambda c: c.reward.overlong_buffer,
        "reward.overlong_buffer is 0",
    ),
    _Idle(
        ("stream.listen",), "stream.workers", lambda c: c.stream.workers, "stream.workers is False"
    ),
)
# sections that stages of a graph read -> the stage that a graph without it lacks
_OF_STAGES = {
    "algorithm": "computes no advantages",
    "critic": "trains no critic",
    "preference": "trains on no preferences",
    "reward_model": "trains no reward model",
}


def check_chosen(config: Config, graph: Graph, chosen: Collection[str]) -> None:
    """Raises ValueError for a key of a command, or of a notebook's overrides, without an effect.

    Config files may hold settings for several algorithms, and a command may say that a switch is
    off. A graph of the user's may read any setting.
    """
    given = [key for key in sorted(chosen) if value_at(config, key) != value_at(Config(), key)]
    for idle in _SWITCHED:
        if idle.is_on(config) or idle.switch in chosen:
            continue
        for key in given:
            if key.startswith(idle.keys):
                raise ValueError(
                    f"{key}={value_at(config, key)!r} has no effect: {idle.why}; "
                    f"set {idle.switch}, or remove {key}"
                )
    if config.dag not in built_in():
        return
    read = sections_read(graph.nodes)
    for key in given:
        section = key.partition(".")[0]
        if section in _OF_STAGES and section not in read:
            raise ValueError(
                f"{key}={value_at(config, key)!r} has no effect: dag {config.dag!r} "
                f"{_OF_STAGES[section]}; choose another dag, or remove {key}"
            )


def warn_of_warmup(config: Config) -> None:
    """Warns of a warm-up that takes all optimizer steps, so that lr is never reached."""
    training = config.training
    updates = training.steps * training.mini_batches * training.epochs
    warmup = training.optimizer.warmup_steps
    if warmup >= updates:
        log.warning(
            "training.optimizer.warmup_steps=%d takes all %d optimizer steps of the run: the "
            "learning rate stays below training.optimizer.lr=%g; lower warmup_steps, or raise "
            "training.steps",
            warmup,
            updates,
            training.optimizer.lr,
        )
