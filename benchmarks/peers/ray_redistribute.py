"""A single controller on Ray: collects a step's batch, balances it and dispatches it.

python benchmarks/peers/ray_redistribute.py --processes=4 --folder=DIR --json=out.json [--hosts]

The best form that Ray's object store allows: a shard of the batch is a dict of concatenated NumPy
arrays, so it is one object without pickling, which receivers read in place. The driver reads each
byte once and writes it once. Whole groups are assigned to data ranks, so an image is sent once, and
the processes of a rank get one object. With --hosts each process has an object store of its own, as
on N hosts, and moved data cross loopback; the driver uses the store of process 0. Without --hosts
all processes share one store, and nothing crosses loopback. benchmarks/coordinator.py writes the
shards into DIR, starts this program and checks its digests.

N processes (actors), R data ranks, G groups, S samples of a group.
"""

import argparse
import hashlib
import json
import os
import pathlib
import time
import zlib

import numpy as np
import ray
from ray.cluster_utils import Cluster

# by the name in a process's command line or title; the rest are helpers (log, dashboard, runtime
# environments, autoscaler), which the totals leave out
CORE = ("driver", "ray::Holder", "ray::IDLE", "raylet", "gcs_server")
TOKEN_FIELDS = ("response", "response_mask", "rollout_logp")

Shard = dict[str, np.ndarray]  # what coordinator.py's make_shard returns


@ray.remote(num_cpus=0)
class Holder:
    """One process of both stages."""

    def load(self, path: str) -> None:
        """Loads this process's shard of the source stage."""
        with np.load(path) as file:
            self._shard = dict(file)

    def collect(self, fields: list[str]) -> Shard:
        """This process's shard of the batch."""
        return {name: self._shard[name] for name in fields}

    def receive(self, shard: Shard) -> None:
        """Takes the shard for the target stage, whose arrays stay in the object store."""
        self._held = shard

    def digests(self) -> list[str]:
        """Digests of the received sequences."""
        return digests(self._held)


