"""A task buffer whose methods are called as the wire does."""

import threading
import time

from distflow_jax.stream.frames.frames import Frame
from distflow_jax.stream.links.buffer_service import BufferService
from distflow_jax.stream.sample_requests import SampleRequests
from distflow_jax.stream.schedule import Rule
from distflow_jax.stream.task_buffer import TaskBuffer
from support.counted_buffers import LIMITS, TABLES

LEASE = {"attempt": "one", "version": 0, "capacity": 4, "slots": 4}


class Buffer:
    """A task buffer whose methods are called as the wire does."""

    def __init__(self, **options):
        self.lock = threading.Condition()
        self.tasks = TaskBuffer(
            Rule(4, 1), exact=False, version=0, lease_seconds=60.0, max_tries=2, served=["score"]
        )
        self.requests = SampleRequests(self.tasks, self.lock)
        facts = {"attempt": "one", "after": "", "began": 0, "exact": False}
        self.service = BufferService(
            self.requests, self.lock, TABLES, facts, limits=LIMITS, **options
        )
        self.service.meet(["127.0.0.1:1"])

    def call(self, worker, method="lease", waits=False, **facts):
        """`waits`: for a hint."""
        facts["waits"] = list(self.service._known(worker)) if waits else True
        return self.service.methods()[method](worker, Frame(LEASE | facts).to_bytes())

    def look(self, seconds=0.0):
        with self.lock:
            self.service.answer_waiting(time.monotonic() + seconds)
