"""Placement of PPO's models: on separate submeshes, or all on all devices one after the other.

python benchmarks/placement.py --devices=8 --rounds=6

Three sides are resident in one process and alternate, a step each: "together" (every model on all
devices), "beside" (the actor on the first half of them, critic and reference on one device each),
and "waiting" (as together, with training.offload=idle). All run the same steps of configs/tiny.py.
Prints a line per side with the median seconds of a step, and of the step after the rollout, the
ratios of these to "together" (median over rounds), and the most bytes that live arrays of the side
took in each kind of memory after a node. XLA:CPU runs programs of several devices one after the
other, so only programs on a single device overlap with others.
"""

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

DEVICES = next((a.split("=")[1] for a in sys.argv if a.startswith("--devices=")), "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before the import of jax, which reads these once
# threads of XLA:CPU; the default is one per device, where small programs that wait for large ones
# can take the threads that the large ones need
os.environ.setdefault("NPROC", "32")
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402
import numpy as np  # noqa: E402

from configs import tiny  # noqa: E402
from distflow_jax.config.config_dict import from_config_dict, override  # noqa: E402
from distflow_jax.config.run_config import Config  # noqa: E402
from distflow_jax.dag.plan_walker import run_step  # noqa: E402
from distflow_jax.dag.residency import UPDATE_WEIGHTS  # noqa: E402
from distflow_jax.data.step_columns import loader_columns  # noqa: E402
from distflow_jax.parallel.host_memory import bytes_by_kind  # noqa: E402
from distflow_jax.planning.plan_run import prepare  # noqa: E402
from distflow_jax.planning.run_models import States  # noqa: E402
from distflow_jax.programs.units import format_bytes  # noqa: E402
from distflow_jax.rollout.sampler import SamplerState, update_weights  # noqa: E402
from distflow_jax.runtime.build import build  # noqa: E402

COMMON = [
    "dag=ppo",
    "algorithm.kl_coef=0.05",
    "training.steps=1000",
    "eval.dataset=",
]


def overrides_of(devices: int) -> dict[str, list[str]]:
    """Side -> overrides of the config."""
    half = devices // 2
    parts = {
        "ACTOR": {"devices": f"0:{half}"},
        "CRITIC": {"devices": f"{half}:{half + 1}"},
        "REFERENCE": {"devices": f"{half + 1}:{half + 2}"},
    }
    return {
        "together": [],
        "beside": [f"mesh.roles={parts}"],
        "waiting": ["training.offload=idle"],
    }


@dataclasses.dataclass
class Watch:
    """Times the nodes of a step, and measures memory after each."""

    started: float = 0.0  # the first node after the rollout
    most: dict[str, int] = dataclasses.field(default_factory=dict)
    others: dict[str, int] = dataclasses.field(default_factory=dict)  # bytes of other sides

    @contextlib.contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        """The interface of Spans, as the plan walker calls it."""
        if name != "rollout" and not self.started:
            self.started = time.perf_counter()
        yield
        for kind, size in bytes_by_kind().items():
            size -= self.others.get(kind, 0)
            self.most[kind] = max(size, self.most.get(kind, 0))


class Side:
    """One resident run, which runs a step on request."""

    def __init__(self, overrides: list[str]):
        config = from_config_dict(Config, override(tiny.get_config(), COMMON + overrides))
        self.config, self.watch, self.step = config, Watch(), 0
        self.prepared = prepare(config)
        self.runtime = build(self.prepared, _NoSpans())
        offload = self.runtime.offload
        states = States(self.prepared.models, self.prepared.source, config, self.runtime.meshes)
        self.states = states.initial({}, offload.adopt)
        engine = self.runtime.engine
        with offload.staying(UPDATE_WEIGHTS, self.states):
            weights = self.runtime.sync(self.states["actor"].params)
            self.states["rollout"] = SamplerState(weights, 0, engine.init_decode_state())
            engine.compile(weights)

    def take_step(self, memory: bool) -> tuple[float, float]:
        """Seconds of a step, and of the step after the rollout."""
        prompts = next(self.prepared.loader)
        offload = self.runtime.offload
        self.watch = Watch(others=self.watch.others, most=self.watch.most)
        spans = self.watch if memory else _Started(self.watch)
        start = time.perf_counter()
        with offload.staying(UPDATE_WEIGHTS, self.states):
            self.states["rollout"] = update_weights(
                self.states["rollout"], self.runtime.sync, self.states["actor"].params, self.step
            )
        self.step += 1
        self.runtime.coordinator.begin(loader_columns(prompts, self.config.rollout.num_samples))
        self.states, metrics = run_step(
            self.prepared.plan,
            self.step,
            self.runtime.runners,
            self.states,
            self.runtime.coordinator,
            spans.span,
        )
        offload.update(self.states)
        jax.device_get(metrics)
        jax.block_until_ready([x for x in jax.tree.leaves(self.states) if isinstance(x, jax.Array)])
        end = time.perf_counter()
        return end - start, end - self.watch.started

    def memory(self) -> str:
        """The most bytes in each kind of memory, as text."""
        most = sorted(self.watch.most.items())
        return ", ".join(f"{kind} {format_bytes(size)}" for kind, size in most)


class _NoSpans:
    @contextlib.contextmanager
    def span(self, name, **args):
        yield

    def add(self, name, start, end):
        pass


class _Started:
    """Times a step without measuring memory, which takes time."""

    def __init__(self, watch: Watch):
        self._watch = watch

    @contextlib.contextmanager
    def span(self, name, **args):
        if name != "rollout" and not self._watch.started:
            self._watch.started = time.perf_counter()
        yield


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sides", nargs="+", default=["together", "beside", "waiting"])
    args = parser.parse_args()
    sides = {}
    for name, overrides in overrides_of(args.devices).items():
        if name not in args.sides:
            continue
        others = bytes_by_kind()
        sides[name] = Side(overrides)
        sides[name].watch.others = others
        for _ in range(2):  # compiles
            sides[name].take_step(memory=True)
        sides[name].watch.most = {}
        sides[name].take_step(memory=True)
        print(f"{name}: {sides[name].memory()}", flush=True)
    seconds = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            seconds[name].append(side.take_step(memory=False))
            print(f"{name}: {seconds[name][-1][0]:.2f} s", flush=True)
    for name, side in sides.items():
        own, base = np.array(seconds[name]), np.array(seconds["together"])
        step, after = (statistics.median(column) for column in own.T)
        ratios = [statistics.median(column) for column in (base / own).T]
        print(
            f"{name}: step {step:.2f} s ({ratios[0]:.2f}x), after the rollout {after:.2f} s "
            f"({ratios[1]:.2f}x), most in memory {side.memory()}",
            flush=True,
        )
        side.prepared.rewards.close()


if __name__ == "__main__":
    main()
