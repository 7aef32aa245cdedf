"""Conversion between frozen dataclasses and one locked ml_collections.ConfigDict.

The dataclasses hold defaults, types and checks; the ConfigDict can be edited, printed and
overridden from the command line. This module does not depend on the config sections.
"""

import copy
import dataclasses
import json
import re
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_dict, config_flags

from distflow_jax.config.unknown_keys import key_hint
from distflow_jax.did_you_mean import did_you_mean, nearest
from distflow_jax.parsing.json_text import json_table
from distflow_jax.parsing.one_line import shown
from distflow_jax.parsing.setting_checks import check_number, check_text, check_values

T = typing.TypeVar("T")

# {key of an earlier release: its name today}
RENAMED = {
    "mesh.stage": "mesh.pipeline",
    "rollout.environment_seconds": "rollout.environment_timeout",
    "flow": "stream",
    "flow.max_lag": "stream.max_staleness",
    "flow.swap": "stream.weight_update",
    "flow.waves": "stream.partial_batches",
    "flow.wave_prompts": "stream.partial_batch_prompts",
    "flow.wave_rows": "stream.partial_batch_rows",
    "flow.starved_seconds": "stream.no_workers_seconds",
    **{
        f"flow.{key}": f"stream.{key}"
        for key in (
            *("cache", "divergence", "order", "record", "workers", "worker_nodes"),
            *("listen", "save_seconds", "lease_seconds", "max_tries"),
        )
    },
}
# keys of earlier releases that need nothing in their place
REMOVED = {
    f"{s}.{key}" for s in ("flow", "stream") for key in ("stagger", "dispatch", "round_tokens")
}
# errors that ml_collections 1.1 raises while it parses --config.KEY=VALUE: KeyError and
# AttributeError mean an unknown key
FLAG_ERRORS = (flags.Error, KeyError, AttributeError, IndexError, TypeError, ValueError)


# -- dataclass -> ConfigDict ------------------------------------------------------------------


def to_config_dict(obj: Any) -> ml_collections.ConfigDict:
    """Converts a dataclass instance, with all nested ones, to a locked ConfigDict.

    A field of type `X | None` keeps its type while it is None, so that the command line can set it.
    A `dict[str, ...]` field becomes a ConfigDict too. The command line sets it whole, with
    --config.KEY="{'a': 1}", or at keys that it has.
    """
    return _section(obj).lock()


def _section(obj: Any) -> ml_collections.ConfigDict:
    hints = typing.get_type_hints(type(obj))
    section = ml_collections.ConfigDict()
    for field in dataclasses.fields(obj):
        section[field.name] = _editable(getattr(obj, field.name), hints[field.name])
    return section


def _editable(value: Any, annotation: Any) -> Any:
    inner = _without_none(annotation)
    if dataclasses.is_dataclass(value):
        return _section(value)
    if isinstance(value, Mapping):
        element = (typing.get_args(inner) or (str, Any))[1]
        return ml_collections.ConfigDict({k: _editable(v, element) for k, v in value.items()})
    kind = _flag_type(inner)
    if isinstance(value, int) and kind is float:
        value = float(value)
    if kind is object or inner is not annotation:
        return config_dict.FieldReference(value, field_type=kind)
    return value


def _flag_type(annotation: Any) -> type:
    """The type whose flag parser parses a field; object stands for any Python literal."""
    if dataclasses.is_dataclass(annotation):
        return ml_collections.ConfigDict
    origin = typing.get_origin(annotation) or annotation
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return ml_collections.ConfigDict
    return origin if origin in (bool, int, float, str, tuple) else object


def _without_none(annotation: Any) -> Any:
    """X for `X | None`; any other annotation unchanged."""
    if _is_union(annotation):
        rest = [arg for arg in typing.get_args(annotation) if arg is not types.NoneType]
        return typing.Union[tuple(rest)]  # noqa: UP007 (the members are only known here)
    return annotation


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


# -- ConfigDict -> dataclass ------------------------------------------------------------------


def from_config_dict(
    cls: type[T], config: Mapping[str, Any] | ml_collections.ConfigDict, path: str = "config"
) -> T:
    """Converts a ConfigDict, or the parsed output of to_json, to the dataclass `cls`.

    Absent keys keep the dataclass's default. `path` is the config's name in errors.

    Raises:
      ValueError: a key is unknown, missing, of another type, or refused by the dataclass's own
        check. The message is one line with the key's full path.
    """
    return _convert(config, cls, path)


