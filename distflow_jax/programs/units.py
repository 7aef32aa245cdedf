"""Numbers with units, as tables, pictures and messages print them."""

from collections.abc import Callable

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(size: float) -> str:
    """Memory, files and traffic, in powers of 1024: 1572864 -> "1.5 MiB"."""
    for unit in _UNITS:
        if abs(size) < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def in_unit_of(most: float) -> tuple[str, Callable[[float], str]]:
    """(unit, format without it) of a table's column of bytes whose largest is `most`.

    >>> unit, write = in_unit_of(5 << 30)
    >>> unit, write(1 << 29)
    ('GiB', '0.50')
    """
    unit = format_bytes(most).split()[1]
    scale = 1024 ** _UNITS.index(unit)
    return unit, lambda size: f"{size / scale:,.0f}" if unit == "B" else f"{size / scale:,.2f}"


def format_decimal(value: float, unit: str = "B") -> str:
    """Counts, FLOPs and parameters, in powers of 1000: 1234567 -> "1.23 M" without a unit."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}".strip()


def format_seconds(seconds: float) -> str:
    """7 -> "7s", 67 -> "1m07s", 3667 -> "1h01m"."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
