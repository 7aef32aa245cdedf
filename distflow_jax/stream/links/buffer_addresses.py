"""WORKDIR/task_buffers.json: the addresses of a run's task buffers, and the attempt they serve."""

import contextlib
import dataclasses
import json
import os
import pathlib
import socket

from distflow_jax.cluster import processes
from distflow_jax.parsing.addresses import checked_address, listen
from distflow_jax.parsing.paths import reading, refuse_bucket

FILE = "task_buffers.json"


@dataclasses.dataclass(frozen=True)
class BufferAddresses:
    """The task buffers of one start of a run."""

    attempt: str  # another one at each start
    buffers: tuple[str, ...]  # HOST:PORT of each trainer process, in order
    ended: bool = False  # the run is over

    def write(self, folder: pathlib.Path) -> None:
        """Writes the file, whole or not at all."""
        path = folder / FILE
        part = path.with_name(f"{FILE}.{os.getpid()}")
        part.write_text(json.dumps(dataclasses.asdict(self)) + "\n")
        part.replace(path)


def read_addresses(folder: str | os.PathLike) -> BufferAddresses | None:
    """The servers of a run's folder; None if it has none (yet). ValueError for another file."""
    path = pathlib.Path(folder) / FILE
    try:
        with reading(path) as file:
            text = file.read(1 << 24)
    except (OSError, ValueError):
        return None
    try:
        found = json.loads(text)
        return BufferAddresses(str(found["attempt"]), tuple(found["buffers"]), bool(found["ended"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a file of servers ({error}): remove it") from error


def start_before(folder: str | os.PathLike) -> str:
    """The attempt that was the last one in a run's folder; "" if none is known."""
    with contextlib.suppress(ValueError):  # this start writes the file anew
        if found := read_addresses(folder):
            return found.attempt
    return ""


def forget_end(folder: pathlib.Path) -> None:
    """Removes the file of a run that had ended and goes on now: workers wait for the next one."""
    with contextlib.suppress(ValueError):  # this start writes the file anew
        if (found := read_addresses(folder)) and found.ended:
            (folder / FILE).unlink(missing_ok=True)


def mark_end(folder: pathlib.Path) -> None:
    """Marks the file of a finished run as ended: its last start may have failed before it did."""
    with contextlib.suppress(ValueError):  # no worker can read it either
        if (found := read_addresses(folder)) and not found.ended:
            dataclasses.replace(found, ended=True).write(folder)


def addresses(join: str) -> tuple[str, ...]:
    """The addresses of --join=HOST:PORT[,HOST:PORT]; () if it names a folder."""
    refuse_bucket("--join", join)
    parts = tuple(join.split(","))
    if "://" not in join and not any(":" in part and "/" not in part for part in parts):
        return ()
    for part in parts:
        checked_address("--join (HOST:PORT[,HOST:PORT], or the run's folder)", part)
    return parts


def own_address(address: str) -> str:
    """HOST:PORT where this process listens: ports of processes follow each other, 0 is any."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + processes.process_index() if int(port) else 0}"


def check_listen(name: str, address: str) -> None:
    """Raises ValueError, with the setting's name, unless this process can listen there now."""
    place = own_address(checked_address(name, address, least_port=0))
    listen(name, *place.rpartition(":")[::2]).close()


def announced(listen: str, port: int) -> str:
    """The address by which others call a server that listens on an interface, at a port."""
    host = listen.rpartition(":")[0]
    anywhere = host in ("0.0.0.0", "[::]", "")
    return f"{socket.getfqdn() if anywhere else host}:{port}"
