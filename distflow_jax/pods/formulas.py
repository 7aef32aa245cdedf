"""Traffic and bytes of training programs by formulas, for pods that nothing is compiled for.

Per chip: A tokens of a micro-batch, M micro-batches of a step, P weights of the chip's tensor rank
(all that it uses in a pass), T those of them that are trained, c bytes of a weight or activation in
the compute dtype.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.dag.plan import Task
from distflow_jax.models import lora
from distflow_jax.models.decoder_config import DecoderConfig, adapted
from distflow_jax.planning.plan_run import RunPlan
from distflow_jax.planning.run_models import network_of
from distflow_jax.planning.unit_programs import Program
from distflow_jax.pods.interconnect import Interconnect, Torus
from distflow_jax.pods.temporaries import temporary_bytes
from distflow_jax.programs.costs import Costs
from distflow_jax.programs.jaxpr_flops import matmul_flops
from distflow_jax.programs.traffic import CollectiveTraffic
from distflow_jax.rollout.cache_sizing import weight_bytes
from distflow_jax.training.state import TrainState

_KNOWN = ("data", "fsdp", "expert", "context", "tensor")


def program_costs(
    planned: RunPlan,
    program: Program,
    interconnect: Interconnect,
    numbers: np.ndarray,
    flops: float | None = None,
) -> Costs:
    """Costs of a program: FLOPs from the jaxpr, the rest by formulas.

    Overlapped with other work: weights gathered over fsdp in every pass of a micro-batch (forward;
    in an update also backward), and gradients summed afterwards over fsdp and the axes with copies.
    An fsdp axis along all dims of a torus is compiled to all-reduces of whole arrays, which overlap
    with nothing: of gradients, and on three dims of weights too (benchmarks/pod_collectives.py).
    Not overlapped: partial sums of tensor ranks, tokens sent to experts and back, keys and values
    of a row that devices share. HBM: weights once per product, accumulated gradients read and
    written, the optimizer's state once per step, and each product's input and output. Scores of
    attention stay on the chip.

    `numbers`: of the mesh's devices, int [devices], as for traffic_of. `flops`: of all devices,
    where they are known; None: they are counted in the jaxpr. Raises ValueError for a mesh with
    axes that the formulas do not cover.
    """
    sizes = dict(program.mesh.shape)
    unknown = [f"{axis}={n}" for axis, n in sizes.items() if n > 1 and axis not in _KNOWN]
    if unknown:
        raise ValueError(
            f"formulas cover the mesh axes {', '.join(_KNOWN)}, not {', '.join(unknown)}: use 1, "
            "or plan for TPUs, for which programs are compiled"
        )
    costs = Costs(flops) if flops is not None else flops_of(program)
    models = [task for task in program.unit.tasks if task.state_key in planned.models]
    dims = whole_torus(interconnect, numbers.reshape(program.mesh.devices.shape), program.mesh)
    found = [_of_model(planned, program, numbers, t, dims) for t in models]
    traffic = [t for of_model, _ in found for t in of_model]
    of_all = _with(costs, traffic, sum(accessed for _, accessed in found))
    needed = [temporary_bytes(planned, program, task) for task in models]
    return dataclasses.replace(of_all, temp_bytes=max(needed, default=0))


def flops_of(program: Program) -> Costs:
    """Costs with the FLOPs of a traced program alone."""
    found = matmul_flops(program.traced.jaxpr)
    return Costs(found.total, found.unbounded)


def sync_costs(planned: RunPlan, mesh: jax.sharding.Mesh, numbers: np.ndarray) -> Costs:
    """Costs of a weight sync: every chip gathers the samplers' weights once.

    `numbers`: of the mesh's devices, int [devices], as for traffic_of.
    """
    engine, tensor = planned.sizes.engine, planned.sizes.rollout_tensor
    size = float(weight_bytes(planned.source.config, engine, tensor))
    axes = tuple(axis for axis in ("fsdp", "expert", "tensor") if mesh.shape.get(axis, 1) > 1)
    traffic = []
    if axes:
        one = _along("all-gather", axes, mesh, numbers, size=size, times=1, overlapped=False)
        traffic.append(one)
    return dataclasses.replace(_with(Costs(0.0), traffic, 2 * size), temp_bytes=0)


def _with(costs: Costs, traffic: Sequence[CollectiveTraffic], accessed: float) -> Costs:
    kinds: dict[str, float] = {}
    for one in traffic:
        kinds[one.kind] = kinds.get(one.kind, 0.0) + one.bytes
    return Costs(
        costs.flops,
        costs.unbounded,
        bytes_accessed=accessed,
        collective_bytes=kinds,
        traffic=tuple(traffic),
    )


def _of_model(
    planned: RunPlan, program: Program, numbers: np.ndarray, task: Task, dims: int
) -> tuple[list[CollectiveTraffic], float]:
    sizes, config, mesh = planned.sizes, planned.source.config, program.mesh
    layout = program.unit.layout
    trains = task.node.type == "MODEL_TRAIN"
    item = jnp.dtype(sizes.forward.compute_dtype).itemsize
    state = program.given_states[task.state_key]
    params = state.params if isinstance(state, TrainState) else state
    tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    expert, context = (mesh.shape.get(axis, 1) for axis in ("expert", "context"))
    dense, of_experts = (n / tensor for n in _counts(params))
    of_experts /= expert
    weights = dense + of_experts  # P
    network = adapted(network_of(task.node.role, config), planned.config.lora)
    own, own_experts = (n / tensor for n in _counts(lora.divide(network, params)[0]))
    own_experts /= expert
    trained = own + own_experts if trains else 0.0  # T
    at_once = sizes.rows_at_a_time(layout)
    steps = sizes.packing.mini_batches * (planned.config.training.epochs if trains else 1)
    micro = steps * -(-sizes.packing.rows[layout] // at_once)  # M
    tokens = at_once * sizes.packing.limits.tokens / context  # A
    layers = config.num_layers
    again = trains and sizes.forward.remat == "full"

    traffic = []

    def add(kind: str, axes: Sequence[str], size: float, times: int, alone: bool = False) -> None:
        over = tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)
        if over and size:
            one = _along(kind, over, mesh, numbers, size=size, times=times, overlapped=not alone)
            traffic.append(one)

    passes = 2 if trains else 1
    gather = "all-reduce" if dims == 3 else "all-gather"
    add(gather, ["fsdp"], passes * micro * weights * item, passes * micro * layers, dims == 3)
    if trains:
        sums = "all-reduce" if dims else "reduce-scatter"
        add(sums, ["fsdp"], micro * trained * item, micro * layers, dims > 0)
        # of gradients that several devices have copies of
        each = micro / fsdp * item
        if expert == 1:
            add("all-reduce", ["data", "context"], each * trained, micro * layers)
        else:
            add("all-reduce", ["data", "expert", "context"], each * own, micro * layers)
            add("all-reduce", ["data", "context"], each * own_experts, micro * layers)
    # keys and values of the whole row, of the device's heads
    copied = config.num_kv_heads % tensor  # not divisible: one head for each of queries
    heads = (config.num_heads if copied else config.num_kv_heads) / tensor
    row = 2.0 * context * tokens * heads * config.head_dim * item
    add("all-gather", ["context"], passes * micro * layers * row, 2 * passes * micro * layers, True)
    if trains:
        add("reduce-scatter", ["context"], micro * layers * row, 2 * micro * layers, True)
    # tokens of the group to their experts, and back; as much for the gradient
    times = micro * layers * passes
    group = float(expert * tokens * config.hidden_size * item)
    add("all-gather", ["expert"], (times + micro * layers * again) * group, times, True)
    add("reduce-scatter", ["expert"], times * group, times, True)
    if tensor > 1:
        # before and after attention and the MLP; as much for the gradient, and for recomputation.
        # In the forward pass XLA all-reduces, in the backward pass it reduce-scatters
        sums = {"all-gather": 1 + trains + again, "all-reduce": 1 + again, "reduce-scatter": trains}
        stream = float(tokens * config.hidden_size * item)
        for kind, number in sums.items():
            times = micro * layers * 2 * number
            add(kind, ["tensor"], times * stream, times, True)

    # of weights that are not trained there is no product for a gradient
    products = 2 + again + trained / weights if trains else 1
    accessed = micro * products * (weights + tokens * _widths(config, tensor) * layers) * item
    if trains:
        shard = 4 * trained / fsdp  # float32
        # gradients; parameters and two moments, read and written
        accessed += micro * 2 * shard + steps * 7 * shard
    return traffic, accessed


def whole_torus(interconnect: Interconnect, numbers: np.ndarray, mesh: jax.sharding.Mesh) -> int:
    """The number of dims of a torus, 2 or 3, if each fsdp group spans all of them; otherwise 0.

    `numbers`: of the devices, int, shaped as `mesh.devices`.
    """
    if not isinstance(interconnect, Torus) or mesh.shape["fsdp"] == 1:
        return 0
    axis = mesh.axis_names.index("fsdp")
    group = np.moveaxis(numbers, axis, -1).reshape(-1, mesh.shape["fsdp"])[0]
    places = interconnect.places[group]
    spanned = (places.max(0) > places.min(0)).sum()
    dims = sum(size > 1 for size in interconnect.sizes)
    return int(spanned) if spanned == dims > 1 else 0


def _counts(params: Any) -> tuple[int, int]:
    """(number of weights outside the experts, number of weights of the experts)."""
    found = [0, 0]
    for x in jax.tree.leaves(params):
        found["expert" in x.sharding.spec] += math.prod(x.shape)
    return found[0], found[1]


def _widths(config: DecoderConfig, tensor: int) -> float:
    """Activations that the products of one layer read and write per token, on one chip."""
    c = config
    heads = (c.num_heads + c.num_kv_heads) * 2 * c.head_dim / tensor  # query, keys, values, output
    experts = c.experts_per_token if c.num_experts else 1
    return 4 * c.hidden_size + heads + experts * (3 * c.hidden_size + 3 * c.mlp_size / tensor)


def _along(
    kind: str,
    axes: tuple[str, ...],
    mesh: jax.sharding.Mesh,
    numbers: np.ndarray,
    *,
    size: float,
    times: int,
    overlapped: bool,
) -> CollectiveTraffic:
    where = [mesh.axis_names.index(axis) for axis in axes]
    groups = np.moveaxis(numbers.reshape(mesh.devices.shape), where, range(-len(where), 0))
    count = math.prod(mesh.shape[axis] for axis in axes)
    return CollectiveTraffic(kind, axes, overlapped, size, times, groups.reshape(-1, count))
