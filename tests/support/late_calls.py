"""Calls of environments whose deadline passes when they say so, and tries without a pause."""

import threading

from distflow_jax.environments import event_loop, handle
from distflow_jax.environments.event_loop import EventLoop

_HERE = threading.local()  # .call: (loop, call) of a thread that makes one


def let_deadlines_pass(monkeypatch):
    """From now on `be_late` works in all calls, and one that failed is made again at once."""
    in_thread = EventLoop.in_thread

    async def told(loop, call, function, args):
        def known(*args):
            _HERE.call = loop, call
            return function(*args)

        return await in_thread(loop, call, known, args)

    monkeypatch.setattr(EventLoop, "in_thread", told)
    monkeypatch.setattr(handle, "PAUSE", 0.0)


def be_late():
    """The deadline of the call that this is called in passes."""
    call = event_loop._CALL.get()
    if call is not None:
        call.end()
    else:
        loop, call = _HERE.call
        loop.soon(call.end)
