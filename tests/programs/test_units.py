"""Numbers with units."""

import pytest

from distflow_jax.programs.units import format_bytes, format_decimal, format_seconds, in_unit_of


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (12, "12 B"),
        (1536, "1.5 KiB"),
        (3 << 20, "3.0 MiB"),
        (5 << 40, "5.0 TiB"),
        (6 << 50, "6144.0 TiB"),
    ],
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


def test_a_column_of_bytes_has_the_unit_of_its_largest():
    unit, write = in_unit_of(3 << 30)
    assert (unit, write(3 << 30), write(1 << 20), write(5 << 40)) == (
        "GiB",
        "3.00",
        "0.00",
        "5,120.00",
    )
    unit, write = in_unit_of(100)
    assert (unit, write(7)) == ("B", "7")


def test_seconds():
    assert [format_seconds(s) for s in (0.2, 7, 59.7, 67, 3599.6, 3667, 90000)] == [
        "0s",
        "7s",
        "1m00s",
        "1m07s",
        "1h00m",
        "1h01m",
        "25h00m",
    ]
