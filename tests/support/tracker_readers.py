"""Stored values of trackers, by their own readers: python -m support.tracker_readers TRACKER
FOLDER.

Prints [step, name, value] of every value, in the tracker's order, as JSON.
"""

import json
import pathlib
import struct
import sys
from collections.abc import Iterator
from typing import Any

from distflow_jax.user_functions import load_function

Values = Iterator[tuple[int, str, float]]


def tensorboard(folder: pathlib.Path, run_id: str) -> Values:
    """Scalars as TensorBoard's pages show them, of all event files."""
    module = "tensorboard.backend.event_processing.event_accumulator"
    reader = load_function(f"{module}:EventAccumulator", "reader")
    events = reader(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            yield event.step, name, event.value


def mlflow(folder: pathlib.Path, run_id: str) -> Values:
    """The history of every metric; of one step the latest comes last."""
    client = load_function("mlflow:MlflowClient", "reader")(f"sqlite:///{folder / 'mlflow.db'}")
    for name in client.get_run(run_id).data.metrics:
        history = client.get_metric_history(run_id, name)
        for metric in sorted(history, key=lambda metric: metric.timestamp):
            yield metric.step, name, metric.value


def trackio(folder: pathlib.Path, run_id: str) -> Values:
    """The logs of the run in the local database, in the order of their times."""
    storage = load_function("trackio.sqlite_storage:SQLiteStorage", "reader")
    logs = storage.get_logs("distflow_jax", run_id)
    for row in sorted(logs, key=lambda row: row["timestamp"]):
        for name, value in row.items():
            if isinstance(value, int | float) and name not in ("step", "timestamp"):
                yield row["step"], name, value


def wandb(folder: pathlib.Path, run_id: str) -> Values:
    """The history in the files of all offline folders of the run, by the metric `step`."""
    for path in sorted(folder.glob(f"wandb/offline-run-*-{run_id}/*.wandb")):
        for record in wandb_records(path):
            if record.WhichOneof("record_type") != "history":
                continue
            names = [item.key or "\n".join(item.nested_key) for item in record.history.item]
            values = [json.loads(item.value_json) for item in record.history.item]
            row = dict(zip(names, values, strict=True))
            for name, value in row.items():
                if isinstance(value, int | float) and not (
                    name == "step" or "\n" in name or name[0] == "_"
                ):
                    yield row["step"], name, value


def wandb_records(path: pathlib.Path) -> Iterator[Any]:
    """Records of a .wandb file: LevelDB's log format in blocks of 32 KiB, after 7 bytes."""
    record = load_function("wandb.proto.wandb_internal_pb2:Record", "reader")
    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        if room < 7 or kind == 0:
            place += room
            continue
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record.FromString(parts)
            parts = b""


READERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow, "trackio": trackio}


def main() -> None:
    """Prints the values."""
    tracker, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    state = json.loads((folder / "trackers" / f"{tracker}.json").read_text())
    found = list(READERS[tracker](folder, state["run_id"]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
