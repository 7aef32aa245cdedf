"""Environments as the launchers give them (some variables left out), and the jobs they name."""

import dataclasses
import itertools

import pytest

from distflow_jax.cluster import job

# Four tasks on three nodes, the third task: srun --nodes=3 --ntasks=4.
SLURM_ALLOCATION = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NODELIST": "node[001-003]",
    "SLURM_NNODES": "3",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2,1(x2)",
}
SLURM_STEP = SLURM_ALLOCATION | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[001-003]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
# The shell that salloc opens on the first node, where a site has made it a step of its own.
SALLOC_SHELL = SLURM_ALLOCATION | {
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "node001",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "34.118.224.1", "HOSTNAME": "first-hosts-0-3"}
POD = KUBERNETES | {
    job.COORDINATOR: "first-hosts-0-0.first:8476",
    job.NUM_PROCESSES: "4",
    "JOB_COMPLETION_INDEX": "3",
}
TPU_POD = KUBERNETES | {
    "JOB_COMPLETION_INDEX": "1",
    "TPU_WORKER_HOSTNAMES": "first-hosts-0-0.first,first-hosts-0-1.first",
    "TPU_WORKER_ID": "1",
    "TPU_TOPOLOGY": "2x2x2",
    "TPU_ACCELERATOR_TYPE": "v5p-16",
}
SLICES = {
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "2",
    "MEGASCALE_COORDINATOR_ADDRESS": "first-hosts-0-0.first:8080",
}
NAMED = {job.COORDINATOR: "10.0.0.1:4000", job.NUM_PROCESSES: "2", job.PROCESS_ID: "1"}


@pytest.mark.parametrize(
    "environ, kind, coordinator, count, index",
    [
        ({}, "alone", None, 1, 0),
        (NAMED, "environment", "10.0.0.1:4000", 2, 1),
        (NAMED | {job.COORDINATOR: "[fd00::1]:4000"}, "environment", "[fd00::1]:4000", 2, 1),
        (POD, "kubernetes", "first-hosts-0-0.first:8476", 4, 3),
        (OPEN_MPI, "open_mpi", "10.96.0.1:62624", 2, 1),
        (SLURM_STEP, "slurm", "node001:62674", 4, 2),
        (TPU_POD, "tpu", None, 2, 1),
        (TPU_POD | SLICES, "tpu", None, 6, 5),
        (SLICES, "tpu", None, None, None),
        ({job.DISTRIBUTED: "auto"}, "auto", None, None, None),
        # alone, though within something larger
        (SLURM_ALLOCATION, "alone", None, 1, 0),
        (SALLOC_SHELL, "alone", None, 1, 0),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, "alone", None, 1, 0),
        (TPU_POD | {"TPU_WORKER_HOSTNAMES": "localhost"}, "alone", None, 1, 0),
        (KUBERNETES | {"JOB_COMPLETION_INDEX": "3"}, "alone", None, 1, 0),
        # one within the other
        (SLURM_STEP | OPEN_MPI, "open_mpi", "10.96.0.1:62624", 2, 1),
        (SLURM_STEP | NAMED, "environment", "10.0.0.1:4000", 2, 1),
        (TPU_POD | POD, "kubernetes", "first-hosts-0-0.first:8476", 4, 3),
        (SLURM_STEP | {job.DISTRIBUTED: "off"}, "alone", None, 1, 0),
        (NAMED | {job.DISTRIBUTED: "off"}, "alone", None, 1, 0),
        (SLURM_STEP | {job.DISTRIBUTED: "auto"}, "auto", None, None, None),
        # the launcher knows the numbers, the user the address
        (SLURM_STEP | {job.COORDINATOR: "ib0:7000"}, "slurm", "ib0:7000", 4, 2),
        (OPEN_MPI | {job.COORDINATOR: "ib0:7000"}, "open_mpi", "ib0:7000", 2, 1),
        (SLURM_STEP | {"JAX_COORDINATOR_PORT": "7000"}, "slurm", "node001:7000", 4, 2),
    ],
)
def test_the_job_of_an_environment(environ, kind, coordinator, count, index):
    found = job.find(environ)
    told = (found.kind, found.coordinator, found.num_processes, found.process_id)
    assert told == (kind, coordinator, count, index)


def test_flags_come_first():
    flags = {"coordinator": "host0:1", "num_processes": 3, "process_id": 0}
    for environ in ({}, NAMED, SLURM_STEP, OPEN_MPI, POD, TPU_POD):
        found = job.find(environ, **flags)
        assert found == job.Job("flags", "named by flags", "host0:1", 3, 0)


