"""Bytes, collectives and matrix products of a compiled program on each device, from its HLO.

XLA's own `cost_analysis` counts the body of a loop once; here it counts once per trip. The bytes
that an instruction accesses follow xla/service/hlo_cost_analysis.cc.
"""

import dataclasses
import re

from distflow_jax.programs.bounded_loops import bound_of, is_seldom
from distflow_jax.programs.hlo_products import kernel_bytes, product_flops
from distflow_jax.programs.hlo_text import Computation, HloText, Instruction, parse
from distflow_jax.programs.overlap import NOTHING, Beside, continues, is_piece, work_beside

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "add-dependency", "domain",
}  # fmt: skip
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_INDEX = re.compile(r"index=(\d+)")
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)="
    r"(mesh\[[^\]]*\](?:, device_ids=\([^{]*\))? ?\{[^}]*\}|"
    r"\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?|\{(?:\{[\d,]*\},? ?)*\})"
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction, or the start and end of an asynchronous one."""

    kind: str  # of COLLECTIVES
    bytes: float  # per device and time: of the result of an all-gather, of the operands otherwise
    times: float
    groups: str  # replica groups (pairs of a permutation) as in the text; "": could not be parsed
    overlapped: bool = False  # asynchronous: other instructions run meanwhile
    beside: Beside = NOTHING  # of these instructions, each time


@dataclasses.dataclass(frozen=True)
class Module:
    """Totals of one device over a module; the body of a loop counts once per trip."""

    # of main memory, read and written by each instruction; instructions inside a fusion access none
    bytes_accessed: float = 0.0
    flops: float = 0.0  # of matrix products whose sizes are in the text
    collectives: tuple[Collective, ...] = ()
    unbounded: tuple[str, ...] = ()  # op_names of loops without a trip count: counted once
    unread: int = 0  # lines and names of the text that could not be parsed

    def bytes_by(self, kind: str) -> float:
        """Bytes of all collectives of one kind, of COLLECTIVES."""
        return float(sum(c.bytes * c.times for c in self.collectives if c.kind == kind))

    def __add__(self, other: "Module") -> "Module":
        return Module(
            self.bytes_accessed + other.bytes_accessed,
            self.flops + other.flops,
            self.collectives + other.collectives,
            self.unbounded + other.unbounded,
        )

    def renamed(self, kind: str, to: str) -> "Module":
        """A copy with collectives of one kind counted as another kind."""
        found = (dataclasses.replace(c, kind=to) if c.kind == kind else c for c in self.collectives)
        return dataclasses.replace(self, collectives=tuple(found))

    def overlapped(self, beside: Beside = NOTHING) -> "Module":
        """A copy whose collectives overlap with other work, of all of them together."""
        size = sum(c.bytes * c.times for c in self.collectives) or 1.0
        found = tuple(
            dataclasses.replace(c, overlapped=True, beside=NOTHING.plus(beside, c.bytes / size))
            for c in self.collectives
        )
        return dataclasses.replace(self, collectives=found)

    def times(self, trips: float) -> "Module":
        """A copy with all totals multiplied by `trips`."""
        many = tuple(dataclasses.replace(c, times=c.times * trips) for c in self.collectives)
        return dataclasses.replace(
            self,
            bytes_accessed=self.bytes_accessed * trips,
            flops=self.flops * trips,
            collectives=many,
        )


def read(text: str) -> Module:
    """Totals of one device over a module printed by `compiled.as_text()`.

    Never raises: text that cannot be parsed costs nothing, and is counted in `unread`.
    """
    parsed = parse(text)
    total = _Reader(parsed).computation(parsed.entry) if parsed.entry else Module()
    return dataclasses.replace(total, unread=parsed.unread + (not parsed.entry))


class _Reader:
    """Adds up the costs of computations; each computation is visited once."""

    def __init__(self, text: HloText):
        self.text = text
        self.known: dict[str, Module] = {}

    def computation(self, name: str) -> Module:
        if name not in self.known:
            found = self.text.computations[name]
            costs = {i.name: self._instruction(found, i) for i in found.instructions.values()}
            self.known[name] = sum(self._scheduled(found, costs).values(), Module())
        return self.known[name]

    def _scheduled(self, inside: Computation, costs: dict[str, Module]) -> dict[str, Module]:
        """The costs, in which collectives have the work beside them."""
        sent = {
            name: sum(c.bytes * c.times for c in cost.collectives)
            for name, cost in costs.items()
            if inside.instructions[name].opcode.endswith(("-start", "fusion"))
            and any(c.overlapped and c.bytes for c in cost.collectives)
        }
        if not sent:
            return costs
        work = {name: Beside(cost.flops, cost.bytes_accessed) for name, cost in costs.items()}
        beside = work_beside(self.text, inside, sent, work)
        return costs | {name: costs[name].overlapped(of) for name, of in beside.items()}

    def _instruction(self, inside: Computation, one: Instruction) -> Module:
        opcode, called = one.opcode.removesuffix("-start"), one.called
        if opcode in _FREE or opcode.endswith(("-done", "-update")):
            return Module()
        if opcode == "while":
            return self._loop(one)
        if opcode == "conditional":
            names = sum((v for k, v in called.items() if k.endswith(("computation", "tions"))), ())
            branches = [self.computation(name) for name in names]
            choose = min if is_seldom(one.op_name) else max
            counted = choose(branches, key=lambda b: (b.flops, b.bytes_accessed), default=Module())
            return dataclasses.replace(counted, unbounded=sum((b.unbounded for b in branches), ()))
        if opcode in ("call", "async"):
            names = called.get("to_apply", called.get("calls", ()))
            found = sum((self.computation(name) for name in names), Module())
            return found if one.opcode == "call" else found.overlapped()
        if opcode == "fusion":
            return self._fusion(inside, one)
        accessed = _bytes_accessed(inside, one)
        if opcode in COLLECTIVES:
            continued = continues(one)
            return Module(accessed, 0.0, () if continued else (_collective(inside, one),))
        return Module(accessed, product_flops(inside, one))

    def _loop(self, one: Instruction) -> Module:
        names = one.called.get("body", ()) + one.called.get("condition", ())
        once = sum((self.computation(name) for name in names), Module())
        known = _TRIPS.search(one.attributes)
        trips = int(known[1]) if known else bound_of(one.op_name)
        if trips is None:
            trips = self._counted_to(one)
        if trips is None:
            return once + Module(unbounded=(one.op_name or one.name,))
        return once.times(trips)

    def _counted_to(self, one: Instruction) -> int | None:
        """Trips by the constant bound of a loop's counter, from 0: TPU text has no trip counts.

        Counters of scans are signed, those of XLA's loops of products and permutations are not.
        """
        for name in one.called.get("condition", ()):
            condition = self.text.computations[name]
            root = condition.root
            if root is None or root.opcode != "compare" or "direction=LT" not in root.attributes:
                continue
            end = condition.operand(root, 1)
            if end is None or end.opcode != "constant" or not end.arguments.isdigit():
                continue
            if end.shape.startswith(("s32[]", "u32[]")):
                return -(-int(end.arguments) // self._step(one, condition.operand(root, 0)))
        return None

    def _step(self, one: Instruction, counter: Instruction | None) -> int:
        """The constant that a loop's body adds to its counter: 2 where XLA unrolled it once."""
        place = _INDEX.search(counter.attributes) if counter is not None else None
        if place is None:
            return 1
        for name in one.called.get("body", ()):
            body = self.text.computations[name]
            following = body.operand(body.root, int(place[1])) if body.root else None
            if following is None or following.opcode != "add":
                continue
            for added in body.operands(following):
                if added.opcode == "constant" and added.arguments.isdigit():
                    return max(int(added.arguments), 1)
        return 1

    def _fusion(self, inside: Computation, one: Instruction) -> Module:
        # only the operands and the result of a fusion access memory
        names = one.called.get("calls", ())
        total = sum((self.computation(name) for name in names), Module())
        fused = self.text.computations[names[0]] if names else None
        if fused is None or fused.root is None:
            moved = one.memory_bytes + sum(i.memory_bytes for i in inside.operands(one))
        else:
            aliased = "output_to_operand_aliasing" in one.attributes
            moved = self._written(fused, fused.root, aliased)
            moved += sum(self._read(fused, p) for p in fused.parameters.values())
            if _scatters(fused):
                total = total.renamed("all-reduce", "reduce-scatter")
        return dataclasses.replace(total, bytes_accessed=moved)

    def _read(self, fused: Computation, value: Instruction) -> float:
        """Bytes read of a fused parameter, or of a view of it."""
        if not value.memory_bytes:
            return 0.0
        total = 0.0
        for user in fused.users[value.name]:
            places = [i for i, name in enumerate(user.operands) if name == value.name]
            if user.opcode == "bitcast":
                total += self._read(fused, user)
            elif continues(user):
                continue
            elif user.opcode == "fusion" and user.called.get("calls"):
                inner = self.text.computations[user.called["calls"][0]]
                known = [inner.parameters[i] for i in places if i in inner.parameters]
                viewed = _viewed(inner, "output_to_operand_aliasing" in user.attributes)
                total += sum(self._read(inner, p) for p in known if p is not viewed)
                if viewed in known:
                    total += self._read(fused, user)
            elif places == [0] and user.opcode in ("dynamic-slice", "slice", "gather"):
                total += user.bytes
            elif places == [0] and user.opcode in ("dynamic-update-slice", "scatter"):
                total += _target_bytes(fused, user)
            elif user.opcode not in ("tuple", "get-tuple-element"):
                return value.bytes
        return min(total, value.bytes)

    def _written(self, fused: Computation, value: Instruction, aliased: bool) -> float:
        """Bytes written by a fusion's root. `aliased`: returned parameters are not copied."""
        if value.opcode == "tuple":
            return sum(self._written(fused, leaf, aliased) for leaf in fused.operands(value))
        if continues(value) or not value.memory_bytes:
            return 0.0
        if value.opcode == "bitcast" and (source := fused.operand(value, 0)) is not None:
            return self._written(fused, source, aliased)
        if value.opcode == "parameter":
            return 0.0 if value.is_root or aliased else value.memory_bytes
        if value.opcode in ("dynamic-update-slice", "scatter"):
            return _update_bytes(fused, value)
        return value.memory_bytes


