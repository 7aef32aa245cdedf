"""Cost of redistributing a step's batch from one stage to the next over N processes.

python benchmarks/coordinator.py --processes 2 4 8 16 --peer-python=/tmp/ray_venv/bin/python

Compares our Coordinator, in N real processes over loopback, with a single controller on Ray's
object store (peers/ray_redistribute.py), on the same batches: 64 sequences per process (8 prompts
of 128 tokens x 8 samples, heavy-tailed responses of up to 1,024), alone or with one image per
prompt. In the cases "kept" the target stage has as many data ranks as there are processes, with
about as many tokens on each. In "changed" it has half as many, each shared by two processes, and
lengths are unbalanced, so that data must move. A step ends when every process has all columns of
the sequences that it needs on the host. The received data are checked in full on both sides.

Our bytes are those of each process's TCP connections as counted by the kernel, in and out, all
overhead included. The bytes of the peer's driver are the sizes of the arrays that it collects from
and sends to processes other than the one next to it, each counted once. CPU-seconds are those of
all processes. Each process of the peer has an object store of its own, as on N hosts, so that bytes
cross loopback on both sides; "one store" is the cost if all share one store, as N processes of a
single host do.

Exits with 1 if a goal is missed. Goals: at the largest N our busiest process moves at most 1/7 of
the driver's bytes, its bytes of the batch do not grow with N, and we use no more CPU-seconds than
the peer. Our bytes include those exchanged for agreement (12 bytes per sequence), which grow with
N.

G groups, S samples of each, T tokens of all responses together; all of one process.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import socket
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.cluster import job, processes
from distflow_jax.cluster.host_exchange import Traffic
from distflow_jax.coordinator.assignment import PackingPlan
from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.coordinator.first_fit import RowLimits, rows_bound
from distflow_jax.data.step_columns import loader_columns
from distflow_jax.layout import Layout
from distflow_jax.parallel.mesh import MeshSizes, ranks_of_process, role_mesh

ROOT = pathlib.Path(__file__).parents[1]
PEER = pathlib.Path(__file__).parent / "peers" / "ray_redistribute.py"
GROUPS, SAMPLES, PROMPT_TOKENS, MAX_RESPONSE = 8, 8, 128, 1024
SEQUENCES = GROUPS * SAMPLES
LIMITS = RowLimits(tokens=4096, sequences=SEQUENCES, shared=True)
HOST = Layout("host")
# columns of the batch and the nodes that wrote them
SOURCES: dict[str, str | None] = {
    "prompt": None,
    "response": "rollout",
    "response_mask": "rollout",
    "rollout_logp": "rollout",
    "score": "reward",
    "pixel_values": None,
}
TEXT = tuple(SOURCES)[:-1]
FEWER_BYTES = 7.0  # goal, at the largest N
STEADY = 1.5  # goal: the largest ratio, largest N to smallest, that counts as not growing
NOTHING = 1000  # bytes: error of the counters in a step that moves nothing

Shard = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """The columns that move, and how the two stages divide them."""

    name: str
    fields: tuple[str, ...]
    lengths: str  # "even": about as many tokens at each process; "skewed": unbalanced
    shared_by: int  # processes to a data rank of the target stage


CASES = (
    Case("text, kept", TEXT, "even", 1),
    Case("text, changed", TEXT, "skewed", 2),
    Case("image, kept", tuple(SOURCES), "even", 1),
    Case("image, changed", tuple(SOURCES), "skewed", 2),
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--peer-python", default="", help="interpreter that has ray")
    parser.add_argument("--image", type=int, default=224, help="pixels along each side")
    parser.add_argument("--image-dtype", choices=("uint8", "float32"), default="uint8")
    parser.add_argument("--repetitions", type=int, default=10, help="measured steps per case")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path, help="file for the result")
    parser.add_argument("--folder", type=pathlib.Path, help="of one of the processes (internal)")
    args = parser.parse_args()
    if any(n < 2 or n % 2 for n in args.processes):
        parser.error(f"--processes must be even and at least 2, got {args.processes}")
    return args


# -- the batch ---------------------------------------------------------------------------------


def make_shard(process: int, lengths: str, args: argparse.Namespace) -> Shard:
    """The samples of one process: [G, ...] per prompt, [G S] per sequence, [T] per token."""
    rng = np.random.default_rng((args.seed, process, lengths == "even"))
    if lengths == "even":  # the quantiles of the distribution, a little off
        size = np.exp(np.sort(np.random.default_rng(args.seed).normal(5.3, 0.9, SEQUENCES)))
        size = rng.permutation(size * rng.uniform(0.98, 1.02, SEQUENCES))
    else:  # all responses to a hard prompt are long
        size = np.exp(np.repeat(rng.normal(5.3, 0.6, GROUPS), SAMPLES) + rng.normal(0, 0.6, 64))
    length = np.clip(size, 4, MAX_RESPONSE).astype(np.int32)
    tokens = int(length.sum())
    image = rng.integers(0, 256, (GROUPS, args.image, args.image, 3), np.uint8)
    return {
        "prompt": rng.integers(0, 32000, (GROUPS, PROMPT_TOKENS), np.int32),
        "length": length,
        "response": rng.integers(0, 32000, tokens, np.int32),
        "response_mask": rng.random(tokens) < 0.95,
        "rollout_logp": -rng.exponential(1.0, tokens).astype(np.float32),
        "score": rng.random(SEQUENCES).astype(np.float32),
        "pixel_values": image if args.image_dtype == "uint8" else image.astype(np.float32),
    }


def columns(shard: Shard) -> dict[str, Any]:
    """The shard as columns, one entry per sequence; an image is one object for its whole group."""
    cuts = np.cumsum(shard["length"])[:-1]
    whole = ("response", "response_mask", "rollout_logp")
    result: dict[str, Any] = {name: np.split(shard[name], cuts) for name in whole}
    images = list(shard["pixel_values"])
    result["pixel_values"] = [image for image in images for _ in range(SAMPLES)]
    return result | {"score": shard["score"]}


def digests(fields: Sequence[str], entries: dict[str, Sequence[Any]]) -> list[str]:
    """All fields of each sequence -> 16 hexadecimal digits."""
    result = []
    checks: dict[int, int] = {0: zlib.crc32(b"")}
    images = entries.get("pixel_values", [None] * len(entries["response"]))
    for i, image in enumerate(images):
        whole = hashlib.blake2b(digest_size=8)
        for name in TEXT:
            whole.update(np.ascontiguousarray(_array(entries[name][i])).tobytes())
        key = 0 if image is None else id(image)
        if key not in checks:
            checks[key] = zlib.crc32(np.ascontiguousarray(image))
        whole.update(checks[key].to_bytes(4, "little"))
        result.append(whole.hexdigest())
    assert set(entries) == set(fields)
    return result


def _array(entry: Any) -> np.ndarray:
    return entry.tokens if isinstance(entry, Prompt) else entry


def write_batches(folder: pathlib.Path, args: argparse.Namespace) -> dict[str, list[list[str]]]:
    """Writes cases.json and the shards. Returns the digests by case and process."""
    expected: dict[str, list[list[str]]] = {case.name: [] for case in CASES}
    for process in range(max(args.processes)):
        for lengths in ("even", "skewed"):
            shard = make_shard(process, lengths, args)
            np.savez(folder / f"{lengths}-{process}.npz", **shard)
            entries = columns(shard) | {"prompt": np.repeat(shard["prompt"], SAMPLES, axis=0)}
            for case in CASES:
                if case.lengths == lengths:
                    chosen = {name: entries[name] for name in case.fields}
                    expected[case.name].append(digests(case.fields, chosen))
    # the peer has lengths as a column; ours follow from the responses
    cases = [dataclasses.asdict(case) | {"fields": [*case.fields, "length"]} for case in CASES]
    (folder / "cases.json").write_text(json.dumps(cases))
    return expected


def batch_bytes(folder: pathlib.Path, case: Case, count: int) -> int:
    """Bytes of the columns; data that samples share count once."""
    total = 0
    for process in range(count):
        with np.load(folder / f"{case.lengths}-{process}.npz") as shard:
            total += sum(shard[name].nbytes for name in case.fields)
    return total


# -- one of our processes ----------------------------------------------------------------------


class Stages:
    """The two stages of a case in one process."""

    def __init__(self, case: Case, shard: Shard):
        self._case, self._columns, self.agreeing = case, columns(shard), Spent()
        me, count = processes.process_index(), processes.process_count()
        numbers = range(me * GROUPS, (me + 1) * GROUPS)
        self._prompts = [
            Prompt(n, n, tokens, "", "benchmark", None, {})
            for n, tokens in zip(numbers, shard["prompt"], strict=True)
        ]
        sizes = MeshSizes(count // case.shared_by, case.shared_by)
        self.layout, self.ranks = sizes.layout, sizes.fsdp
        longest = PROMPT_TOKENS + MAX_RESPONSE
        room = -(-rows_bound(count * SEQUENCES, longest, LIMITS) // sizes.fsdp)
        values = {(SOURCES[name], name) for name in case.fields}
        self.coordinator = Coordinator(
            PackingPlan(LIMITS, 1, count * GROUPS, {self.layout: room}, self.layout),
            {self.layout: role_mesh(sizes)},
            {None: HOST, "rollout": HOST, "reward": HOST},
            {self.layout: values},
        )

    def step(self) -> dict[str, list[Any]]:
        """Puts the columns of the source stage, and gets those that the target stage needs."""
        coordinator = self.coordinator
        coordinator.begin(loader_columns(self._prompts, SAMPLES))
        for name in self._case.fields:
            if name != "prompt":
                coordinator.put(SOURCES[name], name, self._columns[name])
        with self.agreeing:
            shares = coordinator.shares
            shares.anything_moves(self.layout)
        return {
            name: coordinator.entries(SOURCES[name], name, self.layout)
            for name in self._case.fields
        }


class Spent:
    """CPU-seconds of this process within the blocks it guards."""

    def __init__(self):
        self.cpu = 0.0

    def __enter__(self) -> "Spent":
        self._start = time.process_time()
        return self

    def __exit__(self, *_) -> None:
        self.cpu += time.process_time() - self._start


def tcp_bytes() -> np.ndarray:
    """[sent, received] bytes of this process's open TCP connections, as counted by the kernel."""
    total = np.zeros(2, np.int64)
    for number in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(number)))
        except OSError:  # closed in between
            continue
        with copy:
            if copy.type == socket.SOCK_STREAM and copy.family != socket.AF_UNIX:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                # tcpi_bytes_acked, tcpi_bytes_received (linux/tcp.h)
                total += struct.unpack_from("=QQ", info, 120)
    return total


