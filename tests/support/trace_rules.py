"""The rules of Chrome's trace-event format that viewers such as Perfetto rely on."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any


def check_trace(events: Sequence[Mapping[str, Any]]) -> None:
    """Asserts that spans of a thread are disjoint or nested, that every asynchronous event ends,
    that events are sorted by time, and that processes and threads have names."""
    timed = [event for event in events if event["ph"] != "M"]
    assert {event["ph"] for event in timed} <= {"X", "b", "e"}
    assert all(isinstance(event["ts"], int) for event in timed)
    times = [event["ts"] for event in timed]
    assert times == sorted(times)
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    assert named == {event["pid"] for event in events}
    check_threads(events)
    check_waiting(timed)


def check_threads(events: Sequence[Mapping[str, Any]]) -> None:
    """Asserts that each thread is named before its spans, and that these never overlap in part."""
    named, running = set(), collections.defaultdict(list)
    for event in events:
        thread = event["pid"], event["tid"]
        if event["name"] == "thread_name":
            named.add(thread)
        if event["ph"] != "X":
            continue
        assert thread in named, event
        stack, end = running[thread], event["ts"] + event["dur"]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            stack.pop()
        if stack:  # it began within that one, so it has to end within it
            outer = stack[-1]
            assert end <= outer["ts"] + outer["dur"], (outer, event)
        stack.append(event)


def check_waiting(events: Sequence[Mapping[str, Any]]) -> None:
    """Asserts that asynchronous events are pairs of one name, each with an id of its own."""
    open_names: dict[tuple[str, str], str] = {}
    seen = set()
    for event in events:
        if event["ph"] == "b":
            key = event["cat"], event["id"]
            assert key not in seen, event
            seen.add(key)
            open_names[key] = event["name"]
        elif event["ph"] == "e":
            assert open_names.pop((event["cat"], event["id"])) == event["name"]
    assert not open_names
