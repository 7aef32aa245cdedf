"""Numbers with units."""

import pytest

from distflow_jax.programs.units import format_bytes, format_decimal


@pytest.mark.parametrize(
    ("size", "text"),
    [(12, "12 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5120.0 GiB")],
)
def test_memory_is_in_powers_of_1024(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (999_600, "1 MB"), (2e9, "2 GB"), (5e15, "5 PB")],
)
def test_traffic_is_in_powers_of_1000(size, text):
    assert format_decimal(size) == text


def test_counts_have_a_prefix_and_no_unit():
    assert [format_decimal(n, "") for n in (512, 134_515_008)] == ["512", "135 M"]
