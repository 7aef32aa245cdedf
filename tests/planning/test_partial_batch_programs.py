"""Programs of units that take partial batches: compiled before step 1, and in sum the step at
once.

Nightly: a plan whose units take partial batches trains what the plan trains, and compiles nothing
after step 1.
"""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.gradients import distance
from support.partial_batches import cut, rows_of_groups
from support.tiny_model import random_samples, rows_of

from configs import tiny
from distflow_jax.batch import RowShape
from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.observe.compilations import Compilations
from distflow_jax.parallel.host_memory import live_bytes
from distflow_jax.parallel.rules import device_bytes
from distflow_jax.planning.field_specs import FieldSpecs
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.memory_plan import plan_memory
from distflow_jax.planning.partial_batches.partial_batch_programs import trace_partial_batches
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.planning.run_models import States
from distflow_jax.programs.costs import costs_of
from distflow_jax.runtime.build import make_meshes, trace
from distflow_jax.runtime.contexts import ContextFactory
from distflow_jax.stages.update_model import merged_updates

SOURCE = "random:llama?hidden=64&layers=2&heads=4&kv_heads=2&mlp=128&vocab=512"
GROUPS = 4


class Planned:
    """A plan on two devices: its programs for a whole batch, and for partial batches of as many
    rows."""

    def __init__(self, **overrides):
        config = tiny.get_config()
        config.model.source = SOURCE
        config.mesh.devices = "0:2"
        config.update_from_flattened_dict(overrides)
        self.run = run = plan_run(from_config_dict(Config, config), Machine.current())
        self.meshes = make_meshes(run.sizes)
        tasks = [t for t in run.plan.tasks if t.layout.kind == "mesh"]
        self.units = [u for u in run.plan.units if u.layout.kind == "mesh"]
        self.stages, _ = ContextFactory(run, self.meshes).stages(tasks)
        self.made = States(run.models, run.source, run.config, self.meshes, "float32")
        self.specs = FieldSpecs(run.sizes.packing, self.meshes, run.sizes.routed)
        self.whole = trace(run)
        self.partial_batches = self.trace(self.stages)

    def trace(self, stages):
        """The programs of partial batches with these stages."""
        return trace_partial_batches(
            self.run.plan, stages, self.made.specs(), self.specs, self.units
        )

    def fields(self):
        """Values of all fields that come from the host, by name."""
        layout = self.run.sizes.mesh.layout
        spec = self.specs.rows(layout)
        shape = RowShape(*spec.tokens.shape[:2], spec.tokens.shape[2], spec.valid.shape[2])
        samples = random_samples(0, groups=GROUPS, size=4)
        rows, _ = rows_of(samples, shape, shared=True, ranks=2)
        rows = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), rows, spec)
        number = (7 * rows.group + rows.member).astype(jnp.float32)
        logp = -1.0 - (rows.tokens % 5).astype(jnp.float32)
        found = {
            "score": jnp.where(rows.valid, jnp.sin(number), 0.0),
            "rollout_logp": jnp.where(rows.response_mask, logp, 0.0),
        }
        return {"rows": rows} | jax.device_put(found, spec.tokens.sharding)

    def walk(self, programs, states, fields):
        """Runs the units in order; the states and metrics after them."""
        known, metrics = dict(fields), {}
        for unit in self.units:
            values = [known[edge.field] for edge in unit.inputs]
            kept, written, found = programs[unit.name](states, values)
            states = states | kept
            known |= {field: x for (_, field), x in zip(unit.outputs, written, strict=True)}
            metrics |= found
        return states, metrics


@pytest.mark.parametrize(
    "overrides",
    [
        {"algorithm.kl_coef": 0.1},
        {"algorithm.kl_coef": 0.1, "training.fuse": False},
        {"algorithm.kl_coef": 0.1, "lora.rank": 4},
    ],
)
@pytest.mark.slow
def test_partial_batches_of_a_plan_train_what_the_plan_trains(overrides):
    """With a reference, whose weights adapters share: state and metrics of two steps. The second
    compiles nothing, and no step leaves arrays behind."""
    made = Planned(**overrides)
    fields = made.fields()
    for program in made.whole.values():
        program.compile()
    made.partial_batches.compile()
    (update,) = made.partial_batches.updates.values()
    states, other = made.made.initial({}), made.made.initial({})
    counter, left = None, []
    for step in range(2):
        other, wanted = made.walk(made.whole, other, fields)
        if step:
            counter = Compilations()
        before = live_bytes()
        states["actor"] = update.begin(states["actor"])
        for part_G in cut(step, made.run.config.data.prompts_per_step, partial_batches=3):
            part = rows_of_groups(fields["rows"], part_G)
            part = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), part, fields["rows"])
            states, _ = made.walk(made.partial_batches.units, states, fields | {"rows": part})
        states["actor"], metrics = update.finish(states["actor"])
        left.append(live_bytes() - before)
        for name, value in merged_updates([metrics]).items():
            np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-5, err_msg=name)
    assert int(states["actor"].count) == 2
    got, expected = (jax.device_get(s["actor"].params) for s in (states, other))
    assert distance(got, expected) < 1e-5
    assert counter.take() == 0, counter.names()
    counter.close()
    assert abs(left[1]) < 2**12


def test_accumulators_are_planned_as_they_lie():
    made = Planned()
    (update,) = made.partial_batches.updates.values()
    states = made.made.initial({})
    gc.collect()  # arrays of earlier tests may wait in cycles
    before = live_bytes()
    state = update.begin(states["actor"])
    planned = device_bytes(made.partial_batches.updates["actor"].state.sums)
    assert live_bytes() - before == pytest.approx(planned, rel=0.05)
    costs = {name: costs_of(p.traced, None) for name, p in made.whole.items()}
    memory = plan_memory(made.run, made.partial_batches.units, costs).segments[-1]
    plain = plan_memory(made.run, made.whole, costs).segments[-1]
    assert memory.gradients == plain.gradients + planned
    del state


def test_a_node_on_a_mesh_that_keeps_a_state_is_refused():
    """It would change once for each partial batch."""
    made = Planned()

    def counts(state, fields, options):
        _, written, metrics = made.stages["advantage"](None, fields, options)
        return jnp.int32(0) if state is None else state + 1, written, metrics

    with pytest.raises(ValueError, match="node 'advantage' keeps a state, .*: give it scope batch"):
        made.trace({**made.stages, "advantage": counts})
