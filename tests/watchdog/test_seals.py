"""Seals: datagrams of the job's processes are opened once, all others never."""

import random

import pytest

from distflow_jax.watchdog.seals import SEAL_BYTES, WINDOW, Opener, Sealer

KEY = b"a1b2"


def test_what_is_sealed_is_opened_once():
    sealer, opener = Sealer(KEY, 1, 0), Opener(KEY, 0, 2)
    for body in (b"", b"first", bytes(1300)):
        sealed = sealer.seal(body)
        assert len(sealed) == len(body) + SEAL_BYTES and KEY not in sealed
        assert opener.open(sealed) == body
        assert opener.open(sealed) is None


def test_no_changed_bit_is_believed():
    sealed = Sealer(KEY, 1, 0).seal(b"body")
    for bit in range(8 * len(sealed)):
        damaged = bytearray(sealed)
        damaged[bit // 8] ^= 1 << bit % 8
        assert Opener(KEY, 0, 2).open(bytes(damaged)) is None
    for length in range(len(sealed)):
        assert Opener(KEY, 0, 2).open(sealed[:length]) is None


@pytest.mark.parametrize(("key", "index"), [(b"other", 1), (KEY, 0), (KEY, 2)])
def test_strangers_and_ones_own_echo_are_not_believed(key, index):
    assert Opener(KEY, 0, 2).open(Sealer(key, index, 5).seal(b"x")) is None


def test_a_reordered_network_delivers_everything_once():
    draw, sealer, opener = random.Random(0), Sealer(KEY, 1, 0), Opener(KEY, 0, 2)
    bodies = [b"%d" % i for i in range(3000)]
    sent = [sealer.seal(body) for body in bodies]
    late = sorted(range(len(sent)), key=lambda i: i + draw.randrange(WINDOW // 2))
    copies = [i for i in late for _ in range(2)]
    opened = [body for i in copies if (body := opener.open(sent[i])) is not None]
    assert opened == [bodies[i] for i in late]


def test_what_is_older_than_the_window_is_a_replay():
    sealer, opener = Sealer(KEY, 1, 0), Opener(KEY, 0, 2)
    sent = [sealer.seal(b"%d" % i) for i in range(WINDOW + 1)]
    assert opener.open(sent[-1]) and opener.open(sent[0]) is None and opener.open(sent[1])


def test_a_later_watchdog_of_the_process_is_believed_and_the_earlier_one_no_more():
    opener, first, second = Opener(KEY, 0, 2), Sealer(KEY, 1, 0), Sealer(KEY, 1, 1)
    unheard = [first.seal(b"old") for _ in range(10)]
    assert opener.open(unheard.pop()) and opener.open(second.seal(b"new")) == b"new"
    assert not any(map(opener.open, unheard))
