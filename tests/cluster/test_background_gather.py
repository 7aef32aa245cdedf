"""Values are gathered while each process goes on; one that ends leaves nobody waiting."""

import pytest
from support.gathers import exchanges, together
from support.waiting import HANG

from distflow_jax.cluster.background_gather import BackgroundGather


@pytest.fixture
def gathers():
    """gathers(count): those of a job, of threads that stand for processes."""
    made = []

    def make(count):
        ends = exchanges(count)
        made.extend(together(count, lambda i: BackgroundGather(ends[i])))
        return made

    yield make
    for gather in made:
        gather.close()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_values_come_in_order_to_every_process(gathers, count):
    members = gathers(count)
    for round_ in range(3):
        # the last process begins when the others have long gone on
        told = [member.begin({"of": [i, round_]}) for i, member in enumerate(members[:-1])]
        assert not any(future.done() for future in told)
        told.append(members[-1].begin({"of": [count - 1, round_]}))
        for future in told:
            values = future.result(timeout=HANG)
            assert values == [{"of": [i, round_]} for i in range(count)]


def test_a_process_that_ends_leaves_no_gather_waiting(gathers):
    first, second, third = gathers(3)
    waiting = []
    for member, ends in ((first, first), (second, None), (third, third)):
        waiting.append(member.begin(1))
        if ends is not None:  # a gather under way ends with an error, and so do the others'
            ends.close()
    for future in waiting:
        with pytest.raises(ConnectionError):
            future.result(timeout=HANG)


def test_a_process_alone_has_its_value_at_once():
    gather = BackgroundGather(None)
    assert gather.begin((1, [2.5, "a"])).result() == [[1, [2.5, "a"]]]
    gather.close()