@pytest.mark.parametrize(
    "environ, line",
    [
        ({}, "job: one process, no cluster in the environment"),
        ({job.DISTRIBUTED: "off"}, "job: one process, DISTFLOW_DISTRIBUTED=off"),
        (
            KUBERNETES | {"JOB_COMPLETION_INDEX": "3"},
            "job: one process, as DISTFLOW_COORDINATOR and DISTFLOW_NUM_PROCESSES are not set "
            "with JOB_COMPLETION_INDEX",
        ),
        (SLURM_STEP, "job: process 2 of 4, found in Slurm step 1234.0, coordinator node001:62674"),
        (
            POD,
            "job: process 3 of 4, found in Kubernetes pod first-hosts-0-3, "
            "coordinator first-hosts-0-0.first:8476",
        ),
        (TPU_POD, "job: process 1 of 2, found in TPU_WORKER_HOSTNAMES, coordinator found by jax"),
        (
            {job.DISTRIBUTED: "auto"},
            "job: several processes, DISTFLOW_DISTRIBUTED=auto, coordinator found by jax",
        ),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            "job: process 1 of 2, found in Open MPI, coordinator 10.96.0.1:62624, local devices 1",
        ),
    ],
)
def test_a_job_in_words(environ, line):
    assert job.find(environ).describe() == line


@pytest.mark.parametrize(
    "nodelist, first",
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-0015],host2", "node001"),
        ("node[001,007-015],host2", "node001"),
        ("login,node[001-015]", "login"),
        ("rack[2-3]node[07,09-12]", "rack2node07"),
        ("gpu[4-5]-ib", "gpu4-ib"),
        ("node-3.cluster.example", "node-3.cluster.example"),
    ],
)
def test_the_first_host_of_a_list(nodelist, first):
    assert job.first_host(nodelist) == first


@pytest.mark.parametrize(
    "counts, expected", [("1", [1]), ("1(x3)", [1, 1, 1]), ("2(x3),1,4(x2)", [2, 2, 2, 1, 4, 4])]
)
def test_tasks_on_each_node(counts, expected):
    assert [job.tasks_on_node(counts, node) for node in range(len(expected))] == expected
    with pytest.raises(ValueError, match="SLURM_NODEID is beyond the nodes of .*="):
        job.tasks_on_node(counts, len(expected))


GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.mark.parametrize(
    "here, place, changes, devices",
    [
        (1, 0, GPUS, None),  # all: one process per host
        (1, 0, {}, None),
        (2, 1, GPUS, (2, 3)),
        (4, 1, GPUS, (1,)),
        (4, 3, {}, (3,)),
        (2, 1, {"CUDA_VISIBLE_DEVICES": "GPU-3f22"}, None),  # bound to one by the launcher
        (2, 1, GPUS | {"SLURM_GPUS_PER_TASK": "4"}, None),
        (2, 1, GPUS | {"SLURM_TRES_PER_TASK": "cpu=8,gres/gpu=4"}, None),
    ],
)
def test_processes_divide_the_devices_of_their_host(here, place, changes, devices):
    step = {
        "SLURM_STEP_TASKS_PER_NODE": f"4,{here}",
        "SLURM_STEP_NUM_TASKS": str(4 + here),
        "SLURM_LOCALID": str(place),
    }
    assert job.find(SLURM_STEP | step | changes).local_device_ids == devices


