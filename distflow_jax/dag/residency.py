"""Residency: which models each node has on its devices, and what may wait on the host meanwhile.

A pure function of the plan. A trained model has parameters and moments, a frozen one parameters, a
sampler weights ("params") and its cache. Nodes on disjoint devices do not affect each other.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from distflow_jax.dag.plan import Plan, Task
from distflow_jax.layout import Layout, overlaps
from distflow_jax.programs.text_table import text_table

Item = tuple[str, str]  # (state key of a model, "params", "moments" or "cache")

# work between the nodes of two steps
UPDATE_WEIGHTS, EVALUATE = "update_weights", "evaluate"
_EVERYWHERE = Layout("mesh")


@dataclasses.dataclass(frozen=True)
class Residency:
    """The items that a node, UPDATE_WEIGHTS or EVALUATE has on its devices.

    Before the node, all other items on these devices are evicted and those in `uses` are fetched,
    unless that is done already. After the node, the items in `evict` are evicted and those in
    `prefetch`, which the next node needs, are fetched while the devices still compute.
    """

    layout: Layout  # of the node's devices
    uses: frozenset[Item]
    replaces: frozenset[Item] = frozenset()  # overwritten; their old values are not needed
    evict: frozenset[Item] = frozenset()
    prefetch: frozenset[Item] = frozenset()


def plan_residency(
    plan: Plan, samplers: Mapping[str, str], *, apart: bool = False
) -> dict[str, Residency]:
    """{node id: residency} of every node that uses a model, of UPDATE_WEIGHTS and of EVALUATE.

    `samplers`: state key of each sampler -> state key of the policy whose weights it samples from.
    `apart`: they sample beside the training, on devices of their own, which nothing leaves.
    """
    on_mesh = [t for t in plan.tasks if t.layout.kind == "mesh" and t.node.type != "COMPUTE"]
    trained = {t.state_key: t.node.type == "MODEL_TRAIN" for t in on_mesh}
    trained |= {t.state_key: True for t in on_mesh if t.node.type == "MODEL_TRAIN"}
    found = {}
    if samplers:
        found[UPDATE_WEIGHTS] = Residency(
            _EVERYWHERE,
            frozenset((policy, "params") for policy in samplers.values()),
            frozenset((sampler, "params") for sampler in samplers if not apart),
        )
    for task in plan.tasks:
        if uses := _uses(task, trained, () if apart else samplers):
            layout = _EVERYWHERE if task.layout.kind == "host" else task.layout
            found[task.node.id] = Residency(layout, uses)
    repeated = {unit.name for unit in plan.split()[0]}  # the number of rounds is not known
    names = list(found)
    for place, name in enumerate(names):
        if name not in repeated:
            found[name] = _with_next(found, name, names[place + 1 :] + names[:place])
    if samplers and not apart:
        sampling = frozenset((key, what) for key in samplers for what in ("params", "cache"))
        found[EVALUATE] = Residency(_EVERYWHERE, sampling, evict=sampling)
    return found


def _uses(task: Task, trained: Mapping[str, bool], samplers: Collection[str]) -> frozenset[Item]:
    """The items that a task reads or updates. `trained`: whether a model is, by its state key."""
    node, key = task.node, task.state_key
    if key in samplers:
        return frozenset({(key, "params"), (key, "cache")})
    if key not in trained:
        return frozenset()
    # a user's function takes the whole state
    whole = trained[key] and (node.type == "MODEL_TRAIN" or node.fn is not None)
    return frozenset((key, what) for what in (("params", "moments") if whole else ("params",)))


def _with_next(
    residencies: Mapping[str, Residency], name: str, following: Iterable[str]
) -> Residency:
    """The residency of `name`, with what to evict and prefetch for the next node on its devices."""
    own = residencies[name]
    there = own.uses | own.replaces
    next_ones = (residencies[n] for n in following if overlaps(residencies[n].layout, own.layout))
    after = next(next_ones, own)
    return dataclasses.replace(
        own, evict=there - after.uses - after.replaces, prefetch=after.uses - there
    )


def describe(residencies: Mapping[str, Residency]) -> str:
    """Returns a table with a line per node."""
    rows = [("node", "on its devices", "then evicts", "then prefetches")]
    for name, own in residencies.items():
        sets = (own.uses | own.replaces, own.evict, own.prefetch)
        rows.append((name, *(", ".join(" ".join(i) for i in sorted(s)) or "-" for s in sets)))
    return f"other models wait on the host\n\n{text_table(rows)}\n"
