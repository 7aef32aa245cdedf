"""TransferQueue: groups put, claimed by a second task, read and freed, by many clients.

python benchmarks/peers/queue_peer.py --clients=4 --seconds=10 --shape="1 x 4,000"
python benchmarks/peers/queue_peer.py --mixing

Its controller and its storage units are processes; they speak ZMQ and need no cluster of Ray's, so
the classes below Ray's decorator are used. With --defaults they are as its config.yaml has them,
else as few as this machine has cores for, and the controller answers at once where no group is
there (polling_mode). Clients are threads of up to 16 processes, each with a
client object of its own. benchmarks/queues.py starts this program, and says what a group is. The
last line of the output has [_, CPU-seconds, peak GiB] of the servers, the controller first, and
[seconds of cycles, CPU-seconds, peak GiB] of the processes of clients.

With --mixing it shows what its sampler of groups (GRPOGroupNSampler) takes for a group: samples
that follow each other. Two prompts have four samples each, and the last two of the first and the
first two of the second are ready. The last line has the prompt of each sample that a task gets.
"""

import argparse
import contextlib
import json
import multiprocessing
import threading
import time
from typing import Any

import numpy as np
import torch
from groups import SHAPES, Shape
from paced import peak_resident_gb
from tensordict import TensorDict
from transfer_queue.client import TransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.sampler import GRPOGroupNSampler
from transfer_queue.storage.simple_storage import SimpleStorageUnit

MOST_PROCESSES = 16
UNITS, DEFAULT_UNITS = 1, 2
PARTITION, TASK, FIELDS = "train", "update", ["tokens", "logp"]
OF_PROMPT = 4  # samples, with --mixing
WARM_SECONDS = 1.0


def server(pipe: Any, kind: str, units: int = DEFAULT_UNITS, polling: bool = True) -> None:
    """The controller or one of the storage units; sends where it listens, then its CPU-seconds."""
    if kind in ("controller", "groups"):
        sampler = {"sampler": GRPOGroupNSampler(OF_PROMPT)} if kind == "groups" else {}
        made = TransferQueueController.__ray_metadata__.modified_class(
            polling_mode=polling, **sampler
        )
    else:
        made = SimpleStorageUnit.__ray_metadata__.modified_class({"num_data_storage_units": units})
    pipe.send((getattr(made, "storage_unit_id", kind), made.get_zmq_server_info()))
    with contextlib.suppress(EOFError):  # until the process is killed
        pipe.recv()
        cpu = time.process_time()
        pipe.recv()
        pipe.send([0, time.process_time() - cpu, peak_resident_gb()])
        pipe.recv()


def group(draw: np.random.Generator, shape: Shape) -> TensorDict:
    """The responses of one group."""
    sizes = shape.lengths(draw)
    tokens = [torch.from_numpy(draw.integers(0, 50_000, n).astype(np.int32)) for n in sizes]
    logp = [torch.from_numpy(-draw.random(n, np.float32)) for n in sizes]
    fields = {
        "tokens": torch.nested.as_nested_tensor(tokens, layout=torch.jagged),
        "logp": torch.nested.as_nested_tensor(logp, layout=torch.jagged),
    }
    return TensorDict(fields, batch_size=shape.samples)


def run_clients(
    pipe: Any, controller: Any, units: dict[str, Any], numbers: list[int], shape: Shape
) -> None:
    """Puts and takes groups until the pipe says stop."""
    torch.set_num_threads(1)
    cycles: list[tuple[float, float]] = []
    over = threading.Event()

    def client(number: int) -> None:
        draw = np.random.default_rng(number)
        bodies = [group(draw, shape) for _ in range(16)]
        own = TransferQueueClient(f"client {number}", controller)
        own.initialize_storage_manager("SimpleStorage", {"zmq_info": units})
        turn = 0
        while not over.is_set():
            began = time.monotonic()
            own.put(bodies[turn % len(bodies)], partition_id=PARTITION)
            turn += 1
            meta = None
            while not over.is_set():
                meta = own.get_meta(FIELDS, shape.samples, PARTITION, task_name=TASK)
                if meta.size:
                    break
            if meta is not None and meta.size:
                float(own.get_data(meta)["logp"][-1][-1])
                own.clear_samples(meta)
                cycles.append((time.monotonic(), time.monotonic() - began))

    for number in numbers:
        threading.Thread(target=client, args=(number,), daemon=True).start()
    while len(cycles) < len(numbers):
        time.sleep(0.05)
    pipe.send("ready")
    pipe.recv()
    since, cpu = time.monotonic(), time.process_time()
    pipe.recv()
    until, cpu = time.monotonic(), time.process_time() - cpu
    found = [took for at, took in list(cycles) if since <= at <= until]
    pipe.send([found, cpu, peak_resident_gb()])
    over.set()
    with contextlib.suppress(EOFError):  # until the process is killed
        pipe.recv()


