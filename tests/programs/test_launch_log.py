"""The log of launches: the programs of a process in their order, while a log is open."""

from distflow_jax.programs.launch_log import launch_log, launched


def test_launches_are_written_in_their_order_while_a_log_is_open(tmp_path):
    path = tmp_path / "launches" / "0.txt"
    launched("before")
    with launch_log(path):
        launched("actor_train")
        assert path.read_text() == "actor_train\n"  # at once: a process that hangs has written it
        launched("weight sync")
    launched("between")
    with launch_log(path):  # a run that goes on
        launched("actor_train")
    launched("after")
    assert path.read_text().splitlines() == ["actor_train", "weight sync", "actor_train"]


def test_without_a_path_nothing_is_written(tmp_path):
    with launch_log(None):
        launched("actor_train")
    assert not list(tmp_path.iterdir())
