"""Processes find each other, exchange host data, and refuse to run with different configs or code.

Nightly: the tasks of a Slurm step find each other and form one job; a stranger that joins as one of
them harms nobody.
"""

import contextlib
import ipaddress
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from support.paths import ROOT
from support.programs import finished
from support.waiting import HANG, until

from configs import tiny
from distflow_jax.cluster import job, processes
from distflow_jax.config.config_dict import config_table, from_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.dag.graph import Graph, Node
from distflow_jax.dag.planner import plan
from distflow_jax.layout import Layout

# Each of two processes runs this; what it prints is compared below.
JOB = """
import os, shutil, signal, sys
report = open(f"{sys.argv[1]}.{os.environ['DISTFLOW_PROCESS_ID']}", "w")

def say(*words):
    # Not to stdout: lines of the runtime's own threads would come between.
    print(*words, file=report, flush=True)

signal.signal(signal.SIGTERM, lambda number, frame: say("handler"))
from distflow_jax.cluster import processes
from distflow_jax.cluster import job
processes.initialize(job.find(os.environ))
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from distflow_jax.checkpoint.checkpointer import Checkpointer, CheckpointConfig

me = processes.process_index()
say("devices", jax.local_device_count(), jax.device_count())
big = 2**53 + 1 + me
say("gathered", processes.all_gather_ints(np.array([[big, -me]])).tolist())
say("empty", processes.all_gather_ints(np.zeros((0, 2), np.int32)).shape)
say("texts", processes.all_gather_text("ü" * 3 * me))
say("brought", *map(len, processes.gather_text("ü" * (9_000_000 * me + 1))))
same = {"config": {"seed": "0"}, "versions": processes.version_table()}
processes.check_agreement(same | {"code": processes.code_table()})
try:
    theirs = {"run.py": "a", "new.py": "b"} if me else {"run.py": "a"}
    config = {"seed": "0", "training.optimizer.lr": f"{me + 1}e-05"}
    processes.check_agreement(same | {"config": config, "code": theirs})
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
    launch = ("scripts/launch_local.py", "--processes=2", "--devices_per_process=4", "--")
    result = finished(*launch, script, folder)
    for me in (0, 1):
        lines = pathlib.Path(f"{folder}.{me}").read_text().splitlines()
        for expected in [
            "devices 4 8",
            f"gathered [[[{2**53 + 1}, 0]], [[{2**53 + 2}, -1]]]",
            "empty (2, 0, 2)",
            "texts ['', 'üüü']",
            "differ processes differ in code new.py: process 0 has none, process 1 has b; config "
            "training.optimizer.lr: process 0 has 1e-05, process 1 has 2e-05. Start all of them "
            "with the same config, code and packages",
            "handler",
            "latest 2",
            "restored 2 {'step': 2} [True, True, True, True]",
            "again 4",
        ]:
            assert expected in lines, (me, result.stdout)
        # larger than any socket's buffer; to process 0 alone
        assert ("brought" if me else "brought 1 9000001") in lines
    for step in (3, 4):
        assert f"checkpoint {step} in" in result.stdout
        assert (folder / f"{step}.unreadable").exists()


# Two tasks of a Slurm step on this machine, each with devices of its own.
STEP = """
import os, sys
from distflow_jax.cluster import job, processes
found = job.find(os.environ)
processes.initialize(found)
import jax, numpy as np
told = f"{found.describe()} {jax.local_device_count()} {jax.device_count()}"
told += f"\\n{processes.all_gather_ints(np.array(processes.process_index())).tolist()}"
# in one write, on lines of its own: the runtime's threads write to the same pipe
os.write(1, f"\\n{told}\\n".encode())
processes.shutdown()
"""


@pytest.mark.slow  # seconds alone, minutes at times behind hundreds of others
@pytest.mark.multiprocess
def test_tasks_of_a_slurm_step_find_each_other():
    step = {
        "SLURM_JOB_ID": "1234",
        "SLURM_STEP_ID": "7",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",  # as on two nodes: all devices of each
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "64",  # the allocation's: what jax itself would read
        "JAX_COORDINATOR_PORT": str(free_port()),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=3",
        "JAX_PLATFORMS": "cpu",
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", STEP],
            env=os.environ | step | {"SLURM_PROCID": str(i), "SLURM_NODEID": str(i)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    for i, task in enumerate(tasks):
        output, _ = task.communicate(timeout=HANG)
        assert task.returncode == 0
        where = f"coordinator localhost:{step['JAX_COORDINATOR_PORT']}"
        told = f"job: process {i} of 2, found in Slurm step 1234.7, {where} 3 6"
        assert {told, "[0, 1]"} <= set(output.splitlines())  # among lines of the runtime


# A member of a job that is healthy until the file "end" is there.
MEMBER = """
import os, pathlib, sys, time
from distflow_jax.cluster import job, processes
folder, me = pathlib.Path(sys.argv[1]), os.environ["DISTFLOW_PROCESS_ID"]
processes.initialize(job.find(os.environ))
processes.all_gather_text("there")
(folder / f"there.{me}").touch()
while "end" not in processes.all_gather_text("end" if (folder / "end").exists() else ""):
    time.sleep(0.05)
