"""A run of trainers and workers in which something happens all the time, drawn by a seed.

Workers are killed, stopped or cut off the network, and others join. Trainers are killed before, in
and after a checkpoint, and started again as a cluster would. One worker at least is never touched
while it is the only one that works. What happened, and when, is in FOLDER.chaos.log.
"""

import dataclasses
import os
import pathlib
import random
import signal
import subprocess
import time

from distflow_jax.report.run_writer import read_metrics
from support.cut_network import CutNetwork
from support.paths import ROOT
from support.programs import Process
from support.waiting import HANG, until

LOOK_SECONDS = 0.005
READY = "ready as "
MOST_WORKERS = 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much happens."""

    seed: int
    every: tuple[float, float]  # seconds between two events
    checkpoints: int  # steps between two
    # moments of a checkpoint at which a trainer is killed, and the first step of it
    kills: tuple[tuple[str, int], ...] = ()
    lease: float = 4.0
    workers: int = 3


@dataclasses.dataclass(eq=False)
class ChaosWorker:
    """A worker process behind a network of its own."""

    name: str
    process: subprocess.Popen
    network: CutNetwork
    log: pathlib.Path
    ready: bool = False
    touched: str = ""  # what was done to it and lasts
    until: float = 0.0  # when that ends
    then: str = ""  # how it ends

    @property
    def works(self) -> bool:
        """Whether it has begun to sample and nothing was done to it."""
        return self.ready and not self.touched


class Chaos:
    """One run in `folder`, from its start to its end.

    Attributes:
      restarts: steps of the checkpoints from which trainers went on.
      done: events by kind.
    """

    def __init__(self, folder: pathlib.Path, settings: list[str], plan: Plan):
        self.folder, self.plan = folder, plan
        self._settings = ["--config=configs/tiny.py", *(f"--config.{one}" for one in settings)]
        self._draw = random.Random(plan.seed)
        self._began = time.monotonic()
        self._workers: list[ChaosWorker] = []
        self._left = list(plan.kills)
        self._trainers: subprocess.Popen | None = None
        self._log = folder.parent / f"{folder.name}.chaos.log"
        self._num_workers = 0
        self._known = (0, 0)  # bytes of metrics.jsonl, and its last step
        self.restarts: list[int] = []
        self.done: dict[str, int] = {}

    def run(self, seconds: float) -> int:
        """Lets the run end; returns its exit code. The processes are gone afterwards."""
        self._say(f"seed {self.plan.seed}, {self.plan}")
        try:
            self._start_trainers("")
            for _ in range(self.plan.workers):
                self._join()
            self._await_first_step()
            return self._disturb(time.monotonic() + seconds)
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.network.close()
            if self._trainers is not None and self._trainers.poll() is None:
                os.killpg(self._trainers.pid, signal.SIGTERM)
                try:
                    self._trainers.wait(HANG)
                except subprocess.TimeoutExpired:
                    os.killpg(self._trainers.pid, signal.SIGKILL)

    def output(self) -> str:
        """The end of all logs."""
        logs = sorted(self.folder.parent.glob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in logs)

    # -- what goes on -----------------------------------------------------------------------------

    def _disturb(self, end: float) -> int:
        next_event = time.monotonic() + self._pause()
        while (code := self._trainers.poll()) is None:
            assert time.monotonic() < end, "the run does not end\n" + self.output()
            self._look_at_workers()
            if self._left and (found := self._moment(*self._left[0])):
                self._kill_trainer(found)
            if time.monotonic() >= next_event:
                next_event = time.monotonic() + self._pause()
                self._event()
            time.sleep(LOOK_SECONDS)
        self._say(f"the trainers ended with exit code {code}")
        self._end_workers()
        return code

    def _pause(self) -> float:
        return self._draw.uniform(*self.plan.every)

    def _event(self) -> None:
        """Does something to a worker, if another one works; another one joins."""
        working = [worker for worker in self._workers if worker.works]
        if len(working) >= 2:
            worker, kind = self._draw.choice(working), self._draw.choice(("kill", "stop", "cut"))
            lasts = self._draw.uniform(1.2, 2.5) * self.plan.lease
            worker.until = time.monotonic() + lasts
            worker.then = self._draw.choice(("kill", "recover"))
            if kind == "kill":
                self._kill(worker)
            elif kind == "stop":
                worker.process.send_signal(signal.SIGSTOP)
                worker.touched = kind
            else:
                worker.network.cut(refuses=self._draw.random() < 0.5)
                worker.touched = kind
            self._count(kind, worker.name)
        if len(self._workers) < MOST_WORKERS:
            self._count("join", self._join())

    def _look_at_workers(self) -> None:
        for worker in list(self._workers):
            code = worker.process.poll()
            assert code in (None, 0), f"{worker.name} ended with {code}\n" + self.output()
            if code == 0:  # the run is about to end
                continue
            if not worker.ready and READY in worker.log.read_text():
                worker.ready = True
                self._say(f"{worker.name} is ready")
            if worker.touched and time.monotonic() >= worker.until:
                if worker.then == "kill":
                    self._count("kill later", worker.name)
                    self._kill(worker)
                else:
                    self._count(f"recover from {worker.touched}", worker.name)
                    self._recover(worker)

    def _recover(self, worker: ChaosWorker) -> None:
        if worker.touched == "stop":
            worker.process.send_signal(signal.SIGCONT)
        elif worker.touched == "cut":
            worker.network.heal()
        worker.touched = ""

    def _kill(self, worker: ChaosWorker) -> None:
        worker.process.kill()
        worker.process.wait()
        worker.network.close()
        self._workers.remove(worker)

    def _end_workers(self) -> None:
        """The run has ended: all workers that are left end by themselves."""
        for worker in self._workers:
            self._recover(worker)
        for worker in self._workers:
            code = worker.process.wait(HANG)
            assert code == 0, f"{worker.name} ended with {code}\n" + self.output()

    # -- trainers ---------------------------------------------------------------------------------

    def _moment(self, moment: str, step: int) -> str:
        """Where a checkpoint of this step, or a later one, is at a moment; "" if it is not."""
        saved = self.folder / "checkpoints"
        if moment == "before":
            return f"before the checkpoint of step {step}" if self._last_step() == step - 1 else ""
        if moment == "in":
            found = [path.name for path in saved.glob("*-tmp*")]
            found = [name for name in found if int(name.partition(".")[0]) >= step]
            return f"while {found[0]} was written" if found else ""
        found = [path for path in saved.glob("[0-9]*") if path.name.isdigit()]
        late = [path.name for path in found if int(path.name) >= step]
        return f"after the checkpoint of step {late[0]}" if late else ""

    def _kill_trainer(self, when: str) -> None:
        children = f"/proc/{self._trainers.pid}/task/{self._trainers.pid}/children"
        with open(children) as file:
            pids = [int(pid) for pid in file.read().split()]
        pid = self._draw.choice(pids)
        os.kill(pid, signal.SIGKILL)
        self._count(f"kill trainer {self._left[0][0]}", f"{when} (pid {pid} of {pids})")
        del self._left[0]
        self._trainers.wait(HANG)
        names = [path.name for path in (self.folder / "checkpoints").glob("[0-9]*")]
        self.restarts.append(max((int(name) for name in names if name.isdigit()), default=0))
        self._start_trainers(f" after step {self.restarts[-1]}")

    def _start_trainers(self, since: str) -> None:
        launch = ["scripts/launch_local.py", "--processes=2", "--", "scripts/train.py"]
        command = [*launch, f"--workdir={self.folder}", *self._settings]
        self._trainers = Process(self.folder.parent / "trainers.log", command, 1).process
        self._say(f"trainers start{since}")

    def _last_step(self) -> int:
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return 0
        size = path.stat().st_size
        if size != self._known[0]:
            self._known = size, max((row["step"] for row in read_metrics(path)), default=0)
        return self._known[1]

    def _await_first_step(self) -> None:
        def is_there():
            assert self._trainers.poll() is None, self.output()
            self._look_at_workers()
            return self._last_step() >= 1 and any(worker.ready for worker in self._workers)

        until(is_there, self.output, pause=0.1)

    # -- processes --------------------------------------------------------------------------------

    def _join(self) -> str:
        network, name = CutNetwork(), f"worker{self._num_workers}"
        self._num_workers += 1
        waits = ("--join_seconds=200", "--orphan_seconds=200")
        script = ["tests/support/proxied_worker.py", f"--join={self.folder}", *waits]
        log = self.folder.parent / f"{name}.log"
        own = {"http_proxy": f"http://127.0.0.1:{network.port}", "no_proxy": ""}
        own["PYTHONPATH"] = str(ROOT)
        process = Process(log, [*script, *self._settings], 1, own).process
        self._workers.append(ChaosWorker(name, process, network, log))
        return name

    def _count(self, kind: str, what: str) -> None:
        self.done[kind] = self.done.get(kind, 0) + 1
        self._say(f"{kind}: {what}, at step {self._last_step() + 1}")

    def _say(self, line: str) -> None:
        with self._log.open("a") as file:
            file.write(f"{time.monotonic() - self._began:7.1f} s  {line}\n")