def measure(stages: Stages, args: argparse.Namespace) -> dict[str, Any]:
    """The record of a case on one process; numbers are per step."""
    n = args.repetitions
    for _ in range(args.warmup):
        stages.step()
    stages.agreeing = Spent()
    processes.barrier("start")
    tcp, walls, traffic = tcp_bytes(), [time.perf_counter()], Traffic()
    with Spent() as all_steps:
        for _ in range(n):
            entries = stages.step()
            traffic = sum(stages.coordinator.traffic.values(), traffic)
            walls.append(time.perf_counter())
        processes.barrier("end")
    tcp = tcp_bytes() - tcp
    me = processes.process_index()
    return {
        "rank": ranks_of_process(stages.ranks, processes.process_count(), me)[0],
        "cpu_s": all_steps.cpu / n,
        "agreeing_cpu_s": stages.agreeing.cpu / n,
        "wall_s": np.diff(walls).tolist(),
        "sent": int(tcp[0]) / n,
        "received": int(tcp[1]) / n,
        "payload": traffic.payload / n,
        "padding": traffic.padding / n,
        "found": digests(tuple(entries), entries),
    }


def work(args: argparse.Namespace) -> None:
    """Runs all cases as one of N processes; writes ours-N-P.json."""
    processes.initialize(job.find(os.environ))
    me, count = processes.process_index(), processes.process_count()
    records = []
    for case in CASES:
        with np.load(args.folder / f"{case.lengths}-{me}.npz") as shard:
            stages = Stages(case, dict(shard))
        records.append(measure(stages, args))
    (args.folder / f"ours-{count}-{me}.json").write_text(json.dumps(records))
    processes.shutdown()


