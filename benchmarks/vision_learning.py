"""Proof that a run sees: configs/vision_tiny.py on its pictures and on wrong ones, three seeds.

python benchmarks/vision_learning.py --workdir=runs/vision_learning
python benchmarks/vision_learning.py --workdir=runs/vision_learning --seeds 0 --kinds right

Each seed is trained twice: "right" as the config is, "wrong" on WORKDIR/wrong.parquet, in which
each row of the same task has the picture of the next row beside its own question and answer. All
are evaluated on the same held-out pictures, each with its own answer. Finished folders are not
trained again.

To pass, every right run needs a held-out accuracy of at least 0.6 and less than 15 minutes from its
start to its end, on two cores without other jobs; every wrong run must end within 0.05 of chance,
one in four. Prints a row per run for docs/benchmarks.md, and exits with 1 if a run fails.

Flags that are not listed below go to scripts/train.py, e.g. --config.training.steps=10.
"""

import argparse
import dataclasses
import io
import json
import pathlib
import sys

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
from learning import Result, header, read_run, train

from distflow_jax.config.shipped import open_config
from distflow_jax.data.dataset import open_dataset
from distflow_jax.data.example import Dataset

CONFIG = "vision_tiny"
KINDS = ("right", "wrong")
EVALUATED = 1000  # held-out pictures: the standard error of an accuracy at chance is 0.014
LEAST_ACCURACY = 0.6
MOST_MINUTES = 15.0
CHANCE = 0.25  # of four answers
MOST_FROM_CHANCE = 0.05


@dataclasses.dataclass(frozen=True)
class Seen:
    """Results of a run on right or wrong pictures."""

    kind: str  # one of KINDS
    result: Result
    minutes: float  # from the start of the run to its end

    @property
    def passes(self) -> bool:
        """Whether the run reaches its goals."""
        accuracy = self.result.after[0]
        if self.kind == "wrong":
            return abs(accuracy - CHANCE) <= MOST_FROM_CHANCE
        return accuracy >= LEAST_ACCURACY and self.minutes < MOST_MINUTES


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """(folder, seeds, kinds; flags of scripts/train.py)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", default="runs/vision_learning", help="holds two runs per seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    return parser.parse_known_args()


def write_wrong(data: Dataset, path: pathlib.Path) -> None:
    """Writes the rows of a drawn task, each with the picture of the next row, as verl's columns.

    Rows are drawn independently of each other, so no answer can be told from its picture.
    """
    rows = []
    for number in range(len(data)):
        example = data[number]
        assert not isinstance(example.prompt, str), "a drawn task has messages"
        text = "".join(part.get("text", "<image>") for part in example.prompt[-1]["content"])
        pixels = data[(number + 1) % len(data)].images[0].pixels()
        rows.append(
            {
                "prompt": [{"role": "user", "content": text}],
                "images": [{"bytes": png(pixels)}],
                "data_source": example.data_source,
                "ground_truth": example.ground_truth,
            }
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def png(pixels: np.ndarray) -> bytes:
    """The PNG file of a picture, uint8 [H, W, 3]."""
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def minutes_of(folder: pathlib.Path) -> float:
    """Minutes from the first start of a run to its last stop, as its events.jsonl says."""
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    starts = [event["time"] for event in events if event["event"] == "start"]
    stops = [event["time"] for event in events if event["event"] == "stop"]
    return (stops[-1] - starts[0]) / 60


def main() -> int:
    """Trains, prints the table and returns the exit code."""
    args, flags = parse_arguments()
    workdir = pathlib.Path(args.workdir)
    own: dict[str, list[str]] = {kind: [] for kind in KINDS}
    if "wrong" in args.kinds:
        wrong = workdir / "wrong.parquet"
        if not wrong.exists():
            write_wrong(open_dataset(open_config(CONFIG).data.train), wrong)
        own["wrong"] = [f"--config.data.train={wrong}"]
    print(header("minutes | passes"), flush=True)
    passes = True
    for seed in args.seeds:
        for kind in args.kinds:
            folder = workdir / f"seed{seed}-{kind}"
            evaluated = f"--config.eval.num_prompts={EVALUATED}"
            train(f"configs/{CONFIG}.py", folder, seed, [evaluated, *own[kind], *flags])
            seen = Seen(kind, read_run(folder), minutes_of(folder))
            shown = f"{seen.minutes:.1f}", "yes" if seen.passes else "NO"
            print(seen.result.row(*shown), flush=True)
            passes = passes and seen.passes
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())
