"""A small engine with weights and slots, all compiled."""

import dataclasses
from typing import Any

from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.requests import GroupRequest
from distflow_jax.rollout.scheduling.scheduler import run_requests
from support.tiny_model import mesh_of


class CompiledSampler:
    """Answers requests as a rollout does; `stats` are those of the last ones."""

    def __init__(self, model, params, config, *, axes=(1, 1), stop_ids, tokenizer=None):
        mesh = mesh_of(*axes, names=("data", "tensor"))
        self.engine = RolloutEngine(
            model, config, mesh, stop_ids=stop_ids, seed=3, tokenizer=tokenizer
        )
        self.params = self.engine.load_params(params)
        self.engine.compile(self.params)
        self.state = self.engine.init_decode_state()

    def run(self, requests):
        self.state, responses, self.stats = run_requests(
            self.engine, self.params, self.state, requests
        )
        return responses


def changed(request: GroupRequest, **changes: Any) -> GroupRequest:
    """The request with other values: its own fields', or those of its sampling parameters."""
    own = {name: changes.pop(name) for name in ("prompt", "hold") if name in changes}
    sampling = dataclasses.replace(request.sampling, **changes)
    return dataclasses.replace(request, sampling=sampling, **own)
