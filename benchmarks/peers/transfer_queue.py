"""TransferQueue: groups put, claimed by a second task, read and freed, by many clients.

python benchmarks/peers/transfer_queue.py --clients=4 --seconds=10

Its controller and two storage units are processes; they speak ZMQ and need no cluster of Ray's, so
the classes below Ray's decorator are used. Clients are threads of up to 16 processes, each with a
client object of its own. benchmarks/queues.py starts this program, and says what a group is. The
last line of the output has [_, CPU-seconds] of the servers, the controller first, and
[seconds of cycles, CPU-seconds] of the processes of clients.
"""

import argparse
import json
import multiprocessing
import threading
import time
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from transfer_queue.client import TransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit

SAMPLES, MEAN, MOST = 8, 200, 1024  # as in benchmarks/queues.py
MOST_PROCESSES, UNITS = 16, 2
PARTITION, TASK, FIELDS = "train", "update", ["tokens", "logp"]
WARM_SECONDS = 1.0


def server(pipe: Any, kind: str) -> None:
    """The controller or a storage unit; sends where it listens, then its CPU-seconds."""
    if kind == "controller":
        made = TransferQueueController.__ray_metadata__.modified_class(polling_mode=True)
    else:
        made = SimpleStorageUnit.__ray_metadata__.modified_class({"num_data_storage_units": UNITS})
    pipe.send((getattr(made, "storage_unit_id", kind), made.get_zmq_server_info()))
    pipe.recv()
    cpu = time.process_time()
    pipe.recv()
    pipe.send([0, time.process_time() - cpu])
    pipe.recv()


def group(draw: np.random.Generator) -> TensorDict:
    """The responses of one group."""
    drawn = draw.lognormal(np.log(MEAN) - 0.5, 1.0, SAMPLES)
    sizes = np.clip(drawn, 1, MOST).astype(int)
    tokens = [torch.from_numpy(draw.integers(0, 50_000, n).astype(np.int32)) for n in sizes]
    logp = [torch.from_numpy(-draw.random(n, np.float32)) for n in sizes]
    fields = {
        "tokens": torch.nested.as_nested_tensor(tokens, layout=torch.jagged),
        "logp": torch.nested.as_nested_tensor(logp, layout=torch.jagged),
    }
    return TensorDict(fields, batch_size=SAMPLES)


def run_clients(pipe: Any, controller: Any, units: dict[str, Any], numbers: list[int]) -> None:
    """Puts and takes groups until the pipe says stop."""
    torch.set_num_threads(1)
    cycles: list[tuple[float, float]] = []
    over = threading.Event()

    def client(number: int) -> None:
        draw = np.random.default_rng(number)
        bodies = [group(draw) for _ in range(16)]
        own = TransferQueueClient(f"client {number}", controller)
        own.initialize_storage_manager("SimpleStorage", {"zmq_info": units})
        turn = 0
        while not over.is_set():
            began = time.monotonic()
            own.put(bodies[turn % len(bodies)], partition_id=PARTITION)
            turn += 1
            meta = None
            while not over.is_set():
                meta = own.get_meta(FIELDS, SAMPLES, PARTITION, task_name=TASK)
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
    pipe.send([[took for at, took in list(cycles) if since <= at <= until], cpu])
    over.set()
    pipe.recv()


def main() -> None:
    """Measures one cell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    started = []

    def start(target: Any, *values: Any) -> Any:
        ours, theirs = context.Pipe()
        started.append(context.Process(target=target, args=(theirs, *values), daemon=True))
        started[-1].start()
        return ours

    servers = [start(server, kind) for kind in ("controller", *["storage"] * UNITS)]
    (_, controller), *units = [pipe.recv() for pipe in servers]
    count = min(options.clients, MOST_PROCESSES)
    numbers = list(range(options.clients))
    clients = [start(run_clients, controller, dict(units), numbers[i::count]) for i in range(count)]
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
    found["groups"] = sum(len(cycles) for cycles, _ in found["clients"])
    print(json.dumps(found), flush=True)
    for process in started:
        process.kill()


if __name__ == "__main__":
    main()
