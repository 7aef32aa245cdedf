"""Workers hold the trainers' weights bit for bit, whatever their layout, and nothing else."""

import contextlib
import dataclasses
import functools
import json
import logging
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_model import MIXTURE, TINY, assert_same_arrays, random_params
from support.waiting import HANG

from distflow_jax.models import lora
from distflow_jax.models.decoder_config import LoraConfig, adapted, without_adapters
from distflow_jax.models.parameters import abstract_params, param_shardings
from distflow_jax.models.sampler_layout import SamplerLayout
from distflow_jax.parallel.mesh import MeshSizes, role_mesh, sampler_mesh
from distflow_jax.resharding.weight_sync import WeightSync
from distflow_jax.stream import weight_client, weight_store
from distflow_jax.stream.weight_chunks import Manifest, TensorSpec, read_manifest
from distflow_jax.stream.weight_client import WeightPull, pull_target
from distflow_jax.stream.weight_store import MANIFEST, PIECE, WeightStore
from distflow_jax.stream.wire.calls import Refused, Unreachable
from distflow_jax.stream.wire.wire_client import WireClient
from distflow_jax.stream.wire.wire_server import WireServer

TOKEN = b"the token of a run, 32 bytes long"
TWO = (0, 2)  # devices of the trainer, and of the worker
LORA = LoraConfig(rank=2, alpha=6.0)
UNTIED = dataclasses.replace(TINY, tie_embeddings=False)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Nobody is late, but where a test says so."""
    monkeypatch.setattr(weight_client, "PIECE_SECONDS", HANG)


def placed(model, sizes, seed=1):
    return jax.device_put(random_params(model, seed), param_shardings(model, role_mesh(sizes)))


def target_of(model, tensor=2, dtype="float32"):
    model = without_adapters(model)
    mesh = sampler_mesh(tensor, submesh=TWO)
    return pull_target(abstract_params(model), param_shardings(model, mesh), dtype)


def store_of(params, version=0, **options):
    store = WeightStore("a run", chunk_bytes=2048, **options)
    store.put(version, params)
    return store


@contextlib.contextmanager
def served(*shelves, token=TOKEN):
    """Callers of servers that serve weight stores, or methods."""
    with contextlib.ExitStack() as stack:
        clients = []
        for store in shelves:
            methods = store.methods() if isinstance(store, WeightStore) else store
            server = WireServer("127.0.0.1:0", token, methods)
            stack.callback(server.close)
            client = WireClient(f"127.0.0.1:{server.port}", token, "a worker")
            stack.callback(client.close)
            client.server = server
            clients.append(client)
        yield clients


def on(target, params):
    """The values of `params` as `target` has them."""
    return jax.tree.map(
        lambda t, x: jax.device_put(np.asarray(x).astype(t.dtype), t.sharding), target, params
    )


@pytest.mark.parametrize(
    ("model", "sizes", "dtype"),
    [
        (UNTIED, MeshSizes(2, 1, TWO), "bfloat16"),
        (UNTIED, MeshSizes(1, 1, TWO, pipeline=2), "float32"),
        (MIXTURE, MeshSizes(1, 1, TWO, expert=2), "bfloat16"),
        (adapted(TINY, LORA), MeshSizes(1, 2, TWO), "bfloat16"),
    ],
    ids=["fsdp", "pipeline", "experts", "adapters"],
)
def test_a_worker_with_another_layout_holds_the_weights_to_the_bit(model, sizes, dtype):
    """As they are in training, and then in its sampler as by the weight sync within a job."""
    given = placed(model, sizes)
    prepare = functools.partial(lora.merged, scale=LORA.scale)
    with served(store_of(given, 3, prepare=prepare, dtype=dtype)) as clients:
        pulled = WeightPull(clients).pull(3, target_of(model, 2, dtype), HANG)
    plain = without_adapters(model)
    mesh = sampler_mesh(2, submesh=TWO)
    sync = WeightSync(
        param_shardings(plain, jax.sharding.Mesh(mesh.devices, ("replica", "tensor"))),
        mesh,
        dtype,
        SamplerLayout(plain, "cpu", "apart", "auto"),
        prepare,
    )
    if model == plain:
        assert_same_arrays(pulled, on(target_of(model, 2, dtype), given))
    assert_same_arrays(sync(pulled), sync(given))


def test_the_parameters_may_change_after_they_were_put():
    given = placed(UNTIED, MeshSizes(2, 1, TWO))
    want = on(target_of(UNTIED), given)
    store = store_of(given)
    jax.jit(lambda p: jax.tree.map(jnp.zeros_like, p), donate_argnums=0)(given)
    with served(store) as clients:
        assert_same_arrays(WeightPull(clients).pull(0, target_of(UNTIED), HANG), want)


def halves(given, monkeypatch):
    """Shelves of two processes, each with one of the two devices of the trainer."""
    whole, shelves = weight_store._blocks, []
    for device in jax.devices()[:2]:
        mine = functools.partial(
            lambda x, device: [s for s in x.addressable_shards if s.device == device],
            device=device,
        )
        monkeypatch.setattr(weight_store, "_blocks", mine)
        shelves.append(store_of(given))
    monkeypatch.setattr(weight_store, "_blocks", whole)
    return shelves


def test_blocks_come_from_the_processes_that_have_them(monkeypatch):
    given = placed(UNTIED, MeshSizes(2, 1, TWO))
    first, second = halves(given, monkeypatch)
    whole = store_of(given).nbytes
    assert max(first.nbytes, second.nbytes) < 0.6 * whole
    with served(first, second) as clients:
        assert_same_arrays(
            WeightPull(clients).pull(0, target_of(UNTIED), HANG), on(target_of(UNTIED), given)
        )
        assert max(first.bytes_served, second.bytes_served) <= 1.2 * whole / 2
        assert first.bytes_served + second.bytes_served == whole
    with served(first) as clients, pytest.raises(Unreachable, match="with no process that answers"):
        WeightPull(clients).pull(0, target_of(UNTIED), HANG)


def test_the_busiest_of_two_replicas_serves_half():
    given = placed(UNTIED, MeshSizes(1, 1, TWO, data=2))
    shelves = [store_of(given) for _ in range(2)]
    pulled = 0
    with served(*shelves) as clients:
        for tensor in (1, 2, 2):
            pull = WeightPull(clients)
            pull.pull(0, target_of(UNTIED, tensor), HANG)
            pulled += sum(pull.bytes_pulled.values())
    assert pulled == 3 * shelves[0].nbytes == sum(s.bytes_served for s in shelves)
    assert max(s.bytes_served for s in shelves) <= 1.2 * pulled / 2


# -- faults ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def given():
    return placed(UNTIED, MeshSizes(1, 1, (0, 1)))


def corrupted(store, times=1 << 30):
    """The methods of a weight store that hands out damaged pieces."""
    left = iter(range(times))

    def piece(peer, payload):
        data = store.methods()[PIECE](peer, payload)
        return data if next(left, None) is None else bytes([data[0] ^ 1]) + data[1:]

    return dict(store.methods()) | {PIECE: piece}


def test_a_piece_with_a_wrong_checksum_comes_from_another_process(given, caplog):
    store = store_of(given)
    with served(corrupted(store), store) as clients:
        got = WeightPull(clients).pull(0, target_of(UNTIED), HANG)
        assert_same_arrays(got, on(target_of(UNTIED), given))
    assert caplog.text.count("another checksum than the manifest says") == 1
    with served(corrupted(store)) as clients, pytest.raises(Unreachable, match="another checksum"):
        WeightPull(clients).pull(0, target_of(UNTIED), HANG)
    with served(corrupted(store, 1)) as clients, pytest.raises(Unreachable):
        WeightPull(clients).pull(0, target_of(UNTIED), HANG)  # not in part either


def other_manifest(store, change):
    def manifest(peer, payload):
        found = read_manifest(store.methods()[MANIFEST](peer, payload), "")
        return change(found).encode()

    return dict(store.methods()) | {MANIFEST: manifest}


def with_tensor(path, **fields):
    def change(found):
        tensors = dict(found.tensors)
        tensors[path] = dataclasses.replace(tensors[path], **fields)
        return dataclasses.replace(found, tensors=tensors)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_tensor("head", shape=(64, 328)), r"head is served as float32\[64, 328\].*one config"),
        (with_tensor("head", dtype="float16"), r"head is served as float16\[64, 320\].*float32"),
        (with_tensor("head", chunks=()), "head: chunks reach to 0 of 64"),
        (lambda m: dataclasses.replace(m, tensors={}), "of another model: see embed/embedding"),
        (lambda m: dataclasses.replace(m, version=1), "version 1 in place of 0"),
        (lambda m: dataclasses.replace(m, attempt="b"), "another attempt"),
    ],
)
def test_a_manifest_of_other_weights_is_refused(given, change, words):
    store = store_of(given)
    with served(other_manifest(store, change)) as clients:
        with pytest.raises((Refused, Unreachable), match=words):
            WeightPull(clients).pull(0, target_of(UNTIED), HANG, "a run")
        assert store.bytes_served == 0
    with served({MANIFEST: lambda peer, payload: b"{]"}) as clients:
        with pytest.raises(Refused, match="not valid JSON"):
            WeightPull(clients).pull(0, target_of(UNTIED), HANG)


def test_processes_with_different_weights_are_refused(given):
    other = jax.tree.map(lambda x: x + 1, given)
    with served(store_of(given), store_of(other)) as clients:
        with pytest.raises(Refused, match="differs from that of other trainers"):
            WeightPull(clients).pull(0, target_of(UNTIED), HANG)


def test_requests_that_are_none_are_refused(given):
    with served(store_of(given)) as (client,):
        for method in (MANIFEST, PIECE):
            for payload in (b"", b"[]", b"{}", b'{"version":-1}', bytes(1000), b"[" * 5000):
                with pytest.raises(Refused, match="^request: "):
                    client.call(method, payload, HANG)
        for path, start in (("embed/embedding", [1, 1]), ("what", []), ("head", [-1, 0])):
            text = json.dumps({"version": 0, "path": path, "start": start})
            with pytest.raises(Refused, match="there is no chunk of"):
                client.call(PIECE, text.encode(), HANG)


def test_a_trainer_that_ends_is_replaced_by_another(given, caplog):
    store = store_of(given)
    with served(store, store) as clients:
        served_before = store.methods()[PIECE]
        count = iter(range(1 << 30))

        def piece(peer, payload):
            if next(count) == 5:
                threading.Thread(target=clients[0].server.close).start()
            time.sleep(0.01)
            return served_before(peer, payload)

        clients[0].server._methods[PIECE] = piece
        got = WeightPull(clients).pull(0, target_of(UNTIED), HANG)
        assert_same_arrays(got, on(target_of(UNTIED), given))
    assert caplog.text.count("come no longer from") == 1


def test_a_pull_has_a_deadline(given, monkeypatch):
    """By a clock of ours, which goes on with each piece that does not come, and with each wait."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    def call(method, payload, seconds):
        if method == PIECE:
            now[0] += 0.5
            raise Unreachable("a trainer: it is slow")
        return store_of(given).methods()[method]("w", payload)

    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(weight_client, "time", clock)
    trainer = types.SimpleNamespace(address="a trainer", call=call)
    pull = WeightPull([trainer])
    with pytest.raises(Unreachable, match="version 0 of the weights: nobody gives"):
        pull.pull(0, target_of(UNTIED), 0.7)
    with pytest.raises(Unreachable, match="version 9 is not there in time"):
        WeightPull([trainer]).pull(9, target_of(UNTIED), 0.3)


