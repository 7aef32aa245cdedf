"""Cost of redistributing a step's batch from one stage to the next over N processes.

python benchmarks/coordinator.py --processes 2 4 8 16 --peer-python=/tmp/ray_venv/bin/python

Compares our Coordinator, in N real processes over loopback, with a single controller on Ray's
object store (peers/ray_redistribute.py), on the same batches (peers/batches.py). In the cases
"kept" the target stage has as many data ranks as there are processes, with about as many tokens on
each. In "changed" it has half as many, each shared by two processes, and lengths are unbalanced, so
that data must move. A step ends when every process has all columns of the sequences that it needs
on the host. The received data are checked in full on both sides.

Our bytes are those of each process's TCP connections as counted by the kernel, in and out. The
bytes of the peer's driver are the sizes of the arrays that it collects from and sends to processes
other than the one next to it, each counted once. CPU-seconds are those of all processes. Each
process of the peer has an object store of its own, as on N hosts; "one store": all share one.
"""

import argparse
import json
import os
import pathlib
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from command_line import header, parser_of, row
from peers import batches
from peers.paced import peer_command
from programs import finished

from distflow_jax.batch import Prompt
from distflow_jax.cluster import job, processes
from distflow_jax.cluster.host_exchange import Traffic
from distflow_jax.coordinator.assignment import PackingPlan
from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.coordinator.first_fit import RowLimits, rows_bound
from distflow_jax.data.step_columns import loader_columns
from distflow_jax.layout import Layout
from distflow_jax.parallel.mesh import MeshSizes, role_mesh

LIMITS = RowLimits(tokens=4096, sequences=batches.SEQUENCES, shared=True)
HOST = Layout("host")
# the nodes that write the columns
SOURCES: dict[str, str | None] = {
    "prompt": None,
    "response": "rollout",
    "response_mask": "rollout",
    "rollout_logp": "rollout",
    "score": "reward",
    "pixel_values": None,
}
TITLES = ("case", "N", "busiest MB, ours", "busiest MB, driver", "ratio", "payload / fair share",
          "padding MB", "agreement MB", "CPU-s, ours", "CPU-s, peer", "one store", "wall s, ours",
          "wall s, peer", "one store")  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--peer-python", default="", help="interpreter that has ray")
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if any(n < 2 or n % 2 for n in args.processes):
        parser.error(f"--processes must be even and at least 2, got {args.processes}")
    return args


# -- one of our processes ----------------------------------------------------------------------


