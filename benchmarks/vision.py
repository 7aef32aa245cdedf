"""Images that samples share: seconds of the tower in an update, and bytes between processes.

python benchmarks/vision.py
python benchmarks/vision.py --parts=tower --rounds=9 --prompts=16
python benchmarks/vision.py --parts=moved --processes=4

tower: updates on random pictures, float32, on one device. In "shared" rows the 8 samples of a
prompt share its picture, in "own" rows each sample has a picture of its own. An update is timed as
it is and with its chunks of patches empty, which the tower skips; all else is the same program on
the same tokens, so the difference is the tower's, forward and backward. The four updates alternate
in one process. Goal: the tower of shared rows takes at most a quarter of that of own rows. A third
line has the forward pass alone, as a sampler makes it. Rates are relative to a plain product, which
is timed before each round.

moved: a run of configs/vision_tiny.py on several processes. perf/image_bytes_moved of each step is
divided by the bytes of one copy of each of the step's pictures for each data rank. Goal: at most 1.

Prints tables for docs/benchmarks.md, and exits with 1 if a goal is missed.
"""

import argparse
import dataclasses
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from device.rates import product_rate

from distflow_jax.algorithms.algorithm_config import AlgorithmConfig
from distflow_jax.batch import Placement, Rows, RowShape, Sequences, to_rows
from distflow_jax.config.shipped import open_config
from distflow_jax.coordinator.row_images import encoded_images, pack_images
from distflow_jax.images.prompt_images import PromptImages, to_bytes
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.model_flops import BatchWork, tower_flops
from distflow_jax.models.parameters import init_params, param_shardings
from distflow_jax.models.vision.chunks import encode_chunks, patch_room
from distflow_jax.models.vision.vision_config import VisionConfig
from distflow_jax.models.weights.source import open_model
from distflow_jax.programs.xla_options import compiler_options
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.training.forward import ForwardConfig, logits_in_memory
from distflow_jax.training.objectives.policy_objective import PolicyBatch, policy_objective
from distflow_jax.training.optimizer import OptimizerConfig, learning_rate, make_optimizer
from distflow_jax.training.state import init_state
from distflow_jax.training.update import UpdateShape, make_update

ROOT = pathlib.Path(__file__).parents[1]
PARTS = ("tower", "moved")
SAMPLES = 8
TEXT, RESPONSE = 16, 8  # tokens of a prompt beside its picture, and of a response
MOST_SHARE = 0.25  # of the tower's seconds with shared rows, in those with own rows
MOST_COPIES = 1.0  # of an image for each data rank
# a tower as docs/models.md adds it to a text model, under a small one
MODEL = DecoderConfig(
    vocab_size=512,
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    mlp_size=256,
    vision=VisionConfig(width=128, grid=8),
)


