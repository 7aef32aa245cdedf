"""TransferQueue: groups put, claimed by a second task, read and freed, by many clients.

PYTHONPATH=benchmarks python -m peers.queue_peer --clients=4 --seconds=10 --shape="1 x 4,000"
PYTHONPATH=benchmarks python -m peers.queue_peer --mixing

Its controller and its storage units are processes; they speak ZMQ and need no cluster of Ray's, so
the classes below Ray's decorator are used. With --defaults they are as its config.yaml has them,
else as few as this machine has cores for, and the controller answers at once where no group is
there (polling_mode). Clients are threads of up to 16 processes, each with a client object of its
own. benchmarks/queues.py starts this program, and says what a group is. The last line of the output
is what peers/groups.py measures; the controller is the first of the servers.

With --mixing it shows what its sampler of groups (GRPOGroupNSampler) takes for a group: samples
that follow each other. Two prompts have four samples each, and the last two of the first and the
first two of the second are ready. The last line has the prompt of each sample that a task gets.
"""

import argparse
import json
import threading
import time
from typing import Any

import numpy as np
import torch
from peers.groups import MOST_PROCESSES, SHAPES, Cycle, Processes, Shape, measured, received, report
from tensordict import TensorDict
from transfer_queue.client import TransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.sampler import GRPOGroupNSampler
from transfer_queue.storage.simple_storage import SimpleStorageUnit

UNITS, DEFAULT_UNITS = 1, 2
PARTITION, TASK, FIELDS = "train", "update", ["tokens", "logp"]
OF_PROMPT = 4  # samples, with --mixing


def run_controller(pipe: Any, polling: bool, mixing: bool) -> None:
    """The controller; sends where it listens, then what it used."""
    sampler = {"sampler": GRPOGroupNSampler(OF_PROMPT)} if mixing else {}
    made = TransferQueueController.__ray_metadata__.modified_class
    controller = made(polling_mode=polling, **sampler)
    pipe.send(controller.get_zmq_server_info())
    report(pipe)
    pipe.recv()


def run_storage(pipe: Any, units: int) -> None:
    """One of so many storage units; sends its name and where it listens, then what it used."""
    made = SimpleStorageUnit.__ray_metadata__.modified_class
    unit = made({"num_data_storage_units": units})
    pipe.send((unit.storage_unit_id, unit.get_zmq_server_info()))
    report(pipe)
    pipe.recv()


def client_of(name: str, controller: Any, units: dict[str, Any]) -> TransferQueueClient:
    """A client of servers that listen there."""
    client = TransferQueueClient(name, controller)
    client.initialize_storage_manager("SimpleStorage", {"zmq_info": units})
    return client


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
    """Puts and takes groups until the process is killed; sends what it used."""
    torch.set_num_threads(1)
    cycles: list[Cycle] = []

    def run_client(number: int) -> None:
        draw = np.random.default_rng(number)
        bodies = [group(draw, shape) for _ in range(16)]
        client = client_of(f"client {number}", controller, units)
        turn = 0
        while True:
            began = time.monotonic()
            client.put(bodies[turn % len(bodies)], partition_id=PARTITION)
            turn += 1
            meta = client.get_meta(FIELDS, shape.samples, PARTITION, task_name=TASK)
            while not meta.size:
                meta = client.get_meta(FIELDS, shape.samples, PARTITION, task_name=TASK)
            float(client.get_data(meta)["logp"][-1][-1])
            client.clear_samples(meta)
            cycles.append((time.monotonic(), time.monotonic() - began))

    for number in numbers:
        threading.Thread(target=run_client, args=(number,), daemon=True).start()
    while len(cycles) < len(numbers):
        time.sleep(0.05)
    pipe.send("ready")
    report(pipe, cycles)
    pipe.recv()


def show_mixing(started: Processes) -> dict[str, Any]:
    """The prompts of the samples that are taken for one group."""
    controller = received(started.start(run_controller, True, True))
    units = [started.start(run_storage, DEFAULT_UNITS) for _ in range(DEFAULT_UNITS)]
    client = client_of("client", controller, dict(map(received, units)))
    prompts = torch.arange(2).repeat_interleave(OF_PROMPT)
    fields = TensorDict({"prompt": prompts}, batch_size=2 * OF_PROMPT)
    rows = client.put(fields, partition_id=PARTITION)
    ready = list(range(OF_PROMPT // 2, OF_PROMPT // 2 + OF_PROMPT))
    scores = TensorDict({"score": torch.ones(OF_PROMPT)}, batch_size=OF_PROMPT)
    client.put(scores, metadata=rows.select_samples(ready))
    taken = client.get_meta(["prompt", "score"], OF_PROMPT, PARTITION, task_name=TASK)
    prompts = client.get_data(taken)["prompt"].tolist() if taken.size else []
    return {"ready": ready, "prompts_of_a_group": prompts}


def measure(started: Processes, options: argparse.Namespace) -> dict[str, Any]:
    """The numbers of one cell."""
    count = DEFAULT_UNITS if options.defaults else UNITS
    servers = [started.start(run_controller, not options.defaults, False)]
    servers += [started.start(run_storage, count) for _ in range(count)]
    controller, *units = map(received, servers)
    of_clients = min(options.clients, MOST_PROCESSES)
    numbers, shape = list(range(options.clients)), SHAPES[options.shape]
    clients = [
        started.start(run_clients, controller, dict(units), numbers[i::of_clients], shape)
        for i in range(of_clients)
    ]
    return measured(servers, clients, options.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--shape", choices=SHAPES, default="8 x 200")
    parser.add_argument("--defaults", action="store_true", help="settings as the package has them")
    parser.add_argument("--mixing", action="store_true", help="show what is taken for a group")
    options = parser.parse_args()
    with Processes() as started:
        found = show_mixing(started) if options.mixing else measure(started, options)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