def digests(shard: Shard) -> list[str]:
    """As in benchmarks/coordinator.py: all fields of a sequence -> 16 hexadecimal digits."""
    ends = np.cumsum(shard["length"])
    samples = len(ends) // len(shard["prompt"])
    images = shard.get("pixel_values", np.zeros((len(shard["prompt"]), 0), np.uint8))
    checks = [zlib.crc32(np.ascontiguousarray(image)) for image in images]
    result = []
    for i, (end, length) in enumerate(zip(ends, shard["length"], strict=True)):
        whole = hashlib.blake2b(digest_size=8)
        whole.update(shard["prompt"][i // samples].tobytes())
        for name in TOKEN_FIELDS:
            whole.update(shard[name][end - length : end].tobytes())
        whole.update(shard["score"][i].tobytes())
        whole.update(checks[i // samples].to_bytes(4, "little"))
        result.append(whole.hexdigest())
    return result


# -- the driver --------------------------------------------------------------------------------


def redistribute(actors: list, fields: list[str], ranks: int) -> dict[str, int]:
    """Runs one step, from shards of N processes to shards of `ranks` data ranks; returns bytes."""
    count = len(actors)
    shards = ray.get([actor.collect.remote(fields) for actor in actors])
    targets = split(shards, assign_groups(shards, ranks))
    refs = [ray.put(shard) for shard in targets]
    ray.get([a.receive.remote(refs[i * ranks // count]) for i, a in enumerate(actors)])
    # the driver is at process 0; the processes of a rank may pass its shard on to each other
    away = [i * ranks // count for i in range(1, count)]
    return {
        "collected": sum(size(shard) for shard in shards[1:]),
        "sent": sum(size(targets[rank]) for rank in set(away)),
    }


def size(shard: Shard) -> int:
    """Bytes of the arrays."""
    return sum(array.nbytes for array in shard.values())


def assign_groups(
    shards: list[Shard], ranks: int, threshold: float = 0.03
) -> list[list[tuple[int, int]]]:
    """Groups, as (shard, group), of each rank: in order if that is balanced, else balanced."""
    groups, tokens = [], []
    for p, shard in enumerate(shards):
        per_group = shard["length"].reshape(len(shard["prompt"]), -1).sum(axis=1)
        groups += [(p, g) for g in range(len(per_group))]
        tokens += [int(n) + shard["prompt"].shape[1] for n in per_group]
    room = len(groups) // ranks
    load = np.array(tokens).reshape(ranks, room).sum(axis=1)
    if load.max() <= load.mean() * (1 + threshold):
        return [groups[r * room : (r + 1) * room] for r in range(ranks)]
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    load = np.zeros(ranks)
    for i in np.argsort(-np.array(tokens), kind="stable"):
        rank = min((r for r in range(ranks) if len(assigned[r]) < room), key=lambda r: load[r])
        assigned[rank].append(int(i))
        load[rank] += tokens[i]
    return [[groups[i] for i in sorted(mine)] for mine in assigned]


def split(shards: list[Shard], assigned: list[list[tuple[int, int]]]) -> list[Shard]:
    """The shard of each rank; writes every array once."""
    starts = [np.concatenate([[0], np.cumsum(shard["length"])]) for shard in shards]
    samples = len(shards[0]["length"]) // len(shards[0]["prompt"])
    result = []
    for mine in assigned:
        target = {}
        for name in shards[0]:
            chunks = []
            for p, g in mine:
                if name in TOKEN_FIELDS:
                    chunk = slice(starts[p][g * samples], starts[p][(g + 1) * samples])
                elif name in ("length", "score"):
                    chunk = slice(g * samples, (g + 1) * samples)
                else:
                    chunk = slice(g, g + 1)
                chunks.append(shards[p][name][chunk])
            target[name] = np.concatenate(chunks)
        result.append(target)
    return result


# -- measuring ---------------------------------------------------------------------------------


def cpu_seconds() -> dict[int, tuple[str, float]]:
    """pid -> (kind, CPU-seconds so far) of this process and its descendants."""
    me, parent, ticks = os.getpid(), {}, {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            text = pathlib.Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended in between
        parent[int(entry)], ticks[int(entry)] = int(text[1]), int(text[11]) + int(text[12])
    result = {}
    for pid in parent:
        above = pid
        while above not in (0, me):
            above = parent.get(above, 0)
        if above == me:
            result[pid] = (kind_of(pid), ticks[pid] / os.sysconf("SC_CLK_TCK"))
    return result


def kind_of(pid: int) -> str:
    """The kind of a Ray process."""
    if pid == os.getpid():
        return "driver"
    try:
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return "helper"
    name = words[0].strip().split("/")[-1].split(".")[0]
    return name if name in CORE else "helper"


def spent(before: dict[int, tuple[str, float]]) -> dict[str, float]:
    """CPU-seconds since `before`, by kind."""
    total: dict[str, float] = {}
    for pid, (kind, seconds) in cpu_seconds().items():
        since = before.get(pid, (kind, 0.0))[1]
        total[kind] = total.get(kind, 0.0) + seconds - since
    return total


def start(args: argparse.Namespace) -> Cluster:
    """Starts Ray with one object store, or one per process; process i belongs on "host{i}"."""
    hosts = [{f"host{i}": 1} for i in range(args.processes)]
    if not args.hosts:
        hosts = [{name: 1 for host in hosts for name in host}]
    head = {"object_store_memory": args.store_mib << 20, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True,
        head_node_args=head | {"num_cpus": os.cpu_count(), "resources": hosts[0]},
    )
    for host in hosts[1:]:
        cluster.add_node(
            num_cpus=1, resources=host, object_store_memory=(args.store_mib << 20) // 4
        )
    ray.init(address=cluster.address, log_to_driver=False)
    return cluster


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="cases.json, shards")
    parser.add_argument("--json", type=pathlib.Path, required=True, help="file for the result")
    parser.add_argument("--hosts", action="store_true", help="an object store for each process")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--store-mib", type=int, default=512, help="driver's object store")
    args = parser.parse_args()
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    os.environ |= {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    cluster = start(args)
    actors = [Holder.options(resources={f"host{i}": 1}).remote() for i in range(args.processes)]
    report = []
    for case in json.loads((args.folder / "cases.json").read_text()):
        ranks = args.processes // case["shared_by"]
        paths = [args.folder / f"{case['lengths']}-{i}.npz" for i in range(args.processes)]
        ray.get([a.load.remote(str(path)) for a, path in zip(actors, paths, strict=True)])
        for _ in range(args.warmup):
            redistribute(actors, case["fields"], ranks)
        cpu, walls = cpu_seconds(), [time.perf_counter()]
        for _ in range(args.repetitions):
            moved = redistribute(actors, case["fields"], ranks)
            walls.append(time.perf_counter())
        cpu = {kind: seconds / args.repetitions for kind, seconds in spent(cpu).items()}
        record = {"case": case["name"], "ranks": ranks, **moved, "cpu_by_kind_s": cpu}
        record["busiest_bytes"] = moved["collected"] + moved["sent"]
        record["cpu_s"] = sum(seconds for kind, seconds in cpu.items() if kind in CORE)
        record["wall_s"] = np.diff(walls).tolist()
        record["found"] = ray.get([actor.digests.remote() for actor in actors])
        report.append(record)
    args.json.write_text(json.dumps(report) + "\n")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