def test_mpirun_over_ipv6():
    uri = "1314521088.0;tcp6://[fe80::b9b:ac5d:9cf0:b858,2620:10d:c083:150e::3000:2]:43370"
    found = job.find(OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": uri})
    assert found.coordinator == f"[fe80::b9b:ac5d:9cf0:b858]:{61440 + 1314521088 // 4096 % 4096}"


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    "environ, message",
    [
        (without(NAMED, job.PROCESS_ID), "^DISTFLOW_PROCESS_ID must be set too: DISTFLOW_COORD"),
        ({job.COORDINATOR: "a:1"}, "^DISTFLOW_NUM_PROCESSES, DISTFLOW_PROCESS_ID must be set too"),
        (without(POD, job.COORDINATOR), "^DISTFLOW_COORDINATOR must be set too"),
        (without(POD, job.NUM_PROCESSES), "^DISTFLOW_NUM_PROCESSES, DISTFLOW_PROCESS_ID must be"),
        (NAMED | {job.PROCESS_ID: "2"}, "^DISTFLOW_PROCESS_ID=2 must be below .*PROCESSES=2"),
        (NAMED | {job.NUM_PROCESSES: "two"}, "^DISTFLOW_NUM_PROCESSES must be a whole .*'two'"),
        (NAMED | {job.PROCESS_ID: "-1"}, "^DISTFLOW_PROCESS_ID must be a whole .*'-1'"),
        (NAMED | {job.COORDINATOR: "localhost"}, "must be HOST:PORT, got 'localhost'"),
        (NAMED | {job.COORDINATOR: "http://a:1"}, "must be HOST:PORT, got 'http://a:1'"),
        (NAMED | {job.COORDINATOR: "fd00::1:4000"}, "must be HOST:PORT.*in brackets"),
        (NAMED | {job.COORDINATOR: "a:70000"}, "must be HOST:PORT"),
        (POD | {"JOB_COMPLETION_INDEX": "4"}, "^JOB_COMPLETION_INDEX=4 must be below .*=4"),
        (NAMED | {job.DISTRIBUTED: "yes"}, "DISTFLOW_DISTRIBUTED='yes' is unknown; set it to"),
        (NAMED | {job.DISTRIBUTED: "auto"}, "COORDINATOR=10.0.0.1:4000 names a job against"),
        (without(SLURM_STEP, "SLURM_PROCID"), "^SLURM_PROCID must be set too, as srun does"),
        (SLURM_STEP | {"SLURM_PROCID": "4"}, "^SLURM_PROCID=4 must be below SLURM_STEP_NUM_TASKS"),
        (SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "like '2\\(x3\\),1', got 'two'"),
        (SLURM_STEP | {"SLURM_STEP_NODELIST": ","}, "names no host"),
        (
            SLURM_STEP | {"SLURM_NODEID": "0", "CUDA_VISIBLE_DEVICES": "0,1,2"},
            "2 processes on one host cannot divide CUDA_VISIBLE_DEVICES='0,1,2'; start one process",
        ),
        (without(OPEN_MPI, "OMPI_MCA_orte_hnp_uri"), "mpirun -x DISTFLOW_COORDINATOR=HOST:PORT"),
        (without(TPU_POD, "TPU_WORKER_ID"), "^TPU_WORKER_ID must be set too, as GKE does"),
        (TPU_POD | {"TPU_WORKER_ID": "2"}, "^TPU_WORKER_ID=2 must be below the 2 hosts"),
        (without(TPU_POD | SLICES, "MEGASCALE_SLICE_ID"), "^MEGASCALE_SLICE_ID must be set too"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(environ, message):
    with pytest.raises(ValueError, match=message):
        job.find(environ)


@pytest.mark.parametrize("missing", [*itertools.combinations(range(3), 1), (0, 1), (0, 2), (1, 2)])
def test_flags_describe_a_job_together(missing):
    flags = {"coordinator": "host0:1", "num_processes": 3, "process_id": 0}
    names = list(flags)
    given = {name: flags[name] for i, name in enumerate(names) if i not in missing}
    with pytest.raises(ValueError, match=f"^--{', --'.join(names[i] for i in missing)} must be"):
        job.find(NAMED, **given)


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_flags_and_a_mode_contradict_each_other(mode):
    flags = {"coordinator": "host0:1", "num_processes": 3, "process_id": 0}
    with pytest.raises(ValueError, match=f"--coordinator=host0:1 names .*DISTRIBUTED={mode}"):
        job.find({job.DISTRIBUTED: mode}, **flags)


@pytest.mark.parametrize("environ", [SLURM_STEP, OPEN_MPI, TPU_POD, TPU_POD | SLICES])
def test_numbers_and_address_are_those_that_jax_would_find(environ, monkeypatch):
    """Its classes are private, so that this test may have to go; the port is worth the risk."""
    clusters = pytest.importorskip("jax._src.clusters")
    found = job.find(environ)
    names = {"slurm": "SlurmCluster", "open_mpi": "OmpiCluster", "tpu": "GkeTpuCluster"}
    cluster = getattr(clusters, names[found.kind])
    for name, value in ({"MEGASCALE_NUM_SLICES": "", "MEGASCALE_SLICE_ID": ""} | environ).items():
        monkeypatch.setenv(name, value)
    assert (cluster.get_process_count(), cluster.get_process_id()) == (
        found.num_processes,
        found.process_id,
    )
    if found.coordinator:
        assert cluster.get_coordinator_address(1, None) == found.coordinator


def test_a_job_is_a_value():
    found = job.find(NAMED)
    assert found == job.find(dict(NAMED)) and hash(found) == hash(job.find(NAMED))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.process_id = 0
