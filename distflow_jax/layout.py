"""Layouts of fields, the edges between them, and names of fields with a meaning of their own."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

# A field that decides, when a node on the host writes it, which responses there are from then on:
# one integer per response. 0 drops it; the others of a prompt are put in the order of their numbers
KEEP = "keep"
# The field that meshes have in place of these columns of the host: batch.Rows, packed of them
ROWS = "rows"
ROWS_COLUMNS = ("prompt", "response", "response_mask")
# Written by samplers whose environments show images, packed with those columns: the images of each
# response as turn_images.to_bytes has them, uint8 [n], empty where there are none
RESPONSE_IMAGES = "response_images"
# Written by samplers of a mixture, read by its training: the experts of each token of prompt and
# response, integers [tokens, layers, experts of a token], -1 where unknown
ROUTED_EXPERTS = "routed_experts"
# The field that samples/STEP.jsonl tells of each response, beside the columns of the host
ADVANTAGE = "advantage"
# Written by samplers: finished training steps of the weights that sampled each token, int32 [T]
VERSION = "version"
# Given by the loop: the step that trains a response, int64 [N]
STEP = "step"
# Columns of one number per response, which the loop reads by their names
OF_RESPONSE = frozenset(("score", "unshaped_score", "environment_reward", "finished", KEEP))

# The end of names of metrics that have a number for each prompt of the step, in the order of their
# counters: float32 [G]. They are told of groups, and are no metrics of the run
OF_GROUP = "_of_group"
# The end of names of numbers by which partial batches weigh the mean whose name stands before it:
# of how many tokens or sequences it is the mean. They are no metrics of the run
WEIGHT = "/weight_of_mean"
TOKENS_OF_AGE = "tokens_of_age"  # share of the tokens, of `.../rollout_corr/tokens_of_age/AGE`
# largest weight of a token, of objectives whose corrections and rejections weigh them
KEPT_WEIGHT = "rollout_corr/kept_weight_max"
# names by which the loop finds numbers of its own nodes among a step's metrics
OF_LOOP = re.compile(rf"^training/|rollout_corr/|kto/|({OF_GROUP}|{WEIGHT})$")

Submesh = tuple[int, int]  # first and last + 1 of a host's devices
# axes of a training mesh, the outermost first, and the least size that a config may set
AXES = {"data": 1, "fsdp": 0, "expert": 1, "pipeline": 1, "context": 1, "tensor": 1}

# name -> float, scalar array, or Parts under any name; verl's names (docs/reference/metrics.md)
Metrics = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Parts:
    """Numbers of a host stage from which metrics follow once those of all processes are there.

    A stage that runs on the host for some groups alone, while other processes are elsewhere in the
    plan, must not wait for them.
    """

    values: tuple[Any, ...]  # JSON-able, one of each call of the stage
    merge: Callable[[Sequence[Any]], dict[str, float]]  # values of all calls and processes

    def __add__(self, other: "Parts") -> "Parts":
        return dataclasses.replace(self, values=self.values + other.values)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Placement of a stage's fields.

    `kind` is "host" (ragged NumPy columns, this process's share) or "mesh" (packed device arrays);
    `axes` are the mesh axes with their global sizes, in mesh order, e.g. (("fsdp", 4), ("tensor",
    2)); what is not named has size 1. A mesh covers all devices, or of every host the local devices
    submesh[0] up to submesh[1], exclusive. A host layout with the axis ("hosts", k) is that of
    samplers which k processes share: all k hold the columns of all of them. Two stages whose
    layouts compare equal hand fields on without moving a byte.
    """

    kind: str
    axes: tuple[tuple[str, int], ...] = ()
    submesh: tuple[int, int] | None = None

    def __post_init__(self):
        if self.kind not in ("host", "mesh"):
            raise ValueError(f"layout kind must be 'host' or 'mesh', got {self.kind!r}")

    def to_tree(self) -> dict[str, Any]:
        """The layout as plain JSON values; a submesh is named only where there is one."""
        tree = {"kind": self.kind, "axes": self.axes}
        return tree if self.submesh is None else tree | {"submesh": self.submesh}

    def __str__(self):
        if self.kind == "host":
            return "host" if not self.axes else f"groups of {hosts_of(self)} hosts"
        axes = axes_text(self)
        return axes if self.submesh is None else f"{axes} on devices {submesh_text(self.submesh)}"


@dataclasses.dataclass(frozen=True)
class Edge:
    """One field on its way from the node that writes it to a node that reads it.

    `source` is None for a field of the loader. `move` follows from the two layouts alone: "stay"
    (equal layouts), "pack" (host to mesh), "unpack" (mesh to host), "reshard" (mesh to another
    mesh) or "share" (between hosts and groups of hosts).
    """

    field: str
    source: str | None
    target: str
    source_layout: Layout
    target_layout: Layout
    move: str

    def to_tree(self) -> dict[str, Any]:
        """The edge as plain JSON values."""
        return vars(self) | {
            "source_layout": self.source_layout.to_tree(),
            "target_layout": self.target_layout.to_tree(),
        }


def move_between(source: Layout, target: Layout) -> str:
    """The kind of move an edge needs: stay, share, pack, unpack or reshard."""
    if source == target:
        return "stay"
    if source.kind == target.kind:
        return "share" if source.kind == "host" else "reshard"
    return "pack" if source.kind == "host" else "unpack"


def axes_text(layout: Layout) -> str:
    """The axes of a mesh layout for people: "fsdp 4 x tensor 2"."""
    return " x ".join(f"{name} {size}" for name, size in layout.axes)


def parse_submesh(where: str, text: str | int) -> Submesh | None:
    """Parses a submesh: "4:6" -> (4, 6), "" -> None.

    `where`: the config key, named in the ValueError for malformed text.
    """
    if text == "":
        return None
    found = re.fullmatch(r"(\d+):(\d+)", str(text))
    if not found:
        raise ValueError(
            f"{where} must be FIRST:LAST, as in a slice of a host's devices ('4:6' are the fifth "
            f"and the sixth), got {text!r}"
        )
    first, last = int(found[1]), int(found[2])
    if first >= last:
        raise ValueError(f"{where}={text!r} holds no device: use '{first}:{first + 1}' for one")
    return first, last


def submesh_text(submesh: Submesh) -> str:
    """A submesh of every host's devices as it is written in the config: "4:6"."""
    return f"{submesh[0]}:{submesh[1]}"


def overlaps(a: Layout, b: Layout) -> bool:
    """Whether two mesh layouts have devices in common."""
    if a.submesh is None or b.submesh is None:
        return True
    return a.submesh[0] < b.submesh[1] and b.submesh[0] < a.submesh[1]


def hosts_of(layout: Layout) -> int:
    """Number of processes that hold the same columns in a host layout."""
    return dict(layout.axes).get("hosts", 1)