def parse_arguments() -> argparse.Namespace:
    """Parts, rounds and sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="tower,moved", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8, help="a multiple of 8: full chunks")
    parser.add_argument("--processes", type=int, default=2, help="of the part moved")
    parser.add_argument("--steps", type=int, default=4, help="of the part moved")
    args = parser.parse_args()
    for part in args.parts.split(","):
        if part not in PARTS:
            parser.error(f"--parts: {part!r} is none of {', '.join(PARTS)}")
    if args.prompts < 1 or args.prompts % SAMPLES:
        parser.error(f"--prompts must be a multiple of {SAMPLES}, got {args.prompts}")
    return args


# -- the tower in an update ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Side:
    """An update on rows that share pictures, or on rows that do not."""

    name: str
    full: Callable[[], Any]  # runs the update
    empty: Callable[[], Any]  # the same without a patch
    images: int  # in its rows
    flops: float  # of the tower, forward and backward


def picture(tokens: int) -> PromptImages:
    """A random picture behind the text of a prompt of so many tokens."""
    vision = MODEL.vision
    assert vision is not None
    side, rng = vision.grid, np.random.default_rng(0)
    features = side**2 // vision.patches_per_feature
    patch = np.concatenate([np.full(tokens - features, -1), np.arange(features)])
    places = np.arange(side**2).reshape(-1, vision.merge, side // vision.merge, vision.merge)
    squares = places.transpose(0, 2, 1, 3).ravel()  # the patches of a feature are neighbours
    return PromptImages(
        patch.astype(np.int32),
        rng.integers(0, 256, (side**2, vision.patch_bytes), np.uint8),
        np.stack(np.divmod(squares, side), axis=-1).astype(np.int32),
        np.ones(side**2, np.int32),
        np.repeat(np.arange(tokens, dtype=np.int32)[:, None], 3, axis=1),
        1,
    )


def packed(prompts: int, shared: bool) -> tuple[Rows, float, int]:
    """Rows [1, R, L], FLOPs of their tower's forward pass, and their images.

    A row has as many pictures either way, so that it fills as many chunks of patches.
    """
    vision = MODEL.vision
    assert vision is not None
    features = vision.grid**2 // vision.patches_per_feature
    size, number = TEXT + features, prompts * SAMPLES
    rng = np.random.default_rng(1)

    def ids(*shape: int) -> np.ndarray:
        return rng.integers(3, MODEL.vocab_size, shape, dtype=np.int32)

    texts = ids(prompts, size)
    sequences = Sequences(
        group=[i // SAMPLES if shared else i for i in range(number)],
        member=[i % SAMPLES if shared else 0 for i in range(number)],
        prompt=[texts[i // SAMPLES] for i in range(number)],
        response=list(ids(number, RESPONSE)),
        response_mask=[np.ones(RESPONSE, bool)] * number,
    )
    each = SAMPLES * SAMPLES if shared else SAMPLES  # sequences of a row; it has 8 pictures
    tokens = SAMPLES * (size + SAMPLES * RESPONSE) if shared else SAMPLES * (size + RESPONSE)
    at = tuple(tuple(range(i, i + each)) for i in range(0, number, each))
    placement = Placement(RowShape(1, len(at), tokens, each), (at,), shared)
    rows = to_rows(sequences, placement)
    images = [picture(size)] * number
    room = patch_room(vision, tokens, longest=size, image_tokens=features, rotary=False)
    rows.images = pack_images(sequences, images, placement, room)
    count, patches, pairs, _ = encoded_images(sequences, images, placement)
    work = BatchWork(0, 0, 0, patches=int(patches), patch_pairs=int(pairs))
    return rows, tower_flops(vision, work), int(count)


def one_device() -> jax.sharding.Mesh:
    """The mesh of a run on one device."""
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"))


def side_of(name: str, prompts: int, shared: bool) -> Side:
    """Compiles the update on such rows."""
    rows, flops, images = packed(prompts, shared)
    mesh, settings = one_device(), OptimizerConfig()
    chunk, keep = logits_in_memory(
        0, rows.tokens.shape[-1], rows=1, vocab=MODEL.vocab_size, remat="none"
    )
    forward = ForwardConfig("float32", chunk, "none", keep_logits=keep)
    optimizer = make_optimizer(settings, 1000)
    update = make_update(
        optimizer,
        learning_rate(settings, 1000),
        shape=UpdateShape(mesh, 1, RESPONSE),
        objective=policy_objective(MODEL, AlgorithmConfig(), forward, max_response=RESPONSE),
    )
    params = init_params(MODEL, 0, param_shardings(MODEL, mesh))
    state = init_state(params, MODEL, optimizer, mesh)
    advantage = np.where(rows.response_mask, 1, 0).astype(np.float32)
    batch = jax.device_put(PolicyBatch(rows, advantage, None, None, None))
    rest = (np.int32(0), np.float32(1))
    program = update.lower(state, batch, *rest).compile(compiler_options=compiler_options(mesh))
    held = [state]  # donated to each update, which returns the next one

    def run(batch: PolicyBatch) -> None:
        held[0], _ = jax.block_until_ready(program(held[0], batch, *rest))

    no_patch = dataclasses.replace(batch.rows.images, segments=0 * batch.rows.images.segments)
    empty = batch._replace(rows=dataclasses.replace(batch.rows, images=no_patch))
    return Side(name, lambda: run(batch), lambda: run(empty), images, 3 * flops)


def forward_side(prompts: int) -> Side:
    """The tower's forward pass on the pictures of shared rows."""
    rows, flops, images = packed(prompts, True)
    vision, found = MODEL.vision, jax.device_put(rows.images)
    assert vision is not None
    params = init_params(MODEL, 0, param_shardings(MODEL, one_device()))["vision"]
    arguments = (params, found.patches[0], found.positions[0], found.segments[0])
    program = jax.jit(lambda *a: encode_chunks(vision, *a)).lower(*arguments).compile()
    return Side(
        "forward alone",
        lambda: jax.block_until_ready(program(*arguments)),
        lambda: jax.block_until_ready(program(*arguments[:3], 0 * arguments[3])),
        images,
        flops,
    )


