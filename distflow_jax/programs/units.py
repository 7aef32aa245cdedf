"""Numbers with units, as tables, pictures and messages print them."""


def format_bytes(size: float) -> str:
    """Memory, in powers of 1024: 1572864 -> "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def format_decimal(value: float, unit: str = "B") -> str:
    """Traffic, files and counts, in powers of 1000: 1234567 -> "1.23 MB"."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}".strip()