def _convert(value: Any, annotation: Any, path: str) -> Any:
    def wrong() -> ValueError:
        return ValueError(f"{path} must be {_describe(annotation)}, got {shown(value)}")

    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if _is_union(annotation):
        return _convert_union(value, annotation, path)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        if not isinstance(value, Mapping | ml_collections.ConfigDict):
            raise wrong()
        return _convert_section(value, annotation, path)
    if annotation is Any:
        check_values(value, path, of_user=True)
        return _plain(value)
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        check_number(value, path)
        value = float(value)
    if annotation in (bool, int, float, str, types.NoneType):
        if not isinstance(value, annotation) or isinstance(value, bool) != (annotation is bool):
            raise wrong()
        check_number(value, path)
        check_text(value, path)
        return value
    if (origin or annotation) is tuple:
        if not isinstance(value, tuple | list):  # JSON has no tuples
            raise wrong()
        kinds = args or (Any, ...)
        if kinds[1:] == (...,):
            kinds = (kinds[0],) * len(value)
        if len(kinds) != len(value):
            raise wrong()
        pairs = enumerate(zip(value, kinds, strict=True))
        return tuple(_convert(item, kind, f"{path}[{i}]") for i, (item, kind) in pairs)
    if isinstance(origin or annotation, type) and issubclass(origin or annotation, Mapping):
        if not isinstance(value, Mapping | ml_collections.ConfigDict):
            raise wrong()
        kind = args[1] if args else Any
        return {key: _convert(value[key], kind, f"{path}.{key}") for key in value}
    raise TypeError(f"{path}: a config dataclass cannot have a field of type {annotation!r}")


