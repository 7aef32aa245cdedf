"""External engines as a worker's sampler: the flag --engine, and its settings' file."""

import dataclasses
import pathlib
import threading
from collections.abc import Mapping
from typing import Any

from distflow_jax.did_you_mean import hint
from distflow_jax.models.weights.source import ModelSource
from distflow_jax.parsing.addresses import checked_address
from distflow_jax.parsing.checked_fields import COUNT, OBJECT, POSITIVE, TEXT, Kind, check_fields
from distflow_jax.parsing.http_call import HttpServer
from distflow_jax.parsing.json_text import read_json_object
from distflow_jax.parsing.one_line import one_line
from distflow_jax.parsing.paths import checked_path
from distflow_jax.parsing.pem_files import read_secret
from distflow_jax.parsing.setting_checks import check_values
from distflow_jax.rollout.foreign.engine_protocol import ForeignEngine
from distflow_jax.rollout.foreign.foreign_scheduler import ForeignLimits, ForeignStart
from distflow_jax.rollout.foreign.openai_engine import (
    VLLM_LOAD,
    OpenAIEngine,
    OpenAISettings,
    check_sampling,
    read_steps,
)
from distflow_jax.rollout.foreign.sampler_server_engine import SamplerServiceEngine
from distflow_jax.rollout.foreign.weight_folders import WeightFolders
from distflow_jax.rollout.foreign.weight_probe import MOST_GAP, WeightProbe
from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.runtime.samplers.own_logp import own_logp
from distflow_jax.serving.client import SamplerClient

OWN = "own"


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Settings of a foreign engine: the keys of the file of --engine_settings."""

    model: str = ""  # the name that the server has for the model; "": the first that it lists
    slots: int = 64  # responses that it is given at a time; a distflow server says its own
    try_seconds: float = 600.0  # for one response
    load_seconds: float = 600.0  # for each call of a load
    most_tries: int = 5  # of one response, before its prompt is returned
    lost_seconds: float = 600.0  # that the engine may be away
    most_gap: float = MOST_GAP  # nats per token, by which the first load may be off
    logprobs: str = "raw"  # what the server's log-probs are of: "raw" or "processed"
    # calls that load weights: [["POST", "/path", body], ...]; $folder and $version are replaced
    load_steps: Any = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # fields of each request
    folder: str = ""  # where weights are written; "": a temporary folder
    seen_as: str = ""  # the path of that folder on the engine's machine; "": the same
    dtype: str = "float32"  # of the written weights
    key_file: str = ""  # file with the server's API key or token
    ca_file: str = ""  # certificates to check a distflow server's by, which implies TLS


_KINDS = {
    **dict.fromkeys(("model", "logprobs", "folder", "seen_as", "key_file", "ca_file"), TEXT),
    **dict.fromkeys(("slots", "most_tries"), COUNT),
    **dict.fromkeys(("try_seconds", "load_seconds", "lost_seconds", "most_gap"), POSITIVE),
    "load_steps": Kind("a list of calls", lambda value: isinstance(value, list)),
    "extra": OBJECT,
    "dtype": Kind("float32, bfloat16 or float16", {"float32", "bfloat16", "float16"}.__contains__),
}
_PATHS = {"folder": "new_folder", "key_file": "file", "ca_file": "file"}


@dataclasses.dataclass(frozen=True)
class EngineChoice:
    """A foreign engine that was chosen and not opened yet."""

    kind: str  # "openai" or "distflow"
    address: str
    settings: EngineSettings

    def check(self, sampling: SamplingParams) -> None:
        """Raises ValueError where the engine's log-probs would not be those that training needs."""
        if self.kind == "openai":
            check_sampling(sampling, self.settings.logprobs, self.address)

    def open(self, source: ModelSource, place: pathlib.Path, seed: int) -> ForeignEngine:
        """The engine. EngineError if it does not answer.

        `place`: the folder for weights where the settings name none; `seed`: of the run.
        """
        settings = self.settings
        root = pathlib.Path(settings.folder) if settings.folder else place
        folders = WeightFolders(
            root,
            source.config,
            source.tokenizer,
            source.tokenizer_folder,
            dtype=settings.dtype,
            seen_as=settings.seen_as,
        )
        if self.kind == "distflow":
            client = SamplerClient(self.address, token=self._key, ca_file=settings.ca_file or None)
            return SamplerServiceEngine(
                self.address,
                client,
                folders,
                try_seconds=settings.try_seconds,
                load_seconds=settings.load_seconds,
            )
        return OpenAIEngine(self._http(), folders, stops=source.tokenizer.stop_ids, seed=seed)

    def start(
        self,
        engine: ForeignEngine,
        source: ModelSource,
        sampling: SamplingParams,
        leaving: threading.Event | None = None,
    ) -> ForeignStart:
        """Makes schedulers over the engine, for an EpisodeSampler; `sampling`: of the run, by which
        the engine's weights are probed; `leaving`: see LostEngine."""
        settings = self.settings
        limits = ForeignLimits(
            source.config.vocab_size,
            frozenset(source.tokenizer.stop_ids),
            settings.most_tries,
            settings.lost_seconds,
        )
        own = own_logp(source.config, sampling.temperature)
        probe = WeightProbe(limits.responses, own, sampling, most_gap=settings.most_gap)
        return ForeignStart(engine, limits, probe, leaving)

    @property
    def _key(self) -> str:
        return read_secret("key_file", self.settings.key_file) if self.settings.key_file else ""

    def _http(self) -> OpenAISettings:
        settings, steps = self.settings, VLLM_LOAD
        if settings.load_steps is not None:
            steps = read_steps(settings.load_steps, "load_steps")
        return OpenAISettings(
            HttpServer(self.address, self._key),
            model=settings.model,
            slots=settings.slots,
            try_seconds=settings.try_seconds,
            load_seconds=settings.load_seconds,
            logprobs=settings.logprobs,
            load_steps=steps,
            extra=settings.extra,
        )


def read_engine(flag: str, settings_file: str = "") -> EngineChoice | None:
    """The engine of --engine=own, openai:URL or distflow:HOST:PORT; None for our own.

    `settings_file`: JSON with the keys of EngineSettings. ValueError or OSError for others, before
    anything is opened.
    """
    kind, _, address = flag.partition(":")
    if flag == OWN:
        if settings_file:
            raise ValueError(
                f"--engine_settings={settings_file} is for external engines; name one with "
                "--engine=openai:URL or --engine=distflow:HOST:PORT"
            )
        return None
    if kind not in ("openai", "distflow"):
        flag = one_line(flag)
        raise ValueError(
            f"--engine={flag}: give {OWN}, openai:http://HOST:PORT or distflow:HOST:PORT"
        )
    if kind == "distflow":
        checked_address("--engine=distflow:HOST:PORT", address)
    if kind == "openai":
        address = address.rstrip("/").removesuffix("/v1")
    choice = EngineChoice(kind, address, _read_settings(settings_file))
    if kind == "openai":
        choice._http()
    return choice


def _read_settings(path: str) -> EngineSettings:
    if not path:
        return EngineSettings()
    values = read_json_object(pathlib.Path(path))
    known = [field.name for field in dataclasses.fields(EngineSettings)]
    for key in values:
        if key not in known:
            raise ValueError(f"{path}: unknown key {key!r} ({hint(str(key), known)})")
    check_fields(values, _KINDS, path)
    check_values(values, path, of_user=True)
    named = {k: str(checked_path(_PATHS[k], k, values[k])) for k in _PATHS if values.get(k)}
    return EngineSettings(**{**values, **named})
