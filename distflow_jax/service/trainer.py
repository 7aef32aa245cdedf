"""Training driven by another program: five calls, after AsyncFlow's service interface.

    trainer = Trainer(config, "runs/outside")
    trainer.init_engines()                              # the training, in a thread
    trainer.put_prompts_data([{"prompt": "1 + 2 ="}, ...])
    weights = trainer.weight_sync_notify()              # (version, parameters)
    data = trainer.get_experience_data(["uid", "prompt"], 64)
    trainer.put_experience_data({"uid": ..., "response": ..., "rollout_logp": ...})

The program samples; everything else is a run with `stream.workers`, with its graph, rewards, rule,
checkpoints and report. docs/foreign_engines.md explains the calls.
"""

import contextlib
import dataclasses
import operator
import os
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np

import distflow_jax.run as run_lib
from distflow_jax.batch import Prompt
from distflow_jax.cluster import processes
from distflow_jax.config.config_dict import config_table
from distflow_jax.config.run_config import Config
from distflow_jax.parsing.paths import named_path
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import open_configured, settle
from distflow_jax.planning.sizes import derive_sizes
from distflow_jax.rollout.foreign.engine_protocol import Answer, checked_columns
from distflow_jax.rollout.requests import Response, SamplingParams
from distflow_jax.rollout.response_checks import RefusedAnswer, ResponseLimits
from distflow_jax.service.outside_sampler import OutsideSampler
from distflow_jax.service.prompt_store import PromptStore
from distflow_jax.stream.links.buffer_addresses import read_addresses
from distflow_jax.stream.links.buffer_links import Joining
from distflow_jax.stream.links.shared_tables import shared_tables
from distflow_jax.stream.wire.calls import Refused, Unreachable
from distflow_jax.watchdog.exit_codes import EXIT_DONE

PROMPTS = "prompts.jsonl"  # in the run's folder
READ = ("uid", "prompt")  # columns that a program may get
WRITTEN = ("uid", "response", "rollout_logp")  # columns that it puts; "version" may come too
JOIN_SECONDS = 9.0  # for an answer of the training, which has begun
END_SECONDS = 60.0  # for a training that does not answer to end
LOOK_SECONDS = 0.05  # between two questions for what is not there yet


class MergedWeights(NamedTuple):
    """Parameters in the form of training, adapters merged, and the steps that they have seen."""

    version: int
    params: Any


