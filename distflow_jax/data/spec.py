"""The `kind:name?option=value&...` strings that name generated data."""

import urllib.parse


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """`task:arithmetic?digits=2&operators=+-` -> name and options, which stay text.

    Percent escapes are decoded (`%26` for &, `%3D` for =), but `+` stays a plus: it is an operator
    here, and not the space that it is in a web form.
    """
    _, _, rest = spec.partition(":")
    name, _, query = rest.partition("?")
    if not name:
        raise ValueError(f"{spec!r} has no name after the colon")
    options: dict[str, str] = {}
    for item in filter(None, query.split("&")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{spec!r}: option {item!r} has no value; write {item}=VALUE")
        if key in options:
            raise ValueError(f"{spec!r}: option {key!r} is given twice")
        options[key] = urllib.parse.unquote(value)
    return name, options