processes.shutdown()
(folder / f"healthy.{me}").touch()
"""
# JAX itself, as anybody who reaches the port can run it.
STRANGER = """
import os, jax
jax.config.update("jax_enable_preemption_service", False)
jax.distributed.initialize(
    os.environ["DISTFLOW_COORDINATOR"], 2, 1, cluster_detection_method="deactivate",
    initialization_timeout=5,
)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_stranger_that_joins_as_process_1_harms_nobody(tmp_path):
    """Neither through JAX nor through this package; and nothing listens on other interfaces."""
    environment = os.environ | {
        "DISTFLOW_COORDINATOR": f"127.0.0.1:{free_port()}",
        "DISTFLOW_NUM_PROCESSES": "2",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }

    def start(code, index):
        return subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            env=environment | {"DISTFLOW_PROCESS_ID": str(index)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    members = [start(MEMBER, index) for index in range(2)]
    try:

        def are_there():
            assert all(m.poll() is None for m in members)
            return len(list(tmp_path.glob("there.*"))) == 2

        until(are_there, pause=0.05)
        assert {address for m in members for address in listening(m.pid)} == {"127.0.0.1"}
        second, stranger = start(MEMBER, 1), start(STRANGER, 1)
        output, _ = second.communicate(timeout=HANG)
        assert second.returncode == 1
        where = f"host {socket.gethostname()}, pid {members[1].pid}"
        assert f"process 1 of this job is running already ({where})" in output.splitlines()[-1]
        stranger.communicate(timeout=HANG)
        assert stranger.returncode != 0
        (tmp_path / "end").touch()
        outputs = [member.communicate(timeout=HANG)[0] for member in members]
        assert [member.returncode for member in members] == [0, 0], outputs
        assert len(list(tmp_path.glob("healthy.*"))) == 2
        assert f"process 1 (host {socket.gethostname()}, pid {second.pid}) is refused" in outputs[0]
    finally:
        for process in members:
            process.kill()
            process.wait()
            process.stdout.close()


def listening(pid):
    """Addresses on which a process listens for TCP, by /proc; "127.0.0.1" in IPv6's form too."""
    inodes = set()
    for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(link))
    found = []
    for name in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A" and f"socket:[{line.split()[9]}]" in inodes:
                words = bytes.fromhex(local.split(":")[0])  # of four bytes, each little-endian
                raw = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                address = ipaddress.ip_address(raw)
                found.append(str(getattr(address, "ipv4_mapped", None) or address))
    return found


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_one_process_needs_no_job():
    processes.initialize(job.find({}))
    processes.initialize(job.find({job.DISTRIBUTED: "off", job.COORDINATOR: "nowhere:1"}))
    assert (processes.process_index(), processes.process_count()) == (0, 1)
    array = np.array([2**62, -1])
    np.testing.assert_array_equal(processes.all_gather_ints(array), array[None])
    assert processes.all_gather_text("ü") == ["ü"]
    processes.check_agreement({"config": {"lr": "1"}})
    processes.shutdown()