# -- both sides --------------------------------------------------------------------------------


def run_ours(count: int, folder: pathlib.Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts N processes; returns a record per case over all processes."""
    flags = [f"--repetitions={args.repetitions}", f"--warmup={args.warmup}", f"--folder={folder}"]
    command = [sys.executable, str(ROOT / "scripts" / "launch_local.py"), f"--processes={count}"]
    _run([*command, "--", __file__, *flags])
    files = [folder / f"ours-{count}-{me}.json" for me in range(count)]
    records = []
    by_process = [json.loads(file.read_text()) for file in files]
    for case, *mine in zip(CASES, *by_process, strict=True):
        ranks = count // case.shared_by
        walls = np.max([record["wall_s"] for record in mine], axis=0)
        found = [record.pop("found") for record in mine]
        records.append(
            {
                "case": case.name,
                "ranks": ranks,
                "busiest_bytes": max(r["sent"] + r["received"] for r in mine),
                # agreement is symmetric: every process sends its lengths to all others
                "busiest_batch_bytes": max(
                    r["sent"] - r["received"] + 2 * (r["payload"] + r["padding"]) for r in mine
                ),
                "most_payload": max(r["payload"] for r in mine),
                "most_padding": max(r["padding"] for r in mine),
                "most_agreeing": max(r["received"] - r["payload"] - r["padding"] for r in mine),
                "fair_share": batch_bytes(folder, case, count) / ranks,
                "cpu_s": sum(r["cpu_s"] for r in mine),
                "wall_s": walls.tolist(),
                "found": found,
                "processes": mine,
            }
        )
    return records


def run_peer(
    count: int, folder: pathlib.Path, args: argparse.Namespace, *more: str
) -> list[dict[str, Any]]:
    """Starts the driver and its N actors, with additional flags; returns its record per case."""
    out = folder / f"peer-{count}.json"
    flags = [f"--repetitions={args.repetitions}", f"--warmup={args.warmup}", f"--folder={folder}"]
    _run([args.peer_python, str(PEER), f"--processes={count}", f"--json={out}", *flags, *more])
    return json.loads(out.read_text())


def _run(command: list[str]) -> None:
    """Runs a program. RuntimeError with the end of its output if it fails."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout[-6000:]}")