class Processes:
    """Processes with a pipe each, until they are killed."""

    def __init__(self):
        self._context, self._started = multiprocessing.get_context("spawn"), []

    def start(self, target: Any, *values: Any) -> Any:
        """The pipe of a process that runs target(pipe, *values)."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, *values), daemon=True)
        process.start()
        self._started.append(process)
        return ours

    def kill(self) -> None:
        """Ends all of them."""
        for process in self._started:
            process.kill()


def show_mixing(processes: Processes) -> None:
    """Prints the prompts of the samples that are taken for one group."""
    kinds = ("groups", *["storage"] * DEFAULT_UNITS)
    servers = [processes.start(server, kind) for kind in kinds]
    (_, controller), *units = [pipe.recv() for pipe in servers]
    client = TransferQueueClient("client", controller)
    client.initialize_storage_manager("SimpleStorage", {"zmq_info": dict(units)})
    prompts = torch.arange(2).repeat_interleave(OF_PROMPT)
    fields = TensorDict({"prompt": prompts}, batch_size=2 * OF_PROMPT)
    rows = client.put(fields, partition_id=PARTITION)
    ready = list(range(OF_PROMPT // 2, OF_PROMPT // 2 + OF_PROMPT))
    scores = TensorDict({"score": torch.ones(OF_PROMPT)}, batch_size=OF_PROMPT)
    client.put(scores, metadata=rows.select_samples(ready))
    taken = client.get_meta(["prompt", "score"], OF_PROMPT, PARTITION, task_name=TASK)
    prompts = client.get_data(taken)["prompt"].tolist() if taken.size else []
    print(json.dumps({"ready": ready, "prompts_of_a_group": prompts}), flush=True)


def main() -> None:
    """Measures one cell, or shows how groups are taken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--shape", choices=SHAPES, default="8 x 200")
    parser.add_argument("--defaults", action="store_true", help="settings as the package has them")
    parser.add_argument("--mixing", action="store_true", help="show what is taken for a group")
    options = parser.parse_args()
    processes = Processes()
    try:
        if options.mixing:
            show_mixing(processes)
        else:
            measure(processes, options)
    finally:
        processes.kill()


def measure(processes: Processes, options: argparse.Namespace) -> None:
    """Prints the numbers of one cell."""
    count, shape = DEFAULT_UNITS if options.defaults else UNITS, SHAPES[options.shape]
    servers = [
        processes.start(server, kind, count, not options.defaults)
        for kind in ("controller", *["storage"] * count)
    ]
    (_, controller), *units = [pipe.recv() for pipe in servers]
    count, numbers = min(options.clients, MOST_PROCESSES), list(range(options.clients))
    clients = [
        processes.start(run_clients, controller, dict(units), numbers[i::count], shape)
        for i in range(count)
    ]
    for pipe in clients:
        pipe.recv()
    time.sleep(WARM_SECONDS)
    for pipe in (*servers, *clients):
        pipe.send("begin")
    began = time.monotonic()
    time.sleep(options.seconds)
    for pipe in (*servers, *clients):
        pipe.send("end")
    seconds = time.monotonic() - began
    found = {"seconds": seconds, "servers": [pipe.recv() for pipe in servers]}
    found["clients"] = [pipe.recv() for pipe in clients]
    found["groups"] = sum(len(cycles) for cycles, *_ in found["clients"])
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
