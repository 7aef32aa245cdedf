"""A small server of OpenAI's completions over a RolloutEngine, with faults that can be switched on.

It speaks the part of vLLM's interface that the package uses: /v1/completions with ids, /v1/models,
/metrics, and the calls by which weights are reloaded.
"""

import collections
import contextlib
import itertools
import json
import pathlib
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from flax.traverse_util import unflatten_dict

from distflow_jax.batch import Prompt
from distflow_jax.models.weights.source import open_model
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import Scheduler
from support.waiting import HANG, until

FAULTS = (
    "break",  # the connection, in the middle of the answer
    "hang",  # until `let_go`
    "error",  # HTTP 500
    "truncated",  # JSON
    "wrong ids",
    "no log-probs",
    "few log-probs",
    "other prompt",
    "no end token",
    "slow bytes",  # one now and then
)


class CompletionsServer:
    """Listens on 127.0.0.1 from `start` to `stop`; `faults` has those of the next responses."""

    def __init__(self, engine, params, port=0):
        self.engine, self._params = engine, engine.load_params(params)
        self.faults = collections.deque()
        self.models = [{"id": "tiny"}]  # that it lists
        self.calls = []  # (path, body) of all calls but those for responses
        self.answered = 0
        self.seeds = []  # of requests for responses
        self.most_running = 0
        self.loaded = []  # folders
        self.started = time.time()
        self._handled = []
        self._numbers = itertools.count()
        self._work = queue.SimpleQueue()
        self._closing, self._goes_on = threading.Event(), threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                server.get(self)

            def do_POST(self):
                server.post(self)

        class Http(ThreadingHTTPServer):
            request_queue_size = 64  # above the slots of a client that fills them at once

        self._http = Http(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self._threads = [
            threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True),
            threading.Thread(target=self._sample, daemon=True),
        ]

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        """Ends at once; nobody gets an answer any more."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.let_go()
        self._http.shutdown()
        self._http.server_close()
        self._work.put(None)
        self._threads[1].join(HANG)
        until(lambda: not self._handled)  # as of a process that dies, its connections break before

    def let_go(self):
        """Ends the connections that hang, and those that will."""
        self._goes_on.set()

    # -- the thread that samples --------------------------------------------------------------

    def _sample(self):
        scheduler = Scheduler(self.engine, self._params)
        while not self._closing.is_set():
            with contextlib.suppress(queue.Empty):
                while True:
                    work = self._work.get(block=not scheduler.busy, timeout=0.2)
                    if work is None:
                        break
                    work(scheduler)
            if scheduler.busy:
                running = self.engine.max_concurrent_decodes - scheduler.free_slots
                self.most_running = max(self.most_running, running)
                scheduler.step()
        scheduler.close()

    def complete(self, body):
        """The response to a request, from the engine."""
        answers = queue.SimpleQueue()
        number = next(self._numbers)
        prompt = Prompt(number, number, np.array(body["prompt"], np.int32), "", "", None, {})
        sampling = SamplingParams(
            1, body["max_tokens"], body["temperature"], max(0, body["top_k"]), body["top_p"]
        )
        assert set(body["stop_token_ids"]) == set(self.engine.stop_ids)
        request = GroupRequest(prompt, sampling, first_sample=body["seed"] % 1000)
        self._work.put(lambda scheduler: scheduler.submit(request, answers.put))
        while not self._closing.is_set():
            with contextlib.suppress(queue.Empty):
                return answers.get(timeout=0.1)
        return None

    def load(self, folder):
        """Loads weights of a folder between two calls of the engine."""
        done = threading.Event()
        source = open_model(folder)
        params = unflatten_dict(dict(source.params()), sep="/")

        def weight_update(scheduler):
            assert not scheduler.busy, "it was to be drained"
            scheduler.load(self.engine.load_params(params), scheduler.version + 1)
            done.set()

        self._work.put(weight_update)
        assert done.wait(HANG)
        self.loaded.append(pathlib.Path(folder).name)

    # -- HTTP -------------------------------------------------------------------------------------

    def get(self, handler):
        if handler.path == "/v1/models":
            return self._send(handler, {"object": "list", "data": self.models})
        if handler.path == "/metrics":
            text = f"# TYPE x gauge\nprocess_start_time_seconds {self.started}\n"
            return self._send(handler, text.encode())
        return self._send(handler, {"error": "not found"}, 404)

    def post(self, handler):
        length = int(handler.headers.get("Content-Length", 0))
        body = json.loads(handler.rfile.read(length)) if length else None
        if handler.path == "/v1/completions":
            return self._completion(handler, body)
        self.calls.append((handler.path, body))
        if handler.path == "/collective_rpc":
            self.load(body["kwargs"]["weights_path"])
        elif handler.path.partition("?")[0] not in ("/pause", "/resume", "/reset_prefix_cache"):
            return self._send(handler, {"error": "not found"}, 404)
        return self._send(handler, {})

    def _completion(self, handler, body):
        self._handled.append(handler)
        self.seeds.append(body["seed"])
        try:
            self._complete(handler, body)
        finally:
            self._handled.remove(handler)

    def _complete(self, handler, body):
        try:
            fault = self.faults.popleft()
        except IndexError:
            fault = ""
        if fault == "hang":
            self._goes_on.wait(HANG)
            handler.close_connection = True
            return None
        if fault == "error":
            return self._send(handler, {"error": "the device is lost"}, 500)
        response = self.complete(body)
        if response is None or fault == "break":
            handler.close_connection = True
            if fault:
                handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{")
            return None
        self.answered += 1
        return self._send(handler, self._answer(body, response, fault), fault=fault)

    def _answer(self, body, response, fault):
        tokens, logp = response.tokens.tolist(), response.logp.tolist()
        if fault == "wrong ids":
            tokens[0] = 1 << 20
        if fault == "no end token" and response.finished:
            tokens, logp = tokens[:-1], logp[:-1]
        if fault == "few log-probs":
            logp = logp[:-1]
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": "stop" if response.finished else "length",
            "logprobs": None,
            "token_ids": tokens if body.get("return_token_ids") else None,
            "prompt_token_ids": [*body["prompt"], 1] if fault == "other prompt" else body["prompt"],
        }
        if fault != "no log-probs":
            names = [f"token_id:{token}" for token in tokens]
            choice["logprobs"] = {"tokens": names, "token_logprobs": logp}
        return {"object": "text_completion", "model": "tiny", "choices": [choice]}

    def _send(self, handler, body, status=200, fault=""):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        if fault == "truncated":
            content = content[: len(content) // 2]
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        if fault == "slow bytes":
            for i in range(len(content)):
                handler.wfile.write(content[i : i + 1])
                if self._closing.wait(0.2):
                    return
            return
        handler.wfile.write(content)