def test_a_cluster_that_jax_does_not_find_is_an_error_with_a_way_out():
    code = "from distflow_jax.cluster import job, processes\nprocesses.initialize(job.find({!r}))"
    done = finished("-c", code.format({job.DISTRIBUTED: "auto"}), codes=(1,))
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ValueError: jax finds no cluster (job: several processes, DISTFLOW_")
    assert "--coordinator, --num_processes and --process_id" in last


def differ(*tables):
    return processes.describe_differences("config", tables)


@pytest.mark.parametrize(
    "tables, line",
    [
        ([{"lr": "1"}] * 3, ""),
        ([{"lr": "1"}, {"lr": "2"}], "config lr: process 0 has 1, process 1 has 2"),
        (
            [{"a": "1"}] * 7 + [{"a": "2"}, {"a": "1"}],
            "config a: processes 0-6, 8 have 1, process 7 has 2",
        ),
        (
            [{"a": "1", "b": "0"}, {"b": "0"}, {"a": "1", "b": "3"}],
            "config a: processes 0, 2 have 1, process 1 has none; "
            "config b: processes 0-1 have 0, process 2 has 3",
        ),
        (
            [{"host": str(i)} for i in range(64)],
            "config host: process 0 has 0, process 1 has 1, process 2 has 2, process 3 has 3, "
            "processes 4-63 have other values",
        ),
        (
            [{f"k{i}": "1" for i in range(9)}, {}],
            "; ".join(f"config k{i}: process 0 has 1, process 1 has none" for i in range(5))
            + "; config and 4 more",
        ),
        (
            [{"p": "x" * 80 + "1" + "y" * 80}, {"p": "x" * 80 + "2"}, {"p": "short"}],
            f"config p: process 0 has {'x' * 60}..., process 1 has {'x' * 60}..., process 2 has "
            "short",
        ),
        (
            [{"p": "x" * 80 + "1" + "y" * 80}, {"p": "x" * 80 + "2"}],
            f"config p: process 0 has ...{'x' * 20}1{'y' * 39}..., process 1 has ...{'x' * 20}2",
        ),
    ],
)
def test_differences_name_keys_values_and_processes(tables, line):
    assert differ(*tables) == line


def test_code_table_names_files_and_sees_their_content(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a.py").write_text("x = 1\n")
    (tmp_path / "notes.txt").write_text("not code")
    first = processes.code_table(tmp_path)
    assert list(first) == ["part/a.py"]
    os.rename(tmp_path / "part" / "a.py", tmp_path / "part" / "b.py")
    assert processes.code_table(tmp_path) == {"part/b.py": first["part/a.py"]}
    (tmp_path / "part" / "b.py").write_text("x = 2\n")
    assert processes.code_table(tmp_path) != {"part/b.py": first["part/a.py"]}
    assert processes.code_table() == processes.code_table(ROOT / "distflow_jax")
    assert "cluster/processes.py" in processes.code_table()


def test_version_table_names_what_is_installed():
    versions = processes.version_table()
    assert versions["jax"] == jax.__version__ and versions["numpy"] == np.__version__
    assert set(versions) == {"python", *processes.PACKAGES}


def test_tables_of_a_run_name_its_keys():
    config = from_config_dict(Config, tiny.get_config())
    table = config_table(config)
    assert table["training.optimizer.lr"] == "0.001"
    assert table["reward.kwargs.pattern"] == '".*[0-9].*"'
    graph = Graph("two", (Node("a", "ACTOR", "COMPUTE", writes=("x",)),))
    first, second = (
        plan(graph, {"ACTOR": layout}, {}).table()
        for layout in (Layout("host"), Layout("mesh", (("fsdp", 4),)))
    )
    assert processes.describe_differences("plan", [first, second]).startswith("plan a.layout.axes:")