def _viewed(fused: Computation, aliased: bool) -> Instruction | None:
    """The instruction whose value a fusion returns, perhaps in another shape; `aliased`: or in
    another tiling, in place."""
    found = fused.root
    while found is not None and (found.opcode == "bitcast" or aliased and found.opcode == "copy"):
        found = fused.operand(found, 0)
    return found


def _updates(inside: Computation, one: Instruction) -> list[Instruction]:
    """The update operands of a dynamic-update-slice or a scatter.

    Their operands are (target, update, indices...) and (targets..., indices, updates...).
    """
    if one.opcode == "dynamic-update-slice":
        return inside.operands(one)[1:2]
    return inside.operands(one)[(len(one.operands) + 1) // 2 :]


def _update_bytes(inside: Computation, one: Instruction) -> float:
    return sum(i.bytes for i in _updates(inside, one))


def _target_bytes(inside: Computation, one: Instruction) -> float:
    """Bytes read of the target of an in-place update: a scatter combines, an update overwrites."""
    return _update_bytes(inside, one) if one.opcode == "scatter" else 0.0


def _bytes_accessed(inside: Computation, one: Instruction) -> float:
    """Bytes of the operands and result of an unfused instruction, or of the slices it accesses."""
    operands = inside.operands(one)
    taken = sum(i.memory_bytes for i in operands)
    if one.opcode == "custom-call" and (own := kernel_bytes(one)) is not None:
        return min(taken, own) + one.memory_bytes
    if one.opcode in ("slice-start", "dynamic-slice-start"):
        # it returns its operands with the slice, which alone is read
        read = max(one.bytes - sum(i.bytes for i in operands), 0.0) if taken else 0.0
        return read + max(one.memory_bytes - taken, 0.0)
    if one.opcode in ("dynamic-slice", "slice", "gather"):
        read = one.bytes if operands and operands[0].memory_bytes else 0.0
        return read + one.memory_bytes + sum(i.memory_bytes for i in operands[1:])
    if one.opcode in ("dynamic-update-slice", "scatter"):
        targets = 1 if one.opcode == "dynamic-update-slice" else len(one.operands) // 2
        given = sum(i.memory_bytes for i in operands[targets:])
        if not one.memory_bytes:
            return given
        return given + _update_bytes(inside, one) + _target_bytes(inside, one)
    if one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
        # the first half of an asynchronous pair returns its operands with the result
        return taken + max(one.memory_bytes - taken, 0.0)
    return taken + one.memory_bytes


def _scatters(fused: Computation) -> bool:
    """Whether a fusion sums over devices and keeps one device's shards: a TPU's reduce-scatter."""
    root = fused.root
    leaves = fused.operands(root) if root and root.opcode == "tuple" else [root]

    def is_shard(leaf: Instruction | None) -> bool:
        if leaf is None or leaf.opcode != "dynamic-slice":
            return False
        source = fused.operand(leaf, 0)
        if source is not None and source.opcode == "get-tuple-element":
            source = fused.operand(source, 0)
        return source is not None and source.opcode == "all-reduce"

    return bool(leaves) and all(map(is_shard, leaves))


def _collective(inside: Computation, one: Instruction) -> Collective:
    kind, groups = one.opcode.removesuffix("-start"), _GROUPS.search(one.attributes)
    size = sum(i.bytes for i in inside.operands(one))
    asynchronous = one.opcode.endswith("-start")
    if kind == "all-gather":
        # the first half of an asynchronous pair returns its operands with the result
        size = max(one.bytes - size, 0.0) if asynchronous else one.bytes
    asynchronous = asynchronous or is_piece(one)
    return Collective(kind, size, 1, groups[1] if groups else "", asynchronous)
