"""Moves one batch through the coordinator on whatever processes it finds; run by test_coordinator.

    python tests/support/coordinator_worker.py --fsdp=4 --reference=2 --hosts=1 --skew=1

Every process checks for itself that each field arrives as it was put, and how many bytes came.
Exits with 1 and a traceback where something is wrong; prints a line of JSON with the traffic.
"""

import argparse
import json
import os

import jax
import numpy as np

from distflow_jax.batch import ONE_NUMBER, Prompt, TokenColumn
from distflow_jax.cluster import job, processes
from distflow_jax.cluster.host_exchange import Traffic
from distflow_jax.coordinator.assignment import PackingPlan
from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.coordinator.first_fit import RowLimits
from distflow_jax.data.step_columns import loader_columns
from distflow_jax.layout import Edge, Layout, move_between
from distflow_jax.parallel.mesh import MeshSizes, role_mesh

PROMPTS, SAMPLES = 32, 8
LIMITS = RowLimits(tokens=256, sequences=32, shared=True)
HOST = Layout("host")
EXPERTS_FIELD = "routed_experts"
EXPERTS = TokenColumn((3, 2), "int8", prompt=True, fill=-1)


def experts_of(tokens: np.ndarray) -> np.ndarray:
    """Two experts in each of three layers for every token: a function of it."""
    return (tokens[:, None, None] + np.arange(6).reshape(3, 2)).astype(np.int8)


def response_of(counter: int, sample: int, skew: int) -> np.ndarray:
    """The tokens of a response: a function of its uid; the first prompts get the long ones."""
    rng = np.random.default_rng((counter, sample))
    most = 60 if counter < PROMPTS // 4 or not skew else 12
    return rng.integers(1, 1000, rng.integers(1, most)).astype(np.int32)


def prompt_of(counter: int) -> Prompt:
    """A prompt and its tokens, by its counter."""
    tokens = np.random.default_rng(counter).integers(1, 1000, 5 + counter % 20).astype(np.int32)
    return Prompt(counter, counter, tokens, "", "test", None, {})


def check_rows(rows, values, expected, layout) -> int:
    """Finds every sequence of this process's rows by its uid tokens; returns their number."""
    local = jax.tree.map(lambda x: np.concatenate(_own(x), axis=1), rows)
    found = 0
    for r in range(local.tokens.shape[1]):
        for slot in np.flatnonzero(local.valid[0, r]):
            at = np.flatnonzero(local.segment[0, r] == slot + 1)
            tokens, group = local.tokens[0, r, at], int(local.group[0, r, slot])
            score_here = values["score"][0, r, slot]
            matches = [entry for entry in expected[group].values() if entry[2] == score_here]
            assert len(matches) == 1, (layout, group, tokens)
            wanted, logp, score = matches[0]
            np.testing.assert_array_equal(tokens, wanted)
            np.testing.assert_array_equal(values["rollout_logp"][0, r, at], logp)
            experts = values[EXPERTS_FIELD][0, r]
            np.testing.assert_array_equal(experts[at], experts_of(tokens))
            of_prompt = local.segment[0, r] == local.parent[0, r, slot]
            wanted = experts_of(prompt_of(group).tokens)
            np.testing.assert_array_equal(experts[of_prompt], wanted)
            assert values["score"][0, r, slot] == score
            found += 1
    return found


def _own(x) -> list[np.ndarray]:
    parts = {shard.index[1].start or 0: np.asarray(shard.data) for shard in x.addressable_shards}
    return [parts[start] for start in sorted(parts)]


