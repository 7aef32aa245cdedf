"""Proof that a run sees: configs/vision_tiny.py on its pictures and on wrong ones, three seeds.

python benchmarks/vision_learning.py --workdir=runs/vision_learning

Each seed is trained twice: "right" as the config is, "wrong" on WORKDIR/wrong.parquet, in which
each row of the same task has the picture of the next row beside its own question and answer. All
are evaluated on the same held-out pictures. Finished folders are not trained again.

To pass, every right run needs a held-out accuracy of at least 0.6 and less than 15 minutes from its
start to its end, on two cores without other jobs; every wrong run must end within 0.05 of chance,
one in four. Prints a row per run for docs/benchmarks.md, and exits with 1 if a run fails.

Flags that are not listed below go to scripts/train.py, e.g. --config.training.steps=10.
"""

import io
import pathlib
import sys

import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
from seeds import parser_of_seeds, print_titles, train

from distflow_jax.config.shipped import open_config
from distflow_jax.data.dataset import open_dataset
from distflow_jax.data.example import Dataset
from distflow_jax.report.read_run import read_run

CONFIG = "vision_tiny"
EVALUATED = 1000  # held-out pictures: the standard error of an accuracy at chance is 0.014
LEAST_ACCURACY = 0.6
MOST_MINUTES = 15.0
CHANCE = 0.25  # of four answers
MOST_FROM_CHANCE = 0.05


def write_wrong(data: Dataset, path: pathlib.Path) -> None:
    """Writes the rows of a drawn task, each with the picture of the next row, as verl's columns.

    Rows are drawn independently of each other, so no answer can be told from its picture.
    """
    rows = []
    for number in range(len(data)):
        example, file = data[number], io.BytesIO()
        assert not isinstance(example.prompt, str), "a drawn task has messages"
        text = "".join(part.get("text", "<image>") for part in example.prompt[-1]["content"])
        picture = PIL.Image.fromarray(data[(number + 1) % len(data)].images[0].pixels())
        picture.save(file, "png")
        rows.append(
            {
                "prompt": [{"role": "user", "content": text}],
                "images": [{"bytes": file.getvalue()}],
                "data_source": example.data_source,
                "ground_truth": example.ground_truth,
            }
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def minutes_of(folder: pathlib.Path) -> float:
    """Minutes from the first start of a run to its last stop."""
    events = read_run(folder).events
    starts = [event["time"] for event in events if event["event"] == "start"]
    stops = [event["time"] for event in events if event["event"] == "stop"]
    return (stops[-1] - starts[0]) / 60


def main() -> int:
    args, flags = parser_of_seeds(__doc__, "runs/vision_learning").parse_known_args()
    wrong = args.workdir / "wrong.parquet"
    if not wrong.exists():
        write_wrong(open_dataset(open_config(CONFIG).data.train), wrong)
    print_titles("minutes", "passes")
    all_pass = True
    for seed in args.seeds:
        for kind, own in (("right", []), ("wrong", [f"--config.data.train={wrong}"])):
            folder = args.workdir / f"seed{seed}-{kind}"
            evaluated = f"--config.eval.num_prompts={EVALUATED}"
            result = train(f"configs/{CONFIG}.py", folder, seed, [evaluated, *own, *flags])
            accuracy, minutes = result.after[0], minutes_of(folder)
            passes = accuracy >= LEAST_ACCURACY and minutes < MOST_MINUTES
            if kind == "wrong":
                passes = abs(accuracy - CHANCE) <= MOST_FROM_CHANCE
            result.print_row(f"{minutes:.1f}", "yes" if passes else "NO")
            all_pass &= passes
    return 0 if all_pass else 1


if __name__ == "__main__":
    sys.exit(main())