# -- versions --------------------------------------------------------------------------------------


def test_versions_are_kept_until_they_are_forgotten(given, monkeypatch):
    monkeypatch.setattr(weight_store, "LINGER_SECONDS", HANG)
    store = store_of(given, 4)
    store.put(5, jax.tree.map(lambda x: 2 * x, given))
    with served(store) as clients:
        for version, scale in ((4, 1), (5, 2)):
            want = on(target_of(UNTIED), jax.tree.map(lambda x, s=scale: s * x, given))
            assert_same_arrays(WeightPull(clients).pull(version, target_of(UNTIED), HANG), want)
        with pytest.raises(Refused, match=r"version 3 is not kept; versions \[4, 5\] are"):
            WeightPull(clients).pull(3, target_of(UNTIED), HANG)
        store.forget(4)
        assert store.versions == [5]
        WeightPull(clients).pull(4, target_of(UNTIED), HANG)  # it is being pulled: others may end
        store.put(6, given)
        store.forget(5)  # one at most
        with pytest.raises(Refused, match="version 4 is not kept"):
            WeightPull(clients).pull(4, target_of(UNTIED), HANG)
    assert store.nbytes == 2 * store_of(given).nbytes


def test_a_version_that_nobody_pulls_is_forgotten_at_once(given):
    store = store_of(given, 1)
    store.put(2, given)
    store.forget(1)
    assert store.nbytes == store_of(given).nbytes


def test_a_pull_waits_for_a_version_to_come(given):
    store = WeightStore("a run")
    with served(store) as clients, ThreadPoolExecutor(1) as pool:
        run = pool.submit(WeightPull(clients).pull, 2, target_of(UNTIED), HANG)
        time.sleep(0.2)
        store.put(2, given)
        assert_same_arrays(run.result(), on(target_of(UNTIED), given))


def test_a_pull_ends_as_refused_when_trainers_have_another_token(given, caplog):
    caplog.set_level(logging.WARNING)
    with served(store_of(given)) as (client,):
        stranger = WireClient(client.address, b"another token of a run", "stranger")
        with contextlib.closing(stranger), pytest.raises(Refused, match="token is another one"):
            WeightPull([stranger]).pull(0, target_of(UNTIED), HANG)
    assert Manifest("", 0, {"x": TensorSpec((), "float32", ())}).encode()
