"""The hosts that a cluster starts of a submission: [(host, variables, command)].

To the variables of the submission come those that the cluster sets on each host.
"""

from distflow_jax.cluster import job
from distflow_jax.commands.launch import gke, gke_workers, hosts, skypilot, slurm, tpu_vm


def launched(launcher, arguments):
    """The trainers' hosts, then the workers'."""
    options = launcher.parse_arguments(arguments)
    trainers, workers = HOSTS[launcher](options)
    command = [options.python, *options.command]
    found = [(name, variables, command) for name, variables in trainers]
    return found + [(name, own, [options.python, *options.worker]) for name, own in workers]


def _gke(options):
    count, shared, found = gke.num_hosts(options), gke.environment(options), []
    for part in range(options.slices):
        names = [gke.pod(options, part, index) for index in range(count)]
        for index, name in enumerate(names):
            added = {"JOB_COMPLETION_INDEX": str(index)}
            if options.tpu:
                added["TPU_WORKER_HOSTNAMES"] = ",".join(names) if count > 1 else "localhost"
                added["TPU_WORKER_ID"] = str(index)
            if options.slices > 1:
                added["MEGASCALE_COORDINATOR_ADDRESS"] = gke.pod(options, 0, 0)
                added["MEGASCALE_NUM_SLICES"] = str(options.slices)
                added["MEGASCALE_SLICE_ID"] = str(part)
            found.append((name, shared | added))
    own = gke_workers.worker_group(options)["env"] if options.workers else {}
    workers = [
        (f"{options.name}-workers-{i}", own | {"JOB_COMPLETION_INDEX": str(i)})
        for i in range(options.workers)
    ]
    return found, workers


def _slurm(options):
    count = options.nodes
    step = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_STEP_NODELIST": f"node[0-{count - 1}]" if count > 1 else "node0",
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{count})" if count > 1 else "1",
        "SLURM_LOCALID": "0",
    } | hosts.variables(options.env)
    nodes = [
        (f"node{i}", step | {"SLURM_PROCID": str(i), "SLURM_NODEID": str(i)}) for i in range(count)
    ]
    own = slurm.own_variables(options)
    return nodes, [
        (f"worker{i}", own | {"SLURM_ARRAY_TASK_ID": str(i)}) for i in range(options.workers)
    ]


def _skypilot(options):
    own, places = hosts.variables(options.env), [{"DISTFLOW_DISTRIBUTED": "off"}]
    if options.nodes > 1:
        shared = {
            "DISTFLOW_COORDINATOR": f"node0:{job.COORDINATOR_PORT}",
            "DISTFLOW_NUM_PROCESSES": str(options.nodes),
        }
        places = [shared | {"DISTFLOW_PROCESS_ID": str(i)} for i in range(options.nodes)]
    return [(f"node{i}", own | place) for i, place in enumerate(places)], []


def _tpu_vm(options):
    count = tpu_vm.tpu(options.accelerator_type).hosts
    return [(f"worker {i}", tpu_vm.environment(options)) for i in range(count)], []


HOSTS = {gke: _gke, slurm: _slurm, skypilot: _skypilot, tpu_vm: _tpu_vm}
