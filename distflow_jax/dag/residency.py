"""Which parts of which models a node needs on its devices, and what may wait on the host meanwhile.

A pure function of the plan. A trained model has parameters and moments, a frozen one parameters, a
sampler weights ("params") and its cache. Nodes on disjoint devices do not disturb each other.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from distflow_jax.dag.plan import Plan, Task, aligned
from distflow_jax.layout import Layout, overlaps

Item = tuple[str, str]  # key of a model's state, and what of it: "params", "moments" or "cache"

# what happens between the nodes of two steps
UPDATE_WEIGHTS, EVALUATE = "update_weights", "evaluate"
_EVERYWHERE = Layout("mesh")


@dataclasses.dataclass(frozen=True)
class Residency:
    """What a node, or one of the two above, has on its devices.

    Before it whatever else lies on them is put away, and what it `uses` fetched, unless that is
    done already. After it some is put away, and what the next one needs is fetched ahead, while the
    devices are still at work.
    """

    layout: Layout  # of its devices
    uses: frozenset[Item]
    replaces: frozenset[Item] = frozenset()  # given new values whatever the old ones are
    put_away: frozenset[Item] = frozenset()
    fetch_ahead: frozenset[Item] = frozenset()


def residency(plan: Plan, samplers: Mapping[str, str]) -> dict[str, Residency]:
    """The stay of every node that uses a model, by its id, and those between the nodes.

    `samplers`: state key of each sampler -> that of the policy whose weights it has.
    """
    on_mesh = [t for t in plan.tasks if t.layout.kind == "mesh" and t.node.type != "COMPUTE"]
    trained = {t.state_key: t.node.type == "MODEL_TRAIN" for t in on_mesh}
    trained |= {t.state_key: True for t in on_mesh if t.node.type == "MODEL_TRAIN"}
    stays = {}
    if samplers:
        stays[UPDATE_WEIGHTS] = Residency(
            _EVERYWHERE,
            frozenset((policy, "params") for policy in samplers.values()),
            frozenset((sampler, "params") for sampler in samplers),
        )
    for task in plan.tasks:
        if uses := _uses(task, trained, samplers):
            layout = _EVERYWHERE if task.layout.kind == "host" else task.layout
            stays[task.node.id] = Residency(layout, uses)
    again = {unit.name for unit in plan.split()[0]}  # how often these run is not known before
    names = list(stays)
    for place, name in enumerate(names):
        if name not in again:
            stays[name] = _with_following(stays, name, names[place + 1 :] + names[:place])
    if samplers:
        sampling = frozenset((key, what) for key in samplers for what in ("params", "cache"))
        stays[EVALUATE] = Residency(_EVERYWHERE, sampling, put_away=sampling)
    return stays


def _uses(task: Task, trained: Mapping[str, bool], samplers: Collection[str]) -> frozenset[Item]:
    """`trained`: whether a model is, by its key."""
    node, key = task.node, task.state_key
    if key in samplers:
        return frozenset({(key, "params"), (key, "cache")})
    if key not in trained:
        return frozenset()
    # a function of the user's is handed the whole state
    whole = trained[key] and (node.type == "MODEL_TRAIN" or node.fn is not None)
    return frozenset((key, what) for what in (("params", "moments") if whole else ("params",)))


def _with_following(
    stays: Mapping[str, Residency], name: str, following: Iterable[str]
) -> Residency:
    """The stay of `name`, knowing who is next on its devices."""
    stay = stays[name]
    there = stay.uses | stay.replaces
    after = next((stays[n] for n in following if overlaps(stays[n].layout, stay.layout)), stay)
    return dataclasses.replace(
        stay, put_away=there - after.uses - after.replaces, fetch_ahead=after.uses - there
    )


def describe(stays: Mapping[str, Residency]) -> str:
    """The stays as a table for people."""
    rows = [("node", "has on its devices", "then puts away", "then fetches ahead")]
    for name, stay in stays.items():
        sets = (stay.uses | stay.replaces, stay.put_away, stay.fetch_ahead)
        rows.append((name, *(", ".join(" ".join(i) for i in sorted(s)) or "-" for s in sets)))
    return f"models wait on the host meanwhile\n\n{aligned(rows)}\n"