def seconds_of(run: Callable[[], Any]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure_tower(args: argparse.Namespace) -> bool:
    """Prints the table of the tower; whether the goal is reached."""
    sides = [side_of("shared", args.prompts, True), side_of("own", args.prompts, False)]
    sides.append(forward_side(args.prompts))
    for side in sides:  # not counted
        side.full(), side.empty()
    tower: dict[str, list[float]] = {side.name: [] for side in sides}
    rates = []
    for _ in range(args.rounds):
        rates.append(product_rate())
        for side in sides:
            tower[side.name].append(seconds_of(side.full) - seconds_of(side.empty))
    shares = [one / all_ for one, all_ in zip(tower["shared"], tower["own"], strict=True)]
    share = statistics.median(shares)
    print(f"{args.prompts} prompts x {SAMPLES} samples, medians of {args.rounds} rounds\n")
    print(
        "| rows | images | tower s | images/s | share of a plain product |\n|---|---|---|---|---|"
    )
    for side in sides:
        seconds = statistics.median(tower[side.name])
        of_product = statistics.median(
            side.flops / taken / rate for taken, rate in zip(tower[side.name], rates, strict=True)
        )
        cells = [side.name, f"{side.images}", f"{seconds:.3f}", f"{side.images / seconds:.0f}"]
        print(f"| {' | '.join(cells)} | {of_product:.2f} |")
    print(
        f"\ntower with shared rows / with own rows: {share:.3f}, from {min(shares):.3f} to "
        f"{max(shares):.3f} (goal: at most {MOST_SHARE})\n"
    )
    return share <= MOST_SHARE


# -- bytes between processes ----------------------------------------------------------------------


def bytes_of_copy(tokens: int) -> int:
    """Bytes of a prompt of configs/vision_tiny.py, with one picture, on its way."""
    source = open_model(open_config("vision_tiny").model.source)
    vision = source.config.vision
    assert vision is not None
    count, rotary = vision.grid**2, np.zeros((tokens, 3), np.int32)
    images = PromptImages(
        np.zeros(tokens, np.int32),
        np.zeros((count, vision.patch_bytes), np.uint8),
        np.zeros((count, 2), np.int32),
        np.zeros(count, np.int32),
        rotary,
        1,
    )
    return len(to_bytes(np.zeros(tokens, np.int32), images))


def measure_moved(args: argparse.Namespace) -> bool:
    """Prints the table of bytes between processes; whether the goal is reached."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "scripts" / "launch_local.py")]
        command += [f"--processes={args.processes}", "--devices_per_process=1", "--"]
        command += [str(ROOT / "scripts" / "train.py"), "--config=configs/vision_tiny.py"]
        command += [f"--workdir={folder}", f"--config.training.steps={args.steps}"]
        command += [f"--config.rollout.num_samples={SAMPLES}", "--config.eval.dataset="]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        rows = [row for row in read_metrics(pathlib.Path(folder) / "metrics.jsonl") if row["step"]]
    copy = bytes_of_copy(round(rows[0]["prompt_length/max"]))
    print(f"{args.processes} processes with a data rank each, {copy:,} bytes a copy\n")
    print("| step | images | in rows | image_bytes_moved | copies per image and data rank |")
    print("|---|---|---|---|---|")
    worst = 0.0
    for row in rows:
        moved, images = row["perf/image_bytes_moved"], row["data/images"]
        copies = moved / copy / images / args.processes
        worst = max(worst, copies)
        encoded = row["perf/images_encoded"]
        print(f"| {row['step']} | {images:.0f} | {encoded:.0f} | {moved:,.0f} | {copies:.3f} |")
    print(f"\nmost copies: {worst:.3f} (goal: at most {MOST_COPIES:g})")
    return worst <= MOST_COPIES


def main() -> int:
    """Measures and returns the exit code."""
    args = parse_arguments()
    measures = {"tower": measure_tower, "moved": measure_moved}
    results = [measures[part](args) for part in args.parts.split(",")]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