class Stages:
    """The two stages of a case in one process.

    Attributes:
      received: columns of the last step, a list for each field.
      traffic: of all steps so far.
    """

    def __init__(self, case: batches.Case):
        me, count = processes.process_index(), processes.process_count()
        shard = batches.make_shard(me, case)
        self._columns, self.traffic = batches.sequences(shard), Traffic()
        self._prompts = [
            Prompt(n, n, tokens, "", "benchmark", None, {})
            for n, tokens in enumerate(shard["prompt"], me * batches.GROUPS)
        ]
        sizes = MeshSizes(count // case.shared_by, case.shared_by)
        self._layout = sizes.layout
        longest = batches.PROMPT_TOKENS + batches.MAX_RESPONSE
        room = -(-rows_bound(count * batches.SEQUENCES, longest, LIMITS) // sizes.fsdp)
        values = {(SOURCES[name], name) for name in case.fields}
        self._coordinator = Coordinator(
            PackingPlan(LIMITS, 1, count * batches.GROUPS, {self._layout: room}, self._layout),
            {self._layout: role_mesh(sizes)},
            {None: HOST, "rollout": HOST, "reward": HOST},
            {self._layout: values},
        )

    def step(self) -> None:
        """Puts the columns of the source stage, and gets those that the target stage needs."""
        coordinator, self.received = self._coordinator, {}
        coordinator.begin(loader_columns(self._prompts, batches.SAMPLES))
        for name, column in self._columns.items():
            if name != "prompt":
                coordinator.put(SOURCES[name], name, column)
        for name in self._columns:
            self.received[name] = coordinator.entries(SOURCES[name], name, self._layout)
        self.traffic = sum(coordinator.traffic.values(), self.traffic)


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


def measure(case: batches.Case) -> dict[str, Any]:
    """The record of a case on one process; numbers are per step."""
    stages = Stages(case)
    for _ in range(batches.WARMUP):
        stages.step()
    processes.barrier("start")
    tcp, cpu, stages.traffic = tcp_bytes(), time.process_time(), Traffic()
    seconds = batches.timed_steps(stages.step)
    processes.barrier("end")
    cpu, tcp = time.process_time() - cpu, tcp_bytes() - tcp
    own = stages.received["prompt"]  # Prompts where they have not moved
    stages.received["prompt"] = [getattr(prompt, "tokens", prompt) for prompt in own]
    return {
        "cpu_s": cpu / batches.STEPS,
        "wall_s": seconds,
        "sent": int(tcp[0]) / batches.STEPS,
        "received": int(tcp[1]) / batches.STEPS,
        "payload": stages.traffic.payload / batches.STEPS,
        "padding": stages.traffic.padding / batches.STEPS,
        "found": batches.checksums(stages.received),
    }


def work(folder: pathlib.Path) -> None:
    """Runs all cases as one of N processes; writes P.json."""
    processes.initialize(job.find(os.environ))
    records = [measure(case) for case in batches.CASES]
    (folder / f"{processes.process_index()}.json").write_text(json.dumps(records))
    processes.shutdown()


# -- both sides --------------------------------------------------------------------------------


def run_ours(count: int) -> Iterator[dict[str, Any]]:
    """Starts N processes; yields a record per case over all processes."""
    launch = [sys.executable, "scripts/launch_local.py", f"--processes={count}"]
    with tempfile.TemporaryDirectory() as folder:
        finished([*launch, "--", __file__, f"--folder={folder}"])
        files = [pathlib.Path(folder, f"{process}.json") for process in range(count)]
        by_process = [json.loads(file.read_text()) for file in files]
    for mine in zip(*by_process, strict=True):
        yield {
            "busiest_bytes": max(r["sent"] + r["received"] for r in mine),
            "payload": max(r["payload"] for r in mine),
            "padding": max(r["padding"] for r in mine),
            "agreeing": max(r["received"] - r["payload"] - r["padding"] for r in mine),
            "cpu_s": sum(r["cpu_s"] for r in mine),
            "wall_s": np.max([r["wall_s"] for r in mine], axis=0).tolist(),
            "found": [r["found"] for r in mine],
        }


def check(case: batches.Case, found: Sequence[list[int]]) -> None:
    """Raises RuntimeError unless each sequence arrived complete at all processes of one data rank;
    `found`: checksums by process."""
    ranks = [found[i : i + case.shared_by] for i in range(0, len(found), case.shared_by)]
    if any(one != copies[0] for copies in ranks for one in copies):
        raise RuntimeError(f"{case.name}: processes of one rank hold different data")
    shards = [batches.make_shard(process, case) for process in range(len(found))]
    sent = sorted(one for shard in shards for one in batches.checksums(batches.sequences(shard)))
    if sorted(one for copies in ranks for one in copies[0]) != sent:
        raise RuntimeError(f"{case.name}: sequences are lost, damaged or unknown")


# -- results -----------------------------------------------------------------------------------


def line(case: batches.Case, count: int, sides: dict[str, dict[str, Any]]) -> str:
    """A row of the table."""
    ours, peer, one = (sides.get(side) for side in ("ours", "peer", "one_store"))
    fair = sum(batches.size(batches.make_shard(process, case)) for process in range(count))
    fair -= count * 4 * batches.SEQUENCES  # ours has no column of lengths
    cells = [case.name, count, f"{ours['busiest_bytes'] / 1e6:.3f}", "", ""]
    if peer:
        ratio = peer["busiest_bytes"] / ours["busiest_bytes"]
        cells[3:] = [f"{peer['busiest_bytes'] / 1e6:.3f}", f"{ratio:.1f}"]
    cells.append(f"{ours['payload'] / (fair / (count // case.shared_by)):.2f}")
    cells += [f"{ours[name] / 1e6:.3f}" for name in ("padding", "agreeing")]
    all_sides = (ours, peer, one)
    cells += [f"{side['cpu_s']:.3f}" if side else "" for side in all_sides]
    cells += [f"{np.median(side['wall_s']):.3f}" if side else "" for side in all_sides]
    return row(*cells)


def main() -> None:
    args = parse_arguments()
    if args.folder is not None:
        work(args.folder)
        return
    found: dict[batches.Case, list[str]] = {case: [] for case in batches.CASES}
    for count in args.processes:
        sides = {"ours": list(run_ours(count))}
        if args.peer_python:
            command = peer_command(args.peer_python, "ray_redistribute")
            command.append(f"--processes={count}")
            for side, flags in (("peer", ["--hosts"]), ("one_store", [])):
                sides[side] = json.loads(finished(command + flags)[-1])
        for i, case in enumerate(batches.CASES):
            of_case = {side: records[i] for side, records in sides.items()}
            for record in of_case.values():
                check(case, record["found"])
            found[case].append(line(case, count, of_case))
        print(f"N={count} done", file=sys.stderr, flush=True)
    print(header(*TITLES))
    for lines in found.values():
        print("\n".join(lines))


if __name__ == "__main__":
    main()
