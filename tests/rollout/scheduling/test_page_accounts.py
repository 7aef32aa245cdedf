"""The scheduler never believes in pages, entries, slots or prompts that the engine does not have.

Random schedules over an engine whose pages are exact: several ranks, tight caches, aborts, loads.
"""

import random

import numpy as np
import pytest
from support.page_engine import PageEngine

from distflow_jax.batch import Prompt
from distflow_jax.rollout.decode_state import EngineConfig, pages_of
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.cached_prompts import CachedPrompts
from distflow_jax.rollout.scheduling.scheduler import Scheduler

PAGE = 4


def engine_of(draw, ranks):
    """A small engine with room for one longest sequence, and sometimes a little more."""
    prompt, response = draw.choice([8, 16, 24]), draw.choice([8, 16, 32])
    slots, again = ranks * draw.choice([2, 3, 4, 6]), draw.random() < 0.7
    longest = prompt + response - 1 if again else prompt
    pages = pages_of(longest, PAGE) + pages_of(response, PAGE)
    pages += draw.choice([0, 0, 1, 2, 4, 8, 16])
    config = EngineConfig(
        slots=slots,
        max_prompt=prompt,
        max_response=response,
        tokens_per_call=draw.choice([1, 4, 8]),
        page_size=PAGE,
        group_size=draw.choice([1, 2, 4, 8]),
        cache_tokens=pages * PAGE * ranks,
        prefill_tokens=32,
        max_read=longest if again else 0,
        max_forced=4,
    )
    return PageEngine(config, ranks, draw, draw.choice([0.0, 0.05, 0.2]))


def check_schedule(seed, ranks):
    """Groups that come, end and are aborted, while weights change; then nothing is left."""
    draw = random.Random(seed)
    engine = engine_of(draw, ranks)
    scheduler, groups = Scheduler(engine, None, version=0), []
    slots, longest = scheduler._loop.slots, engine.config

    def submit():
        tokens = np.ones(draw.randint(1, longest.max_prompt), np.int32)
        prompt = Prompt(draw.randrange(1000), 0, tokens, "", "", None, {})
        sampling = SamplingParams(draw.randint(1, 6), draw.randint(1, longest.max_response))
        request = GroupRequest(prompt, sampling, turn=draw.randint(0, 1))
        groups.append(scheduler.submit(request, lambda response: None))

    for _ in range(draw.randint(2, 8)):
        submit()
    for step in range(4000):
        if not scheduler.busy:
            break
        if step < 60 and draw.random() < 0.2:
            submit()
        if step < 80 and draw.random() < 0.05:
            scheduler.abort(groups.pop(draw.randrange(len(groups))) if groups else -1)
        if step < 80 and draw.random() < 0.03:
            scheduler.load(None, scheduler.version + 1)
        scheduler.step()
    assert not scheduler.busy
    state = scheduler.close()
    for rank in range(ranks):
        assert engine.free(state, rank) == engine.shapes.pages
        assert len(slots.prompts.entries[rank]) == len(slots.free[rank]) == engine.shapes.slots


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_random_schedules_stay_within_the_pages(monkeypatch, ranks):
    evict = CachedPrompts.evict

    def checked(self, prompt):
        """Pages of an evicted prompt count once."""
        evict(self, prompt)
        state = self._calls.state
        assert self.pages[prompt.rank] <= self._engine.free(state, prompt.rank)

    monkeypatch.setattr(CachedPrompts, "evict", checked)
    for seed in range(250):
        check_schedule(seed, ranks)
