"""Host memory of asynchronous steps: groups that wait for their step, and weights on their way.

Known before step 1: at most (stream.max_staleness + 1) x data.prompts_per_step groups exist at a
time.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from distflow_jax.batch import TokenColumn
from distflow_jax.config.run_config import Config
from distflow_jax.dag.graph import Node
from distflow_jax.dag.plan import Plan
from distflow_jax.images.patch_chunks import PatchSizes
from distflow_jax.images.picture_files import PREVIEW
from distflow_jax.layout import RESPONSE_IMAGES, ROUTED_EXPERTS, VERSION
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.sizes import Sizes
from distflow_jax.programs.text_table import text_table
from distflow_jax.programs.units import format_bytes
from distflow_jax.rollout.cache_sizing import weight_bytes
from distflow_jax.stages.registry import per_token_fields
from distflow_jax.stream.batches.recordings import MOST_UNWRITTEN
from distflow_jax.stream.checks import nodes_ahead
from distflow_jax.stream.schedule import weight_buffers

_TOKEN, _NUMBER = 4, 8  # bytes of a token or of its number, and of a number of a response


@dataclasses.dataclass(frozen=True)
class WaitingGroups:
    """Memory of a host that asynchronous steps need, in bytes, with groups of the largest lengths.

    A sampler is taken to have an equal share of the groups. A column that a function of the user's
    writes counts as one number of 8 bytes per response, or one of 4 per token.
    """

    nodes: tuple[str, ...]  # that run ahead
    max_staleness: int
    prompts_per_step: int
    share: int  # groups of a step on this host's sampler
    columns: Mapping[str, int]  # of a group, by field
    # weights on their way to samplers with devices of their own, or kept for evaluations; 0: none
    buffers: int
    buffer: int  # bytes of one
    host: int  # memory of a host; 0 if unknown
    unwritten: int = 0  # steps whose groups may wait for the disk that records them

    @property
    def groups(self) -> int:
        """Groups of a host that exist at a time, at most."""
        return (self.max_staleness + 1 + self.unwritten) * self.share

    @property
    def group(self) -> int:
        """Bytes of a group."""
        return sum(self.columns.values())

    @property
    def total(self) -> int:
        """Bytes of a host."""
        return self.groups * self.group + self.buffers * self.buffer

    def check(self) -> None:
        """Raises ValueError unless a host has this memory, as far as is known."""
        if not self.host or self.total <= self.host:
            return
        room = self.host - self.buffers * self.buffer
        advice = "use a host with more memory"
        steps = room // (self.share * self.group) - self.unwritten
        if steps > 0:
            advice = f"use stream.max_staleness={steps - 1}"
        elif (share := room * self.share // (self.groups * self.group)) > 0:
            most = share * self.prompts_per_step // self.share
            advice = f"lower stream.max_staleness, or use data.prompts_per_step={most} or less"
        weights = ""
        if self.buffers:
            weights = f", plus {format_bytes(self.buffers * self.buffer)} of weights in transit"
        raise ValueError(
            f"stream.max_staleness={self.max_staleness} with "
            f"data.prompts_per_step={self.prompts_per_step} keeps up to {self.groups} groups of "
            f"{format_bytes(self.group)} on a host{weights}, which has "
            f"{format_bytes(self.host)}: {advice}"
        )

    def describe(self) -> str:
        """The memory as text: nodes that run ahead, and a table."""
        has = f"which has {format_bytes(self.host)}" if self.host else "whose memory is unknown"
        largest = sorted(self.columns.items(), key=lambda item: -item[1])
        rows = [("what", "number", "of one", "of all")]
        for name, size in largest:
            rows.append((name, self.groups, format_bytes(size), format_bytes(self.groups * size)))
        if self.buffers:
            all_weights = format_bytes(self.buffers * self.buffer)
            rows.append(("weights", self.buffers, format_bytes(self.buffer), all_weights))
        rows.append(("sum", "", "", format_bytes(self.total)))
        return (
            f"{', '.join(self.nodes)} run ahead of the training, at most {self.max_staleness} "
            f"steps\nmemory per host for waiting groups and weights in transit, {has}\n\n"
            f"{text_table([tuple(map(str, row)) for row in rows])}\n"
        )

    def to_tree(self) -> dict[str, Any]:
        """The memory as plain JSON values, in bytes."""
        return {
            "host": self.host,
            "total": self.total,
            "groups": self.groups,
            "group": dict(self.columns),
            "weights": {"buffers": self.buffers, "buffer": self.buffer},
        }


def waiting_groups(
    config: Config, plan: Plan, sizes: Sizes, model: DecoderConfig, machine: Machine
) -> WaitingGroups | None:
    """The host memory of a run whose samplers run ahead; None for others."""
    if not config.stream.ahead:
        return None
    ahead = nodes_ahead(plan)
    samplers = machine.processes // sizes.sampler_hosts
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    of_response = {"uid": 2 * _NUMBER}
    for node in ahead:
        for name, size in _columns(node, prompt + response, response, sizes.routed).items():
            of_response[name] = of_response.get(name, 0) + size
    evaluated = bool(config.eval.dataset) * config.stream.workers
    kept = weight_buffers(config.stream) * (1 + evaluated)
    images = sizes.packing.images
    if RESPONSE_IMAGES in of_response and images is not None:
        of_response[RESPONSE_IMAGES] = _patch_bytes(images, response)
    samples = config.rollout.num_samples
    # responses of a group have one prompt
    columns = {"prompt": _TOKEN * prompt} | {n: samples * x for n, x in of_response.items()}
    if images is not None:
        columns["images"] = _patch_bytes(images, prompt) + 3 * PREVIEW**2
    return WaitingGroups(
        nodes=tuple(node.id for node in ahead),
        max_staleness=config.stream.max_staleness,
        prompts_per_step=config.data.prompts_per_step,
        share=-(-config.data.prompts_per_step // samplers),
        columns=columns,
        buffers=kept if sizes.samplers_have_own_devices else 0,
        buffer=_leaving_bytes(sizes, model, machine),
        host=machine.host_memory,
        # the one that waits to be written is beyond them
        unwritten=MOST_UNWRITTEN + 1 if config.stream.record else 0,
    )


def _patch_bytes(images: PatchSizes, tokens: int) -> int:
    """Bytes of the images of so many tokens that are all features."""
    of_patch = images.patch_bytes + _TOKEN * (images.dims + 1)  # its positions and segment
    return tokens * (_TOKEN + images.merge * of_patch)


def _columns(
    node: Node, sequence: int, response: int, routed: TokenColumn | None
) -> dict[str, int]:
    """Bytes of what a node writes for one response of the largest length, by field."""
    per_token, found = per_token_fields(node), {}
    for name, field in node.writes.items():
        if name == ROUTED_EXPERTS and routed is not None:
            found[field] = sequence * math.prod(routed.shape) * np.dtype(routed.dtype).itemsize
        elif name == "response_mask":
            found[field] = response
        elif field in per_token or name in ("response", VERSION):
            found[field] = _TOKEN * response
        else:
            found[field] = _NUMBER
    return found


def _leaving_bytes(sizes: Sizes, model: DecoderConfig, machine: Machine) -> int:
    """Bytes of one copy of the weights on their way: all samplers of a host share it."""
    engine = dataclasses.replace(sizes.engine, weights_dtype="auto")  # int8 once they arrived
    submesh = sizes.sampler_submesh
    devices = machine.local_devices if submesh is None else submesh[1] - submesh[0]
    shards = min(sizes.rollout_tensor, devices)
    return shards * weight_bytes(model, engine, sizes.rollout_tensor)