def check(record: dict[str, Any], expected: Sequence[Sequence[str]]) -> None:
    """Raises RuntimeError unless each sequence arrived complete at all processes of one data rank.

    Removes the digests from the record.
    """
    found, ranks = record.pop("found"), record["ranks"]
    held = []
    for rank in range(ranks):
        first, last = (len(found) * (rank + i) // ranks for i in range(2))
        copies = [sorted(digests) for digests in found[first:last]]
        if any(copy != copies[0] for copy in copies):
            raise RuntimeError(f"{record['case']}: processes of rank {rank} hold different data")
        held += copies[0]
    wanted = sorted(digest for shard in expected[: len(found)] for digest in shard)
    if sorted(held) != wanted:
        lost, extra = set(wanted) - set(held), set(held) - set(wanted)
        raise RuntimeError(
            f"{record['case']}: of {len(wanted)} sequences {len(held)} came, {len(lost)} are lost "
            f"or damaged, {len(extra)} unknown"
        )


# -- results -----------------------------------------------------------------------------------

HEADER = "case|N|busiest MB, ours|busiest MB, driver|ratio|payload / fair share|padding MB"
HEADER += "|agreement MB|CPU-s, ours|CPU-s, peer|one store|wall s, ours|wall s, peer|one store"


def table(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of Markdown: a row per case and N."""
    yield f"|{HEADER}|\n" + "|---" * (1 + HEADER.count("|")) + "|"
    for result in sorted(results, key=lambda r: [c.name for c in CASES].index(r["case"])):
        ours, peer, one = (result.get(side) for side in ("ours", "peer", "one_store"))
        cells = [result["case"], str(result["processes"]), _megabytes(ours["busiest_bytes"])]
        cells += [_megabytes(peer["busiest_bytes"]), f"{_ratio(result):.1f}"] if peer else ["", ""]
        cells.append(f"{ours['most_payload'] / ours['fair_share']:.2f}")
        cells += [_megabytes(ours["most_padding"]), _megabytes(ours["most_agreeing"])]
        cells += [f"{side['cpu_s']:.3f}" if side else "" for side in (ours, peer, one)]
        cells += [f"{np.median(side['wall_s']):.3f}" if side else "" for side in (ours, peer, one)]
        yield "| " + " | ".join(cells) + " |"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.3f}"


def _ratio(result: dict[str, Any]) -> float:
    return result["peer"]["busiest_bytes"] / result["ours"]["busiest_bytes"]


def goals(results: Sequence[dict[str, Any]]) -> Iterator[tuple[bool, str]]:
    """(met, line) of each goal of each case, from the smallest and the largest N."""
    for case in CASES:
        mine = sorted((r for r in results if r["case"] == case.name), key=lambda r: r["processes"])
        few, many = mine[0], mine[-1]
        before, after = (r["ours"]["busiest_batch_bytes"] for r in (few, many))
        line = (
            f"{case.name}: N={few['processes']} to {many['processes']}: batch through our busiest "
            f"process {_megabytes(before)} -> {_megabytes(after)} MB, at most {STEADY}x"
        )
        if "peer" in many:
            driver = [r["peer"]["busiest_bytes"] for r in (few, many)]
            line += f"; driver {driver[1] / driver[0]:.1f}x"
        yield after <= STEADY * max(before, NOTHING), line
        if "peer" not in many:
            continue
        yield (
            _ratio(many) >= FEWER_BYTES,
            f"{case.name}: {_ratio(many):.1f}x fewer bytes at N={many['processes']}, "
            f"at least {FEWER_BYTES:g}x",
        )
        ours, peer, one = (many[side]["cpu_s"] for side in ("ours", "peer", "one_store"))
        yield (
            ours <= peer,
            f"{case.name}: {ours:.3f} CPU-s at N={many['processes']}, at most {peer:.3f} "
            f"(one store: {one:.3f})",
        )


def main() -> int:
    args = parse_arguments()
    if args.folder is not None:
        work(args)
        return 0
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        expected = write_batches(folder, args)
        for count in args.processes:
            sides = {"ours": run_ours(count, folder, args)}
            if args.peer_python:
                sides["peer"] = run_peer(count, folder, args, "--hosts")
                sides["one_store"] = run_peer(count, folder, args)
            for i, case in enumerate(CASES):
                result = {side: records[i] for side, records in sides.items()}
                for record in result.values():
                    check(record, expected[case.name])
                results.append({"case": case.name, "processes": count, **result})
            print(f"N={count} done", file=sys.stderr, flush=True)
    print("\n".join(table(results)))
    decisions = list(goals(results))
    for met, line in decisions:
        print(f"{'met   ' if met else 'MISSED'} {line}")
    if args.json:
        settings = {k: v for k, v in vars(args).items() if k not in ("json", "folder")}
        args.json.write_text(json.dumps({"args": settings, "results": results}, indent=1) + "\n")
    return 0 if all(met for met, _ in decisions) else 1


if __name__ == "__main__":
    sys.exit(main())
