"""A job of many processes whose events come in any order, to play the rules of steps in."""

import random


class World:
    """A simulated job: a subclass gives `processes`, `rule`, `step` and the kinds of events.

    Each kind is a method that takes a process and returns whether the event was possible.
    """

    kinds: tuple[str, ...]

    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        self.rule = self.draw_rule()
        # a third of the runs ends with its last step, a third with its data
        self.steps = draw.choice([None, None, draw.randint(1, 30)])
        self.last = None if self.steps else draw.choice([None, draw.randint(1, 100)])

    def owner(self, counter):
        """The process whose sampler answers a counter: a pure function, new with their number."""
        batch, place = divmod(counter, self.rule.groups)
        return self.processes[(place + batch * 7) % len(self.processes)]

    @property
    def over(self):
        """Whether the run has ended: with its last step, or with the data."""
        (over,) = {not p.admission.has_step(self.step + 1) for p in self.processes}
        return over

    def happen(self):
        """One event, of a random kind in a random process; one must always be possible."""
        kinds = [getattr(self, kind) for kind in self.kinds]
        for _ in range(6):
            if self.draw.choice(kinds)(self.draw.choice(self.processes)):
                return
        if self.train():
            return
        assert any(kind(process) for kind in kinds for process in self.processes), "deadlock"


def play(world, count):
    """Plays runs of `world`, each of a seed of its own, until `count` events have happened."""
    happened, seed, ended = 0, 0, 0
    while happened < count:
        run = world(seed)
        seed += 1
        for _ in range(600):
            if run.over:
                run.check_end()
                ended += 1
                break
            run.happen()
            run.check()
            happened += 1
            if run.draw.random() < 0.002:
                run.restart()
    assert ended > seed / 10
