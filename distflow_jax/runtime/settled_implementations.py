"""Attention and grouped products of a run on its devices: self-check and trial, before programs are
traced."""

import dataclasses
import json
import pathlib
from typing import Any

from distflow_jax.cluster import processes
from distflow_jax.models.grouped_trial import try_products
from distflow_jax.models.kernels.implementation_trial import Tried, fastest
from distflow_jax.models.weights.source import multiplied_by
from distflow_jax.planning.plan_run import RunPlan
from distflow_jax.report.json_lines import write_atomic
from distflow_jax.rollout.sampler_trial import try_decode, try_prefill
from distflow_jax.training.row_trial import try_rows

_FILE = "implementations.json"


def settle_implementations(run: RunPlan, folder: pathlib.Path | None = None) -> None:
    """Replaces what the plan prefers by the fastest that agrees with float32 on every process.

    Collective. On CPUs nothing is tried and the plan stays. A run that resumes in `folder` keeps
    the choice of its first start, unless chip or candidates have changed: a trial may end in
    another way, and other sums would follow. Raises ValueError if an implementation that the config
    names is wrong here, or if none can be used.
    """
    if run.machine.platform == "cpu":
        return
    sizes = run.sizes
    rows = {one.name: one for one in (sizes.attention, *sizes.other_attentions)}
    among = [run.machine.chip, [*rows], *map(list, sizes.sampler_attentions), [*sizes.products]]
    best = processes.all_gather_json(_recorded(folder, among))[0]
    if best is None:
        best = _best(run)
        if folder is not None and processes.process_index() == 0:
            write_atomic(folder / _FILE, json.dumps({"among": among, "chosen": best}) + "\n")
    (name, why), decode, prefill, product = best
    chosen = rows[name]._replace(why=f"{rows[name].why}; {why}")
    engine = dataclasses.replace(
        sizes.engine,
        attention=decode[0] or sizes.engine.attention,
        prefill_by=prefill[0] or sizes.engine.prefill_by,
    )
    forward = dataclasses.replace(
        sizes.forward, attention_block=chosen.block, attention_by=chosen.by
    )
    run.sizes = dataclasses.replace(
        sizes,
        attention=chosen,
        forward=forward,
        engine=engine,
        sampler_attention_why="; prefill ".join(filter(None, (decode[1], prefill[1]))),
        product=product[0],
        product_why=product[1],
    )
    if product[0]:
        run.source = multiplied_by(run.source, product[0])


def _recorded(folder: pathlib.Path | None, among: list[Any]) -> list[Any] | None:
    """The choice among the same candidates that an earlier start has left in a folder."""
    try:
        found = json.loads((folder / _FILE).read_text(encoding="utf-8")) if folder else {}
        return found["chosen"] if found.get("among") == among else None
    except (OSError, ValueError, AttributeError, KeyError):  # of JSON of another form
        return None


def _best(run: RunPlan) -> list[tuple[str, str]]:
    """(name, reason) for rows, decode steps, prefill and grouped products; ("", "") where nothing
    was tried. Collective."""
    sizes, model, training = run.sizes, run.source.config, run.config.training
    rows = [sizes.attention, *sizes.other_attentions]
    shared, tokens = training.share_prompts, training.row_tokens
    mine = [
        try_rows(rows, model, sizes.forward, row_tokens=tokens, shared=shared),
        *([{}, {}] if not run.own_samplers else _try_sampler(run)),
        _try_products(run),
    ]
    settings = ("training.attention", *["rollout.attention"] * 2, "model.grouped_product")
    gathered, best = processes.all_gather_json(mine), []
    for i, setting in enumerate(settings):
        found = [{name: Tried(*x) for name, x in one[i].items()} for one in gathered]
        best.append(fastest(setting, found) if found[0] else ("", ""))
    return best


def _try_products(run: RunPlan) -> dict[str, Tried]:
    model, training = run.source.config, run.config.training
    if not model.num_experts:
        return {}
    experts = model.num_experts // run.sizes.mesh.expert
    pairs = run.sizes.micro_rows * training.row_tokens * model.experts_per_token
    shape = (experts, model.hidden_size, model.mlp_size // run.sizes.mesh.tensor)
    return try_products(run.sizes.products, pairs, shape, run.sizes.forward.compute_dtype)


def _try_sampler(run: RunPlan) -> list[dict[str, Tried]]:
    found, model, engine = run.sizes.sampler_attentions, run.source.config, run.sizes.engine
    return [try_decode(found.decode, model, engine), try_prefill(found.prefill, model, engine)]
