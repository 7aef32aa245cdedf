"""WORKDIR/doors.json: where the homes of a run answer, and which start of the run they are."""

import dataclasses
import json
import os
import pathlib
import re
import socket
from collections.abc import Sequence

FILE = "doors.json"
_ADDRESS = r"(?:[^\s:\[\]/,]+|\[[\w.:%]+\]):(\d{1,5})"


@dataclasses.dataclass(frozen=True)
class Doors:
    """The homes of one start of a run."""

    incarnation: str  # another one at each start
    homes: tuple[str, ...]  # HOST:PORT of each trainer process, in order
    ended: bool = False  # the run is over

    def write(self, folder: pathlib.Path) -> None:
        """Writes the file, whole or not at all."""
        path = folder / FILE
        part = path.with_name(f"{FILE}.{os.getpid()}")
        part.write_text(json.dumps(dataclasses.asdict(self)) + "\n")
        part.replace(path)


def read_doors(folder: str | os.PathLike) -> Doors | None:
    """The doors of a run's folder; None if it has none (yet). ValueError for another file."""
    path = pathlib.Path(folder) / FILE
    try:
        text = path.read_text()
    except OSError:
        return None
    try:
        found = json.loads(text)
        return Doors(str(found["incarnation"]), tuple(found["homes"]), bool(found["ended"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a file of doors ({error}): remove it") from error


def start_before(folder: str | os.PathLike) -> str:
    """The incarnation that was the last one in a run's folder; "" if none is known."""
    try:
        found = read_doors(folder)
    except ValueError:  # this start writes the file anew
        return ""
    return "" if found is None else found.incarnation


def is_address(text: str) -> bool:
    """Whether a text is HOST:PORT of something that listens."""
    found = re.fullmatch(_ADDRESS, text)
    return found is not None and 0 < int(found[1]) < 65536


def addresses(join: str) -> tuple[str, ...]:
    """The addresses of --join=HOST:PORT[,HOST:PORT]; () if it names a folder."""
    parts: Sequence[str] = join.split(",")
    if all(is_address(part) for part in parts):
        return tuple(parts)
    if any(re.fullmatch(_ADDRESS, part) for part in parts):
        raise ValueError(f"--join={join!r} must be HOST:PORT[,HOST:PORT], or the run's folder")
    return ()


def check_listen(name: str, listen: str) -> None:
    """Raises ValueError, which names the setting, unless it is HOST:PORT to listen on."""
    host, _, port = listen.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(
            f"{name} must be HOST:PORT, got {listen!r}; 127.0.0.1:0 is any free port of this "
            "machine alone"
        )


def announced(listen: str, port: int) -> str:
    """The address by which others call a door that listens on an interface, at a port."""
    host = listen.rpartition(":")[0]
    anywhere = host in ("0.0.0.0", "[::]", "")
    return f"{socket.getfqdn() if anywhere else host}:{port}"