class Trainer:
    """A run whose prompts and samples come from the program that calls it.

    Attributes:
      sampling: how the responses are to be sampled.
    """

    def __init__(self, config: Config, workdir: str | os.PathLike, *, chosen: Collection[str] = ()):
        """`config`: with stream.workers; `chosen`: see run.train. ValueError for another one."""
        asked = (config.stream.workers, config.stream.weight_update, config.rollout.environment)
        if asked != (True, "in_flight", ""):
            raise ValueError(
                "a program samples responses of one turn, in runs with stream.workers=True and "
                f"stream.weight_update='in_flight' and no rollout.environment, got {asked}"
            )
        if name := config.eval.dataset:  # an evaluation is of one version, which no response names
            raise ValueError(f"set eval.dataset='' in place of {name!r}: a program evaluates none")
        # in the order in which prompts are put; their lengths are checked then
        data = dataclasses.replace(
            config.data, train="outside", shuffle=False, epochs=1, overlong="truncate_left"
        )
        self._config, self._chosen = dataclasses.replace(config, data=data), frozenset(chosen)
        self._settled, self._graph = settle(self._config, self._chosen)
        nodes = [n for n in self._graph.nodes if (n.role, n.type) == ("ROLLOUT", "MODEL_INFERENCE")]
        if len(nodes) != 1:
            raise ValueError(
                f"a program samples for one node, and dag {config.dag!r} has {len(nodes)} that do"
            )
        self._source = open_configured(config)
        self.sampling: SamplingParams = SamplingParams.of_training(config.rollout)
        self._folder = named_path("workdir", workdir, written=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        # rounds of a region, and prompts in the place of those that nobody answered, need more
        count = 4 * self._settled.training.steps * data.prompts_per_step
        self._prompts = PromptStore(self._folder / PROMPTS, count)
        self._training: Future[int] | None = None
        self._sampler: OutsideSampler | None = None
        self._held = -1

    @property
    def num_prompts(self) -> int:
        """Prompts that were put, those of an earlier start of the run included."""
        return self._prompts.num_rows

    def init_engines(self) -> None:
        """Starts the training in a thread; it begins when the prompts of a step are there."""
        if self._training is not None:
            raise ValueError("init_engines was called already")
        self._before = getattr(read_addresses(self._folder), "attempt", None)
        threads = ThreadPoolExecutor(1, thread_name_prefix="training")
        self._training = threads.submit(self._train)
        threads.shutdown(wait=False)

    def put_prompts_data(self, rows: Sequence[Mapping[str, Any]]) -> list[int]:
        """Appends prompts; returns their counters, the first halves of uids.

        A row has `prompt` (a text or messages) and what the reward needs: `ground_truth`,
        `data_source`, `extra_info`. ValueError for others, and for prompts that are too long.
        """
        most = self._settled.data.max_prompt_length
        for row in rows:
            if isinstance(row, Mapping) and row.get("prompt"):
                length = len(self._source.tokenizer.encode_prompt(row["prompt"])[1])
                if length > most:
                    raise ValueError(
                        f"a prompt has {length} tokens, more than data.max_prompt_length {most}"
                    )
        return list(self._prompts.put(rows))

    def weight_sync_notify(self, held: int = -1, seconds: float = 600.0) -> MergedWeights | None:
        """Waits for weights newer than version `held`; None at the end of the run.

        Responses that are put afterwards are taken as sampled by these. TimeoutError after so many
        seconds.
        """
        end = time.monotonic() + seconds
        while (sampler := self._joined(end)) is not None:
            try:
                newest = sampler.ask(held, 0)
                if sampler.ended:
                    break
                with contextlib.suppress(Refused):  # newer weights have taken their place
                    if newest > held:
                        weights = MergedWeights(newest, sampler.pull(newest))
                        self._held = newest
                        return weights
            except Unreachable as error:
                return self._end(error)
            self._wait(end, f"weights after version {held}")
        return None

    def get_experience_data(
        self, columns: Sequence[str] = READ, count: int = 64, seconds: float = 600.0
    ) -> dict[str, list[Any]] | None:
        """Columns of responses that are to be sampled, an entry each; None at the end of the run.

        As many as there are, once there are any: whole groups until there are `count` entries.
        `uid` is (prompt counter, sample), `prompt` int32 ids [P]. With the weights of
        `weight_sync_notify` no group may be there to begin: then it returns empty columns.
        """
        if unknown := [name for name in columns if name not in READ]:
            raise ValueError(f"unknown column {unknown[0]!r}; a sampler reads {', '.join(READ)}")
        if self._held < 0:
            raise ValueError("take weights by weight_sync_notify before the first prompts")
        end = time.monotonic() + seconds
        while (sampler := self._joined(end)) is not None:
            before = set(sampler.missing())
            try:
                newest = sampler.ask(self._held, count)
            except Unreachable as error:
                return self._end(error)
            if sampler.ended:
                break
            found = {u: r for u, r in sampler.missing().items() if u not in before}
            if found or newest > self._held:
                table = {"uid": list(found), "prompt": [r.prompt.tokens for r in found.values()]}
                return {name: table[name] for name in columns}
            self._wait(end, "prompts; put more by put_prompts_data")
        return None

    def put_experience_data(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Takes sampled responses: `uid`, `response` ids and `rollout_logp`, an entry each.

        `version`: of each token, where they are not of the last weights. ValueError for columns
        that do not fit, with the uid: none of them is taken then.
        """
        sampler = self._sampler
        if wrong := [name for name in WRITTEN if name not in columns]:
            raise ValueError(f"column {wrong[0]!r} is missing; put {', '.join(WRITTEN)}")
        if sampler is None:
            raise ValueError("there are no prompts yet: call get_experience_data before")
        if unsized := [name for name in columns if not hasattr(columns[name], "__len__")]:
            raise ValueError(f"column {unsized[0]!r} is no list: {columns[unsized[0]]!r:.80}")
        lengths = {name: len(column) for name, column in columns.items()}
        if len({*lengths.values()}) > 1:
            raise ValueError(f"columns differ in length: {lengths}")
        missing, responses = sampler.missing(), []
        versions = columns.get("version", [None] * lengths["uid"])
        for uid, tokens, logp, version in zip(
            *(columns[name] for name in WRITTEN), versions, strict=True
        ):
            key = _uid_of(uid)
            if key in missing:  # others are in already, or for another sampler by now
                prompt = missing[key].prompt
                responses.append(self._response(prompt, key, tokens, logp, version))
        try:
            sampler.bring(responses)
        except Unreachable as error:
            self._end(error)
        except Refused as error:
            raise ValueError(f"the trainers refuse responses: {error}") from error

    def close(self) -> None:
        """Waits for the end of the training, which needs no more samples. Raises its error."""
        self._prompts.close()
        if self._sampler is not None:
            self._sampler.close()
        if self._training is not None:
            wait([self._training])
        self._check()

    def _response(
        self, prompt: Prompt, uid: tuple[int, int], tokens: Any, logp: Any, version: Any
    ) -> Response:
        """A checked response; tokens int [T], logp float [T], version int [T] or None."""
        limits = ResponseLimits(self._source.config.vocab_size, self._source.tokenizer.stop_ids)
        given = None if version is None else _plain(version)
        answer = Answer(0, _plain(tokens), _plain(logp), ended=False, version=given)
        try:
            found, logps, versions = checked_columns(
                answer, limits, limit=self.sampling.limit, held=0, known=self._held
            )
        except RefusedAnswer as error:
            raise ValueError(f"the response {uid} has {error}") from error
        margin = np.zeros(len(found), np.float32)
        ended = int(found[-1]) in limits.stops
        return Response(prompt, uid[1], found, logps, margin, ended, versions)

    # -- the run ----------------------------------------------------------------------------------

    def _train(self) -> int:
        if not self._prompts.wait(self._settled.data.prompts_per_step):
            return EXIT_DONE  # the program has ended before the training began
        return run_lib.train_here(
            self._config, self._folder, chosen=self._chosen, dataset=self._prompts
        )

    def _joined(self, end: float) -> OutsideSampler | None:
        """The link to the run, which may have to start first; None after its end."""
        if self._training is None:
            raise ValueError("call init_engines before")
        while self._sampler is None:
            if self._training.done():
                self._check()
                return None
            addresses = read_addresses(self._folder)
            if addresses is not None and addresses.attempt != self._before:
                self._sampler = self._join()
                break
            self._wait(end, "the training to start; it needs the prompts of a step")
        self._check()
        if self._training.done() or self._sampler is None or self._sampler.ended:
            return None
        return self._sampler

    def _join(self) -> OutsideSampler | None:
        config, source = self._settled, self._source
        table = config_table(config)
        tables = shared_tables(table, processes.code_table(), source.tokenizer)
        name = f"outside-{os.getpid()}-{secrets.token_hex(3)}"
        links = Joining(str(self._folder), name, tables).first(JOIN_SECONDS)
        if links is None:
            return None
        sizes = derive_sizes(config, source.config, Machine.current(), self._graph)
        return OutsideSampler(links, source.config, sizes.engine.dtype, config.stream.lease_seconds)

    def _wait(self, end: float, what: str) -> None:
        self._check()
        if time.monotonic() > end:
            raise TimeoutError(f"waited in vain for {what}")
        time.sleep(LOOK_SECONDS)

    def _end(self, error: Unreachable) -> None:
        """Waits for the end of a training that does not answer; raises `error` if it goes on."""
        done, _ = wait([self._training], END_SECONDS)
        if not done:
            raise error
        self._check()

    def _check(self) -> None:
        """Raises what has ended the training."""
        if self._training is None or not self._training.done():
            return
        if (code := self._training.result()) != EXIT_DONE:
            raise RuntimeError(f"the training ended with exit code {code}; see its log")


def _uid_of(uid: Any) -> tuple[int, int]:
    try:
        counter, sample = uid
        return operator.index(counter), operator.index(sample)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a uid is (prompt counter, sample), as get_experience_data gave it, got {uid!r:.80}"
        ) from error


def _plain(column: Any) -> Any:
    """Numbers as JSON has them, to be checked."""
    try:
        return np.asarray(column).tolist()
    except ValueError:  # lists of several lengths
        return ""
