"""Records that several layers share: where data lies, and how it gets from one stage to the
next."""

import dataclasses
from collections.abc import Mapping
from typing import Any

# A field that decides, when a node on the host writes it, which responses there are from then on:
# one integer per response. 0 drops it; the others of a prompt are put in the order of their numbers
KEEP = "keep"

Metrics = dict[str, Any]  # name -> float or scalar array; verl's names (docs/metrics.md)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a stage keeps its fields.

    `kind` is "host" (ragged NumPy columns, this process's share) or "mesh" (packed device arrays);
    `axes` are the mesh axes with their global sizes, in mesh order, e.g. (("fsdp", 4), ("tensor",
    2)). A host layout with the axis ("hosts", k) is that of samplers which k processes share: all
    k hold the columns of all of them. Two stages whose layouts compare equal hand fields on without
    moving a byte.
    """

    kind: str
    axes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self):
        if self.kind not in ("host", "mesh"):
            raise ValueError(f"layout kind must be 'host' or 'mesh', got {self.kind!r}")

    def __str__(self):
        if self.kind == "host":
            return "host" if not self.axes else f"groups of {hosts_of(self)} hosts"
        return " x ".join(f"{name} {size}" for name, size in self.axes)


@dataclasses.dataclass(frozen=True)
class Edge:
    """One field on its way from the node that writes it to a node that reads it.

    `source` is None for a field that the loader gives. `move` is decided by the planner from the
    two layouts alone: "stay" (equal layouts), "pack" (host to mesh), "unpack" (mesh to host),
    "reshard" (mesh to another mesh) or "share" (between hosts and groups of hosts).
    """

    field: str
    source: str | None
    target: str
    source_layout: Layout
    target_layout: Layout
    move: str


def move_between(source: Layout, target: Layout) -> str:
    """The kind of move an edge needs: stay, share, pack, unpack or reshard."""
    if source == target:
        return "stay"
    if source.kind == target.kind:
        return "share" if source.kind == "host" else "reshard"
    return "pack" if source.kind == "host" else "unpack"


def hosts_of(layout: Layout) -> int:
    """Number of processes that hold the same columns in a host layout."""
    return dict(layout.axes).get("hosts", 1)


def flatten_dict(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dict -> {"a/b/c": leaf}. Order follows the input."""
    flat = {}
    for key, value in tree.items():
        path = f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            flat.update(flatten_dict(value, path))
        else:
            flat[path] = value
    return flat


def unflatten_dict(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of flatten_dict."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf] = value
    return tree
