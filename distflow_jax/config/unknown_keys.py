"""Suggestions for unknown keys of the config: those of the same name, and of other frameworks.

other_names.toml is the table of what TRL, verl, OpenRLHF and prime-rl call our keys. It is read
when a key is unknown.
"""

import dataclasses
import functools
import importlib.resources
import itertools
import tomllib
from collections.abc import Collection, Mapping, Sequence

from distflow_jax.did_you_mean import did_you_mean, nearest

_NEAR = 0.8  # similarity above which one suggestion is enough, and a name of a table is meant
_MOST = 3  # suggestions
_COMMON = ("n", "name", "path", "len")  # last parts that do not tell keys apart


@dataclasses.dataclass(frozen=True)
class OtherName:
    """Our keys for a key of another framework, and a note on what differs."""

    keys: Sequence[str]
    note: str = ""


@functools.cache
def other_names() -> Mapping[str, OtherName]:
    """{key of another framework: our keys} of all frameworks; one name may stand for several."""
    file = importlib.resources.files("distflow_jax.config") / "other_names.toml"
    found: dict[str, OtherName] = {}
    for names in tomllib.loads(file.read_text(encoding="utf-8")).values():
        for name, value in names.items():
            given = value if isinstance(value, dict) else {"keys": value}
            keys = given.get("keys", [])
            before = found.get(name, OtherName([]))
            found[name] = OtherName(
                list(dict.fromkeys([*before.keys, *([keys] if isinstance(keys, str) else keys)])),
                before.note or given.get("note", ""),
            )
    return found


def key_hint(path: str, known: Collection[str]) -> str:
    """The keys that an unknown one, "a.b.c", may stand for, and a note; "" if nothing is near.

    Candidates are the `known` keys and those of the table. Names that agree with `path` in the most
    parts from the end win; without any, those whose last part is written almost alike.
    """
    names = dict(other_names()) | {key: OtherName([key]) for key in known}
    wanted = path.replace("-", "_")
    shared = {name: _shared_end(wanted, name) for name in names}
    most = max(shared.values(), default=0)
    meant = [name for name in names if shared[name] == most]
    if not most:
        ends = {name: name.rpartition(".")[2] for name in names}
        lasts = dict.fromkeys(end for end in ends.values() if end not in _COMMON)
        near = nearest(wanted.rpartition(".")[2], lasts, cutoff=_NEAR)
        meant = [name for name in names if ends[name] in near]
    keys = list(dict.fromkeys(key for name in meant for key in names[name].keys))
    keys = nearest(wanted, keys, cutoff=_NEAR) or keys[:_MOST]
    whole = [name for name in meant if shared[name] == name.count(".") + 1 or not keys]
    note = next(filter(None, (names[name].note for name in whole)), "")
    return " ".join(filter(None, [did_you_mean(keys, "config.{}".format), note]))


def _shared_end(first: str, second: str) -> int:
    """Parts that two keys have in common, from the end; a part that many keys have is no sign."""
    pairs = zip(reversed(first.split(".")), reversed(second.split(".")), strict=False)
    shared = [part for part, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return 0 if shared in [[part] for part in _COMMON] else len(shared)