def _convert_section(section: Any, cls: type, path: str) -> Any:
    hints = typing.get_type_hints(cls)
    known = {field.name: field for field in dataclasses.fields(cls)}
    for key in section:
        if key not in known:
            raise ValueError(_unknown(f"{path}.{key}".removeprefix("config."), path, known))
    values = {}
    for name, field in known.items():
        if name in section:
            values[name] = _convert(section[name], hints[name], f"{path}.{name}")
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{path}.{name} is missing: give it {_describe(hints[name])}")
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def edited(obj: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a dataclass with values at keys that it has, {"training.steps": 5}.

    Only the sections of these keys are converted. Errors: see `from_config_dict`.
    """
    hints = typing.get_type_hints(type(obj))
    fields = {key.partition(".")[0] for key in values}
    tree = ml_collections.ConfigDict({k: _editable(getattr(obj, k), hints[k]) for k in fields})
    for key, value in values.items():
        *parents, last = key.split(".")
        section = tree
        for parent in parents:
            section = section[parent]
        with section.ignore_type():
            section[last] = value  # its type is checked below, with its path
    changed = {k: _convert(tree[k], hints[k], f"config.{k}") for k in hints if k in fields}
    return dataclasses.replace(obj, **changed)


def _former_key(path: str) -> str | None:
    """One line for a key of an earlier release, "a.b.c"; None for any other."""
    if new := RENAMED.get(path):
        return f"config.{path} was renamed to config.{new}: use that name"
    if path in REMOVED:
        return f"config.{path} was removed and needs no replacement: delete it"
    return None


def _convert_union(value: Any, annotation: Any, path: str) -> Any:
    if value is None and types.NoneType in typing.get_args(annotation):
        return None
    inner = _without_none(annotation)
    if not _is_union(inner):
        return _convert(value, inner, path)
    members = typing.get_args(inner)
    # exact types first: 3 for `float | int` is the int
    for member in sorted(members, key=lambda member: type(value) is not member):
        try:
            return _convert(value, member, path)
        except ValueError:
            continue
    raise ValueError(f"{path} must be {_describe(annotation)}, got {value!r}")


def _plain(value: Any) -> Any:
    """Converts nested ConfigDicts to dicts."""
    if isinstance(value, Mapping | ml_collections.ConfigDict):
        return {key: _plain(value[key]) for key in value}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    return value


def to_json(config: Mapping[str, Any] | ml_collections.ConfigDict) -> str:
    """Canonical JSON, for config.json and for digests: equal configs give equal text."""
    return json.dumps(_plain(config), sort_keys=True, indent=2) + "\n"


def config_table(config: Any) -> dict[str, str]:
    """{"training.optimizer.lr": "1e-06", ...}: all values of a config dataclass, as JSON: what
    processes must have alike."""
    text = to_json(to_config_dict(config))
    return json_table(text)


# -- overrides --------------------------------------------------------------------------------


def override(
    config: ml_collections.ConfigDict, assignments: Sequence[str]
) -> ml_collections.ConfigDict:
    """Returns a copy of the config with ["a.b=3", ...] set, parsed as --config.a.b=3.

    Raises ValueError with the command line's message.
    """
    for assignment in assignments:
        if "=" not in assignment:
            raise ValueError(f"write overrides as key=value, got {assignment!r}")
    argv = ["override", *(f"--config.{assignment}" for assignment in assignments)]
    values = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict(
            "config", copy.deepcopy(config), flag_values=values, sys_argv=argv
        )
        values(argv)
    except FLAG_ERRORS as error:
        raise ValueError(explain_flag_error(error, config, argv) or str(error)) from error
    return values.config


def explain_flag_error(
    error: Exception, config: ml_collections.ConfigDict, argv: Iterable[str]
) -> str | None:
    """One line for an error that config_flags raised over argv: the key and its expected type.

    None for an error that neither the flags nor a key in argv caused, which is a bug.
    """
    argv = list(argv)
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        given = re.fullmatch(r"--?(?:no)?config\.([^=]*)(=.*)?", argument, re.DOTALL)
        if not given:
            continue
        path, value = given[1], given[2][1:] if given[2] else following
        if problem := unknown_key(config, path):
            return problem
        if re.match(rf"flag --(no)?config\.{re.escape(f'{path}={value}:')}", str(error)):
            return f"config.{path} must be {_describe(_type_at(config, path))}, got {value!r}"
    return str(error) if isinstance(error, flags.Error) else None


def unknown_key(config: ml_collections.ConfigDict, path: str) -> str | None:
    """One line with the nearest key if the config has no key `path` ("a.b.c"); None if it has."""
    keys = path.split(".")
    where, section = "config", config
    for i, key in enumerate(keys):
        if not isinstance(section, ml_collections.ConfigDict):
            return f"unknown key config.{path}: {where} is {section!r} and has no keys"
        if not section:
            return f"unknown key config.{path}: {where} has no keys; set the whole dict"
        if key not in section:
            return _unknown(path, where, section, [*_keys_of(config)], keys[i + 1 :])
        where, section = f"{where}.{key}", section[key]
    return None


def _unknown(
    path: str,
    where: str,
    section: Iterable[str],
    known: Collection[str] = (),
    rest: Sequence[str] = (),
) -> str:
    """One line for the unknown key `path`, "a.b.c", of which `where` has only the keys `section`.

    `known`: all keys of the config; `rest`: parts of `path` after the one that is unknown.
    """
    if former := _former_key(path):
        return former
    section = list(section)
    name = path.split(".")[-1 - len(rest)]
    hint = key_hint(path, known)
    if not hint and (near := nearest(name, section, cutoff=0.5)):
        hint = did_you_mean([".".join([where, near[0], *rest])], str)
    listed = ", ".join(section) or "no keys"
    return f"unknown key config.{path} ({hint or f'{where} has: {listed}'})"


def _keys_of(section: ml_collections.ConfigDict, path: str = "") -> Iterator[str]:
    """The keys below a section, "a.b.c"."""
    for key, value in section.items():
        if isinstance(value, ml_collections.ConfigDict):
            yield from _keys_of(value, f"{path}{key}.")
        else:
            yield f"{path}{key}"


def _type_at(config: ml_collections.ConfigDict, path: str) -> type:
    *parents, key = path.split(".")
    for parent in parents:
        config = config[parent]
    return config.get_type(key)


# -- words ------------------------------------------------------------------------------------


_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def _describe(annotation: Any) -> str:
    """The description of a type in error messages."""
    if annotation in _WORDS:
        return _WORDS[annotation]
    if annotation is types.NoneType:
        return "None"
    if _is_union(annotation):
        return " or ".join(_describe(arg) for arg in typing.get_args(annotation))
    if dataclasses.is_dataclass(annotation):
        names = ", ".join(field.name for field in dataclasses.fields(annotation))
        return f"a section with {names}"
    origin = typing.get_origin(annotation) or annotation
    if isinstance(origin, type) and issubclass(origin, Mapping | ml_collections.ConfigDict):
        return "a dict such as \"{'a': 1}\""
    if origin is tuple:
        args = typing.get_args(annotation)
        if not args:
            return "a tuple"
        if args[1:] == (...,):
            return f"a tuple, each item {_describe(args[0])}"
        return f"a tuple of {len(args)}: {', '.join(map(_describe, args))}"
    return str(annotation)