def main():
    """Runs the moves and checks them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp", type=int, default=0)
    parser.add_argument("--reference", type=int, default=0)
    parser.add_argument("--apart", type=int, default=0, help="the reference's devices per host")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--skew", type=int, default=1)
    args = parser.parse_args()
    processes.initialize(job.find(os.environ))
    me, count, devices = processes.process_index(), processes.process_count(), jax.device_count()
    here = devices // count
    parts = ((0, here - args.apart), (here - args.apart, here)) if args.apart else (None, None)
    sizes = (devices - count * args.apart, count * args.apart or devices)
    actor, other = (
        MeshSizes(ranks or size, size // (ranks or size), part)
        for ranks, size, part in zip((args.fsdp, args.reference), sizes, parts, strict=True)
    )
    meshes = {m.layout: role_mesh(m) for m in (actor, other)}
    sampler = HOST if args.hosts == 1 else Layout("host", (("hosts", args.hosts),))
    room = {m.layout: -(-PROMPTS * SAMPLES // m.fsdp) for m in (actor, other)}
    writers = {None: sampler, "rollout": sampler, "reward": HOST, "old": actor.layout}
    packed = {("reward", "score")}
    packed |= {("rollout", field) for field in ("rows", "rollout_logp", EXPERTS_FIELD)}
    coordinator = Coordinator(
        PackingPlan(LIMITS, 1, PROMPTS, room, actor.layout),
        meshes,
        writers,
        dict.fromkeys(meshes, packed),
        {("rollout", "rollout_logp"): ONE_NUMBER, ("rollout", EXPERTS_FIELD): EXPERTS},
    )

    def edge(field, source, start, end):
        return Edge(field, source, "reader", start, end, move_between(start, end))

    samplers = count // args.hosts
    mine = me // args.hosts
    ours = [
        prompt_of(c) for c in range(mine * PROMPTS // samplers, (mine + 1) * PROMPTS // samplers)
    ]
    expected = {
        c: {
            s: (t, np.sin(t).astype(np.float32), np.float32(c + s / 10))
            for s in range(SAMPLES)
            for t in [response_of(c, s, args.skew)]
        }
        for c in range(PROMPTS)
    }
    for _ in range(2):  # a second step starts from nothing
        coordinator.begin(loader_columns(ours, SAMPLES))
        held = coordinator.get(edge("uid", None, sampler, sampler)).tolist()
        table = [expected[c][s] for c, s in held]
        coordinator.put("rollout", "response", [t for t, _, _ in table])
        coordinator.put("rollout", "response_mask", [np.ones(len(t), bool) for t, _, _ in table])
        coordinator.put("rollout", "rollout_logp", [logp for _, logp, _ in table])
        experts = [
            experts_of(np.concatenate([prompt_of(c).tokens, t]))
            for (c, _), (t, _, _) in zip(held, table, strict=True)
        ]
        coordinator.put("rollout", EXPERTS_FIELD, experts)
        own = coordinator.get(edge("uid", None, sampler, HOST)).tolist()
        assert len(own) * args.hosts >= (len(ours) - args.hosts) * SAMPLES
        own_responses = coordinator.get(edge("response", "rollout", sampler, HOST))
        for (c, s), tokens in zip(own, own_responses, strict=True):
            assert tokens is expected[c][s][0]  # nothing was copied
        coordinator.put("reward", "score", np.array([expected[c][s][2] for c, s in own]))

        found = {}
        for name, layout in (("actor", actor.layout), ("reference", other.layout)):
            rows = coordinator.get(edge("rows", "rollout", sampler, layout))
            assert coordinator.get(edge("rows", "rollout", sampler, layout)) is rows
            values = {
                field: np.concatenate(_own(coordinator.get(edge(field, source, start, layout))), 1)
                for field, source, start in (
                    ("rollout_logp", "rollout", sampler),
                    (EXPERTS_FIELD, "rollout", sampler),
                    ("score", "reward", HOST),
                )
            }
            found[name] = check_rows(rows, values, expected, layout)
        came = dict(coordinator.traffic)  # of host columns, for both layouts

        # device to device and back to the host: what comes task buffer is what was packed
        field = coordinator.get(edge("rollout_logp", "rollout", sampler, actor.layout))
        coordinator.put("old", "old_logp", field)
        there = coordinator.get(edge("old_logp", "old", actor.layout, other.layout))
        reshard = coordinator.traffic.get("old_logp", Traffic()).payload
        direct = coordinator.get(edge("rollout_logp", "rollout", sampler, other.layout))
        for a, b in zip(_own(there), _own(direct), strict=True):
            np.testing.assert_array_equal(a, b)
        assert there.sharding == direct.sharding
        buffer = coordinator.get(edge("old_logp", "old", actor.layout, HOST))
        for (c, s), logp in zip(own, buffer, strict=True):
            np.testing.assert_array_equal(logp, expected[c][s][1])
        shared = coordinator.get(edge("old_logp", "old", actor.layout, sampler))
        for (c, s), logp in zip(held, shared, strict=True):
            np.testing.assert_array_equal(logp, expected[c][s][1])
        # records of responses: a node on the mesh wrote their advantages, whose last reader is gone
        coordinator.put("old", "advantage", field)
        coordinator.free("old", "advantage")
        means = [float(np.mean(expected[c][s][1], dtype=np.float64)) for c, s in own]
        assert coordinator.advantages() == {"advantage": means}
    shares = coordinator.shares
    batch_bytes = sum(
        2 * t.nbytes + len(t) + 8 for group in expected.values() for t, _, _ in group.values()
    ) + sum(prompt_of(c).tokens.nbytes for c in range(PROMPTS))
    batch_bytes += sum(
        6 * (len(prompt_of(c).tokens) + len(t))
        for c, group in expected.items()
        for t, _, _ in group.values()
    )
    host = list(came.values())
    report = {
        "payload": sum(t.payload for t in host),
        "padding": sum(t.padding for t in host),
        "fair_share": batch_bytes / actor.fsdp,
        "reference_share": batch_bytes / other.fsdp,
        "batch": batch_bytes,
        "moved": bool(shares.anything_moves(actor.layout)),
        "reshard": reshard,
        "reshard_share": 4 * 256 * sum(len(m.rows) for m in shares.minis) / other.fsdp,
        "found": found,
        "tokens_per_rank": shares.tokens_per_rank(actor.layout).tolist(),
        "traffic": {name: vars(t) for name, t in coordinator.traffic.items()},
    }
    print("REPORT", json.dumps({"process": me} | report), flush=True)
    processes.shutdown()


if __name__ == "__main__":
    main()
