"""Files of samples hold the responses of all processes, as those of one process would hold them.

Threads stand for processes: they meet in each gather.
"""

import concurrent.futures
import dataclasses
import json
import threading

import numpy as np
import pytest
from support.waiting import HANG

from distflow_jax.batch import Prompt, Samples
from distflow_jax.images.data_uris import small_uri
from distflow_jax.images.record import image_of
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.runtime import run_files
from distflow_jax.runtime.run_files import evaluation_lines, sample_lines
from distflow_jax.stages.evaluate import Scored

BYTES = Tokenizer.byte_level(300)
ODD = 'a\nb\r\u2028"\\ü\x00{\ud83d'  # ends of lines, of a kind; half of a character


class Job:
    """Processes that are threads, each with the calls of cluster/processes.py."""

    def __init__(self, count):
        self._count, self._here = count, threading.local()
        self._met, self._values = threading.Barrier(count, timeout=HANG), [None] * count

    def run(self, function):
        """The results of function(process), in their order."""

        def process(index):
            self._here.index = index
            return function(index)

        with concurrent.futures.ThreadPoolExecutor(self._count) as pool:
            return list(pool.map(process, range(self._count)))

    def _gather(self, value):
        self._values[self._here.index] = value
        self._met.wait()
        found = list(self._values)
        self._met.wait()
        return found

    def all_gather_json(self, value):
        return [json.loads(text) for text in self._gather(json.dumps(value))]

    def gather_text(self, text):
        found = self._gather(text)
        return [] if self._here.index else found


@pytest.fixture
def lines_of(monkeypatch):
    """lines_of(parts, make): the lines of each process, where make(part) is called by each."""

    def run(parts, make):
        job = Job(len(parts))
        monkeypatch.setattr(run_files, "processes", job)
        return job.run(lambda process: make(parts[process]))

    return run


def prompts_of(draw, count, *, sees=False):
    """Prompts of rising counters with gaps, of which some have images if the model sees."""
    counters = np.sort(draw.choice(9 * count, count, replace=False)).tolist()
    prompts = []
    for counter in counters:
        pixels = draw.integers(0, 256, (4, 4, 3), np.uint8)
        images = (image_of(pixels),) * int(draw.integers(0, 7)) if sees else ()
        text = f"{ODD}{counter}"
        prompts.append(Prompt(counter, 3, np.arange(3), text, "d", ODD, {}, images=images))
    return prompts


def samples_of(draw, prompts, *, group=4):
    """Responses to each prompt in no order, with the columns that records show or leave out."""
    at = draw.permutation(len(prompts) * group)
    tokens = [draw.integers(0, 250, draw.integers(0, 6)).astype(np.int32) for _ in at]
    masks = [np.ones(len(t), bool) for t in tokens]
    fields = {
        "score": draw.choice([0.0, 1.5, np.nan], len(at)),
        "advantage": [None if i % 5 == 0 else float(i) for i in range(len(at))],
        "version": [
            np.arange(len(t)) % 2 if i % 3 else np.zeros(len(t), int) for i, t in enumerate(tokens)
        ],
        "rollout_logp": [np.zeros(len(t), np.float32) for t in tokens],
    }
    uid = np.array([[prompts[i // group].counter, i % group] for i in at]).reshape(-1, 2)
    return Samples([prompts[i // group] for i in at], uid, tokens, masks, fields)


def part_of(samples, chosen):
    """Some of the responses."""

    def take(column):
        return [column[i] for i in chosen]

    return dataclasses.replace(
        samples,
        prompt=take(samples.prompt),
        uid=samples.uid[chosen].reshape(-1, 2),
        response=take(samples.response),
        response_mask=take(samples.response_mask),
        fields={name: take(column) for name, column in samples.fields.items()},
    )


def divided(draw, owners, count):
    """The places of a column that each of `count` processes has, each where its owner says."""
    buffer = draw.integers(0, count, int(owners.max()) + 1)
    return [np.flatnonzero(buffer[owners] == process) for process in range(count)]


@pytest.mark.parametrize("sees", [False, True])
@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("whole", [True, False], ids=["prompts", "hosts that share a sampler"])
def test_the_file_of_many_processes_is_that_of_one(lines_of, count, sees, whole):
    """For any split of prompts and responses over processes; some may have none."""
    draw = np.random.default_rng(count)
    prompts = prompts_of(draw, 90, sees=sees)
    samples = samples_of(draw, prompts)
    (one,) = lines_of([samples], lambda part: sample_lines(part, BYTES))
    owners = samples.uid[:, 0] if whole else np.arange(len(samples))
    places = divided(draw, owners, count - 1)  # the last one has nothing
    parts = [part_of(samples, chosen) for chosen in [*places, np.arange(0)]]
    found, *others = lines_of(parts, lambda part: sample_lines(part, BYTES))
    assert found == one and others == [[]] * (count - 1)
    records = list(map(json.loads, one))
    assert [r["uid"] for r in records] == sorted(samples.uid.tolist())
    assert all(r["prompt"] == f"{ODD}{r['uid'][0]}" and "rollout_logp" not in r for r in records)
    images = {p.counter: p.images for p in prompts if p.images}
    shown = {r["uid"][0]: r for r in records if "images" in r}
    assert sorted(shown) == sorted(images)[:64] and len(shown) == 64 * sees
    for counter, record in shown.items():
        assert record["uid"][1] == 0
        assert record["images"] == [small_uri(i.pixels) for i in images[counter][:4]]


@pytest.mark.parametrize("sees", [False, True])
def test_evaluations_too(lines_of, sees):
    draw = np.random.default_rng(0)
    scored = [
        Scored(p, [ODD, "b"], [0, 1], [float("nan"), 1.0], [3, 1], [True, False], [])
        for p in prompts_of(draw, 70, sees=sees)
    ]
    (one,) = lines_of([scored], evaluation_lines)
    cuts = [scored[:20], [], scored[20:21], scored[21:]]
    assert lines_of(cuts, evaluation_lines) == [one, [], [], []]
    records = list(map(json.loads, one))
    assert [r["prompt"] for r in records] == [s.prompt.text for s in scored]
    assert {json.dumps(r["scores"]) for r in records} == {'["NaN", 1.0]'}
    assert sum("images" in r for r in records) == min(
        64, sum(bool(s.prompt.images) for s in scored)
    )
