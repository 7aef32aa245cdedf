import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from distflow_jax.parallel import processes

ROOT = pathlib.Path(__file__).parents[2]

# Each of two processes runs this; what it prints is compared below.
JOB = """
import os, shutil, signal, sys
report = open(f"{sys.argv[1]}.{os.environ['DISTFLOW_PROCESS_ID']}", "w")

def say(*words):
    # Not to stdout: lines of the runtime's own threads would come between.
    print(*words, file=report, flush=True)

signal.signal(signal.SIGTERM, lambda number, frame: say("handler"))
from distflow_jax.parallel import processes
processes.initialize_from_env()
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from distflow_jax.checkpoint.checkpointer import Checkpointer, CheckpointConfig

me = processes.process_index()
say("devices", jax.local_device_count(), jax.device_count())
big = 2**53 + 1 + me
say("gathered", processes.all_gather_ints(np.array([[big, -me]])).tolist())
say("empty", processes.all_gather_ints(np.zeros((0, 2), np.int32)).shape)
say("texts", processes.all_gather_text("ü" * 3 * me))
processes.check_agreement({"config": "same", "plan": "same"})
try:
    processes.check_agreement({"config": "same", "plan": f"plan of {me}", "code": "same"})
except ValueError as error:
    say("differ", error)
os.kill(os.getpid(), signal.SIGTERM)

mesh = Mesh(np.array(jax.devices()), ("fsdp",))
sharding = NamedSharding(mesh, P("fsdp"))
table = np.random.default_rng(0).normal(size=32_000).astype(np.float32)
def tree(scale):
    return {"w": jax.make_array_from_callback(table.shape, sharding, lambda i: scale * table[i])}

folder = sys.argv[1]
checkpointer = Checkpointer(folder, CheckpointConfig())
for step in (1, 2):
    checkpointer.save(step, tree(step), {"step": step})
checkpointer.wait()
say("latest", checkpointer.latest())
if me == 0:
    for step, size in (("3", 1), ("4", None)):
        shutil.copytree(f"{folder}/2", f"{folder}/{step}")
        data = os.scandir(f"{folder}/{step}/arrays/ocdbt.process_1/d")
        largest = max(data, key=lambda file: file.stat().st_size)
        if size:
            os.truncate(largest.path, size)
        else:  # damage that only the process which reads these values meets
            open(largest.path, "r+b").write(bytes(largest.stat().st_size))
processes.all_gather_text("damaged")
abstract = {"w": jax.ShapeDtypeStruct(table.shape, np.float32, sharding=sharding)}
step, restored, info = checkpointer.restore(None, abstract)
same = [np.array_equal(s.data, 2 * table[s.index]) for s in restored["w"].addressable_shards]
say("restored", step, info, same)
checkpointer.save(4, tree(1), {})
checkpointer.wait()
say("again", checkpointer.latest())
checkpointer.close()
processes.shutdown()
"""


@pytest.mark.multiprocess
def test_two_processes_agree_gather_and_share_a_checkpoint(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    folder = tmp_path / "checkpoints"
    result = subprocess.run(
        [sys.executable, "scripts/launch_local.py", "--processes=2", "--devices_per_process=4"]
        + ["--", str(script), str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for me in (0, 1):
        lines = pathlib.Path(f"{folder}.{me}").read_text().splitlines()
        for expected in [
            "devices 4 8",
            f"gathered [[[{2**53 + 1}, 0]], [[{2**53 + 2}, -1]]]",
            "empty (2, 0, 2)",
            "texts ['', 'üüü']",
            "differ processes differ in plan: process 0 has plan of 0, process 1 has plan of 1. "
            "Start all of them with the same config and the same code",
            "handler",
            "latest 2",
            "restored 2 {'step': 2} [True, True, True, True]",
            "again 4",
        ]:
            assert expected in lines, (me, result.stdout)
    for step in (3, 4):
        assert f"checkpoint {step} in" in result.stdout
        assert (folder / f"{step}.unreadable").exists()


def test_one_process_needs_no_job():
    processes.initialize_from_env({})
    assert (processes.process_index(), processes.process_count()) == (0, 1)
    array = np.array([2**62, -1])
    np.testing.assert_array_equal(processes.all_gather_ints(array), array[None])
    assert processes.all_gather_text("ü") == ["ü"]
    processes.check_agreement({"config": "abc"})
    processes.shutdown()


JOB_ENVIRONMENT = {
    processes.COORDINATOR: "127.0.0.1:4000",
    processes.NUM_PROCESSES: "2",
    processes.PROCESS_ID: "1",
}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({processes.PROCESS_ID: ""}, "DISTFLOW_PROCESS_ID must be set too"),
        ({processes.PROCESS_ID: "2"}, "DISTFLOW_PROCESS_ID=2 must be below .*=2"),
        ({processes.NUM_PROCESSES: "two"}, "DISTFLOW_NUM_PROCESSES must be a whole .*'two'"),
        ({processes.COORDINATOR: "localhost"}, "must be host:port, got 'localhost'"),
        ({processes.DISTRIBUTED: "yes"}, "DISTFLOW_DISTRIBUTED='yes'"),
    ],
)
def test_a_job_that_is_not_fully_named_is_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        processes.initialize_from_env(JOB_ENVIRONMENT | changes)


def test_code_digest_sees_names_and_contents(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a.py").write_text("x = 1\n")
    (tmp_path / "notes.txt").write_text("not code")
    first = processes.code_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("changed")
    assert processes.code_digest(tmp_path) == first
    os.rename(tmp_path / "part" / "a.py", tmp_path / "part" / "b.py")
    renamed = processes.code_digest(tmp_path)
    (tmp_path / "part" / "b.py").write_text("x = 2\n")
    assert len({first, renamed, processes.code_digest(tmp_path)}) == 3
    assert processes.code_digest() == processes.code_digest(ROOT / "distflow_jax")
