"""Parser of `kind:name?option=value&...`, the names of generated data."""

import urllib.parse


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """(name, options as text) of `task:arithmetic?digits=2&operators=+-`.

    Percent escapes are decoded (`%26` for &, `%3D` for =), but `+` stays a plus: it is an operator
    here, not a space as in a web form.

    Raises:
      ValueError: no name, an option without a value, or one given twice.
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
