"""Work that a compiled schedule puts beside each asynchronous collective of a computation.

A module's instructions are printed in the order in which a device runs them. What stands between
the start of a collective and its end runs while data are under way.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from distflow_jax.programs.hlo_text import Computation, HloText, Instruction

# An asynchronous collective of a TPU is spread over several fusions: the one that starts it (-1),
# others that continue it next to work of their own, and the one that waits for its end.
_ASYNC_FUSION = re.compile(r'"async_collective_fusion_config":\{"flag_start":"(-?\d+)"')
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_DONE = '"AsyncCollectiveDone"'
_PASSED_ON = ("get-tuple-element", "bitcast")


class Beside(NamedTuple):
    """Work of a device meanwhile."""

    flops: float = 0.0  # of matrix products
    bytes: float = 0.0  # of main memory, read and written

    def plus(self, other: "Beside", share: float) -> "Beside":
        """The sum with a share of other work."""
        return Beside(self.flops + share * other.flops, self.bytes + share * other.bytes)


NOTHING = Beside()


def is_piece(one: Instruction) -> bool:
    """Whether it is a collective in the form of several fusions."""
    return _ASYNC_FUSION.search(one.attributes) is not None


def continues(one: Instruction) -> bool:
    """Whether it continues or ends a collective that was started by another instruction."""
    fusion = _ASYNC_FUSION.search(one.attributes)
    return _DONE in one.attributes or (fusion is not None and fusion[1] != "-1")


def work_beside(
    text: HloText, inside: Computation, started: Mapping[str, float], work: Mapping[str, Beside]
) -> dict[str, Beside]:
    """The work beside each collective, by the name of the instruction that starts it.

    Beside a start and a done that is everything between them, beside a collective in several
    fusions what is in the fusions that continue it. Work beside several collectives is divided
    among them by their bytes.

    Args:
      text: the module of `inside`.
      inside: the computation.
      started: bytes that the asynchronous collectives of an instruction send, by its name.
      work: of each instruction, by its name.
    """
    found = dict.fromkeys(started, NOTHING)
    channels: dict[str, frozenset[str]] = {}  # of collectives under way; (): start and done
    for one in inside.instructions.values():
        own, ends = _channels(text, one)
        if one.name in started:
            channels[one.name] = own
        elif one.opcode.endswith("-done"):
            channels.pop(_start_of(inside, one), None)
        elif ends:
            channels = {name: of for name, of in channels.items() if not of & own}
        elif one.name in work:
            beside = [name for name, of in channels.items() if not of or of & own]
            size = sum(started[name] for name in beside)
            for name in beside:
                found[name] = found[name].plus(work[one.name], started[name] / size)
    return found


def _channels(text: HloText, one: Instruction) -> tuple[frozenset[str], bool]:
    """The channels of the pieces of collectives in a fusion, and whether it waits for their end."""
    if one.opcode != "fusion" or not one.called.get("calls"):
        return frozenset(), False
    fused = text.computations[one.called["calls"][0]].instructions.values()
    named = (_CHANNEL.search(piece.attributes) for piece in fused if is_piece(piece))
    ends = any(_DONE in piece.attributes for piece in fused)
    return frozenset(channel[1] for channel in named if channel), ends


def _start_of(inside: Computation, one: Instruction) -> str:
    """The name of the instruction that a done ends."""
    source = inside.operand(one, 0)
    while source is not None and (source.opcode in _PASSED_ON or source.opcode.endswith("-update")):
        source = inside.operand(source, 0)
    return source.name if source is not None else ""
