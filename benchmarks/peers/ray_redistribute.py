"""A single controller on Ray: collects a step's batch, balances it and dispatches it.

PYTHONPATH=benchmarks python -m peers.ray_redistribute --processes=4 [--hosts]

The best form that Ray's object store allows: a shard of the batch is a dict of concatenated NumPy
arrays, so it is one object without pickling, which receivers read in place. The driver reads each
byte once and writes it once. Whole groups are assigned to data ranks, so an image is sent once, and
the processes of a rank get one object. With --hosts each process has an object store of its own, as
on N hosts, and moved data cross loopback; the driver uses the store of process 0. Without --hosts
all processes share one store, and nothing crosses loopback. benchmarks/coordinator.py starts this
program and checks its checksums; the last line of the output is a record per case.

N processes (actors), R data ranks, G groups, S samples of a group.
"""

import argparse
import json
import os
import pathlib

import numpy as np
import ray
from peers import batches
from ray.cluster_utils import Cluster

# by the name in a process's command line or title; the rest are helpers (log, dashboard, runtime
# environments, autoscaler), which the totals leave out
CORE = ("ray::Holder", "ray::IDLE", "raylet", "gcs_server")
STORE = 512 << 20  # bytes of the driver's object store


@ray.remote(num_cpus=0)
class Holder:
    """One process of both stages."""

    def make(self, process: int, number: int) -> None:
        """Makes this process's shard of the source stage of a case."""
        self._shard = batches.make_shard(process, batches.CASES[number])

    def collect(self) -> batches.Shard:
        """This process's shard of the batch."""
        return self._shard

    def receive(self, shard: batches.Shard) -> None:
        """Takes the shard for the target stage, whose arrays stay in the object store."""
        self._held = shard

    def checksums(self) -> list[int]:
        """Checksums of the received sequences."""
        return batches.checksums(batches.sequences(self._held))


# -- the driver --------------------------------------------------------------------------------


def redistribute(actors: list, ranks: int) -> int:
    """Runs one step, from shards of N processes to shards of `ranks` data ranks; returns the bytes
    that the driver collects and sends."""
    count = len(actors)
    shards = ray.get([actor.collect.remote() for actor in actors])
    targets = split(shards, assign_groups(shards, ranks))
    refs = [ray.put(shard) for shard in targets]
    ray.get([a.receive.remote(refs[i * ranks // count]) for i, a in enumerate(actors)])
    # the driver is at process 0; the processes of a rank may pass its shard on to each other
    away = {i * ranks // count for i in range(1, count)}
    return sum(map(batches.size, shards[1:])) + sum(batches.size(targets[rank]) for rank in away)


def assign_groups(
    shards: list[batches.Shard], ranks: int, threshold: float = 0.03
) -> list[list[tuple[int, int]]]:
    """Groups, as (shard, group), of each rank: in order if that is balanced, else balanced."""
    groups = [(p, g) for p in range(len(shards)) for g in range(batches.GROUPS)]
    lengths = np.array([shard["length"] for shard in shards]).reshape(-1, batches.SAMPLES)
    tokens = lengths.sum(axis=1) + batches.PROMPT_TOKENS
    room = len(groups) // ranks
    load = tokens.reshape(ranks, room).sum(axis=1)
    if load.max() <= load.mean() * (1 + threshold):
        return [groups[r * room : (r + 1) * room] for r in range(ranks)]
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    load = np.zeros(ranks)
    for i in np.argsort(-tokens, kind="stable"):
        rank = min((r for r in range(ranks) if len(assigned[r]) < room), key=lambda r: load[r])
        assigned[rank].append(int(i))
        load[rank] += tokens[i]
    return [[groups[i] for i in sorted(mine)] for mine in assigned]


def split(
    shards: list[batches.Shard], assigned: list[list[tuple[int, int]]]
) -> list[batches.Shard]:
    """The shard of each rank; writes every array once."""
    starts = [np.concatenate([[0], np.cumsum(shard["length"])]) for shard in shards]

    def part(name: str, p: int, g: int) -> np.ndarray:
        if name in batches.OF_TOKENS:
            chosen = slice(starts[p][g * batches.SAMPLES], starts[p][(g + 1) * batches.SAMPLES])
        elif name in ("length", "score"):
            chosen = slice(g * batches.SAMPLES, (g + 1) * batches.SAMPLES)
        else:
            chosen = slice(g, g + 1)
        return shards[p][name][chosen]

    return [
        {name: np.concatenate([part(name, p, g) for p, g in mine]) for name in shards[0]}
        for mine in assigned
    ]


# -- measuring ---------------------------------------------------------------------------------


def cpu_seconds() -> dict[int, float]:
    """pid -> CPU-seconds so far of this process and its descendants, but for helpers."""
    me, parent, ticks = os.getpid(), {}, {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            text = pathlib.Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            words = pathlib.Path("/proc", entry, "cmdline").read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended in between
        parent[int(entry)] = int(text[1])
        name = words[0].strip().split("/")[-1].split(".")[0]
        if name in CORE or int(entry) == me:
            ticks[int(entry)] = int(text[11]) + int(text[12])
    result = {}
    for pid, count in ticks.items():
        above = pid
        while above not in (0, me):
            above = parent.get(above, 0)
        if above == me:
            result[pid] = count / os.sysconf("SC_CLK_TCK")
    return result


def start(count: int, hosts: bool) -> Cluster:
    """Starts Ray with one object store, or one per process; process i belongs on "host{i}"."""
    places = [{f"host{i}": 1} for i in range(count)]
    if not hosts:
        places = [{name: 1 for place in places for name in place}]
    head = {"object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True,
        head_node_args=head | {"num_cpus": os.cpu_count(), "resources": places[0]},
    )
    for place in places[1:]:
        cluster.add_node(num_cpus=1, resources=place, object_store_memory=STORE // 4)
    ray.init(address=cluster.address, log_to_driver=False)
    return cluster


def measure(actors: list, number: int, case: batches.Case) -> dict:
    """The record of a case."""
    ray.get([actor.make.remote(process, number) for process, actor in enumerate(actors)])
    ranks = len(actors) // case.shared_by
    for _ in range(batches.WARMUP):
        moved = redistribute(actors, ranks)
    before = cpu_seconds()
    seconds = batches.timed_steps(lambda: redistribute(actors, ranks))
    spent = [now - before.get(pid, 0.0) for pid, now in cpu_seconds().items()]
    found = ray.get([actor.checksums.remote() for actor in actors])
    return {
        "busiest_bytes": moved,
        "cpu_s": sum(spent) / batches.STEPS,
        "wall_s": seconds,
        "found": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--hosts", action="store_true", help="an object store for each process")
    args = parser.parse_args()
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    os.environ |= {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    cluster = start(args.processes, args.hosts)
    actors = [Holder.options(resources={f"host{i}": 1}).remote() for i in range(args.processes)]
    records = [measure(actors, number, case) for number, case in enumerate(batches.CASES)]
    print(json.dumps(records), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
