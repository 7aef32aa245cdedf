"""Redaction of secrets in commands and settings, which a report shows to others.

A value is a secret if its name is, or ends with, `token`, `secret`, `password` or `api_key`; in an
address, what stands before @.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "..."
_WORD = r"(?:token|secret|password|api_?key)"
_NAME = re.compile(rf"(?:^|.*[^a-z0-9]){_WORD}", re.IGNORECASE | re.DOTALL)
_FLAG = re.compile(rf"(-[^=]*[._-]{_WORD}=).*", re.IGNORECASE | re.DOTALL)
# 'api_key': 'x', "token": "x", TOKEN=x; brackets after a name hide all that follows
_PAIR = re.compile(
    rf"""((?:^|[^a-z0-9]){_WORD}\\*['"]?\s*[:=]\s*)"""
    r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[\[{(\\].*|[^\s,}\])&]+)""",
    re.IGNORECASE | re.DOTALL,
)
_LOGIN = re.compile(r"://[^/\s]*@")


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command without the values of secrets."""
    found, secret = [], False
    for argument in arguments:
        found.append(HIDDEN if secret else _FLAG.sub(rf"\1{HIDDEN}", redacted_text(argument)))
        flag = argument.startswith("-") and "=" not in argument
        secret = flag and is_secret(argument)
    return found


def redacted(name: str, value: Any) -> Any:
    """The value of a setting, a JSON value, without secrets. `name` may be dotted."""
    if is_secret(name) and value not in (None, ""):
        return HIDDEN
    if isinstance(value, str):
        return redacted_text(value)
    if isinstance(value, Mapping):
        return {key: redacted(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted("", item) for item in value]
    return value


def redacted_text(text: str) -> str:
    """A text without the secrets in pairs of name and value, and without logins in addresses."""
    return _LOGIN.sub(f"://{HIDDEN}@", _PAIR.sub(rf"\1{HIDDEN}", text))


def is_secret(name: str) -> bool:
    """Whether a name is that of a secret."""
    return _NAME.fullmatch(name) is not None
