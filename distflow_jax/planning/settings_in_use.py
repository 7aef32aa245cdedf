"""Settings that a run would not read, or not reach: refused where a command gives them."""

import logging
from collections.abc import Callable, Collection
from typing import NamedTuple

from distflow_jax.config.graph_settings import value_at
from distflow_jax.config.run_config import Config
from distflow_jax.dag.added_fields import FIELD
from distflow_jax.dag.graph import Graph
from distflow_jax.dag.graph_yaml import built_in
from distflow_jax.environments.registry import ENVIRONMENTS
from distflow_jax.planning.run_data import calls_rewards
from distflow_jax.rewards.registry import SANDBOXED
from distflow_jax.stages.registry import sections_read

log = logging.getLogger("distflow_jax")


# a setting that is 0, False or empty -> keys, or the start of keys, that it leaves without effect
_SWITCHES = {
    "eval.dataset": ("eval.",),
    "reward.overlong_buffer": ("reward.overlong_penalty", "reward.overlong_cap"),
    "stream.workers": ("stream.listen", "stream.save_seconds", "stream.no_workers_seconds"),
    "health.enabled": ("health.",),
    "observe.trackers": ("observe.tracker_",),
}


class _Rule(NamedTuple):
    """Keys that have an effect only in some runs."""

    keys: tuple[str, ...]  # each a key, or the start of several
    in_use: Callable[[Config, Graph], object]
    why: str  # they have none in other runs
    fix: str = "choose another dag"


def _scores(config: Config, graph: Graph) -> bool:
    return calls_rewards(graph) or bool(config.eval.dataset)


def _samples(config: Config, graph: Graph) -> bool:
    return any(node.role == "ROLLOUT" for node in graph.nodes)


_RULES = (
    _Rule(
        ("rollout.cache_fraction",),
        lambda config, graph: not config.rollout.num_slots,
        "rollout.num_slots fixes the size of the KV cache",
        "set rollout.num_slots=0",
    ),
    _Rule(
        ("sandbox.",),
        lambda config, graph: any(
            (config.rollout.environment, config.reward.function in SANDBOXED)
        ),
        "neither reward.function nor rollout.environment runs programs of the model",
        f"set reward.function={min(SANDBOXED)} or rollout.environment",
    ),
)
# of built-in graphs: `why` says what the graph does not do
_OF_GRAPHS = (
    *(
        _Rule(
            (f"{section}.",), lambda config, graph, s=section: s in sections_read(graph.nodes), why
        )
        for section, why in {
            "algorithm": "computes no advantages",
            "critic": "trains no critic",
            "preference": "trains on no preferences",
            "reward_model": "trains no reward model",
        }.items()
    ),
    _Rule(
        tuple(f"rollout.{name}" for name in "num_samples temperature top_k top_p".split()),
        _samples,
        "samples no responses",
    ),
    _Rule(
        ("rollout.",),
        lambda config, graph: _samples(config, graph) or config.eval.dataset,
        "samples no responses",
        "choose another dag, set eval.dataset",
    ),
    _Rule(("reward.",), _scores, "calls no rewards", "choose another dag, set eval.dataset"),
    _Rule(
        ("coordinator.overlap_rewards",),
        lambda config, graph: calls_rewards(graph),
        "calls no rewards",
    ),
    _Rule(
        ("preference.desirable_weight", "preference.undesirable_weight"),
        lambda config, graph: graph.data == "unpaired",
        "trains on no responses with a label",
    ),
    _Rule(
        ("preference.loss",),
        lambda config, graph: graph.data != "unpaired",
        "trains on no pairs",
    ),
)
_ALWAYS = {"rollout.max_response_length"}  # of answers in the data, too


def check_chosen(config: Config, graph: Graph, chosen: Collection[str], *, sees: bool) -> None:
    """Raises ValueError for a key of a command, or of a notebook's overrides, without an effect.

    Config files may hold settings for several algorithms, and a command may say that a switch is
    off. A graph of the user's may read any setting. `sees`: whether the model reads images.
    """
    changed = {key for key in chosen if value_at(config, key) != value_at(Config(), key)}
    given = sorted(changed - _ALWAYS)

    def refuse(keys: tuple[str, ...], why: str, fix: str) -> None:
        for key in given:
            if key.startswith(keys):
                value = value_at(config, key)
                raise ValueError(f"{key}={value!r} has no effect: {why}; {fix}, or remove {key}")

    for switch, keys in _SWITCHES.items():
        if not (value := value_at(config, switch)) and switch not in chosen:
            refuse(keys, f"{switch} is {value!r}", f"set {switch}")
    for rule in _RULES:
        if not rule.in_use(config, graph):
            refuse(rule.keys, rule.why, rule.fix)
    if not sees:
        keys = ("data.image_tokens",)
        refuse(keys, "the model reads no images", "choose a model.source that does")
    for rule in _OF_GRAPHS if config.dag in built_in() else ():
        if not rule.in_use(config, graph):
            refuse(rule.keys, f"dag {config.dag!r} {rule.why}", rule.fix)


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


def warn_of_unread_rewards(name: str, graph: Graph) -> None:
    """Warns of rewards of the environment `name` that no node reads; built-in ones give none."""
    if name in ("", *ENVIRONMENTS):
        return
    read = {field for node in graph.nodes for field in node.reads.values()}
    for node in graph.nodes:
        if FIELD in node.writes and node.writes[FIELD] not in read:
            log.warning(
                "node %r: no node reads the rewards of rollout.environment=%s, which it writes as "
                "%r: if there are any, add them to the score by a node with fn: weighted_sum",
                node.id,
                name,
                node.writes[FIELD],
            )
