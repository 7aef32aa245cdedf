"""Workers hold the trainers' weights bit for bit, whatever their layout, and nothing else.

Chunks: each element lies in exactly one of them.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import random
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

from distflow_jax.config.training_config import LoraConfig
from distflow_jax.models import lora
from distflow_jax.models.decoder_config import adapted, without_adapters
from distflow_jax.models.parameters import abstract_params, param_shardings
from distflow_jax.models.sampler_layout import SamplerLayout
from distflow_jax.parallel.mesh import MeshSizes, role_mesh, sampler_mesh
from distflow_jax.resharding.weight_sync import WeightSync
from distflow_jax.stream import weight_client, weight_store
from distflow_jax.stream.weight_client import check_grid, pull_target, pull_weights
from distflow_jax.stream.weight_store import (
    ChunkSpec,
    Manifest,
    TensorSpec,
    WeightStore,
    checksum,
    cut,
    read_manifest,
)
from distflow_jax.stream.weight_wire import CHUNK, MANIFEST, WireWeights, weight_methods
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
    monkeypatch.setattr(weight_client, "CHUNK_SECONDS", HANG)


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
def served(*stores):
    """Clients of servers that serve weight stores, or methods; they count bytes of chunks."""
    with contextlib.ExitStack() as stack:
        clients = []
        for store in stores:
            methods = weight_methods(store) if isinstance(store, WeightStore) else store
            server = WireServer("127.0.0.1:0", TOKEN, methods)
            stack.callback(server.close)
            clients.append(Counting(server))
            stack.callback(clients[-1].close)
        yield clients


class Counting(WireClient):
    """A client that counts the bytes of chunks."""

    def __init__(self, server):
        super().__init__(f"127.0.0.1:{server.port}", TOKEN, "a worker")
        self.server, self.sizes = server, []

    def call(self, method, payload, seconds):
        data = super().call(method, payload, seconds)
        if method == CHUNK:
            self.sizes.append(len(data))
        return data

    @property
    def pulled(self):
        return sum(self.sizes)


def pull(clients, version=0, target=None, attempt=""):
    sources = [WireWeights(client) for client in clients]
    return pull_weights(sources, version, target or target_of(UNTIED), HANG, attempt)


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
        pulled = pull(clients, 3, target_of(model, 2, dtype))
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
        assert_same_arrays(pull(clients), want)


def halves(given, monkeypatch):
    """The stores of two processes, each with one of the two devices of the trainer."""
    whole, stores = weight_store._blocks, []
    for device in jax.devices()[:2]:
        mine = functools.partial(
            lambda x, device: [s for s in x.addressable_shards if s.device == device],
            device=device,
        )
        monkeypatch.setattr(weight_store, "_blocks", mine)
        stores.append(store_of(given))
    monkeypatch.setattr(weight_store, "_blocks", whole)
    return stores


def test_blocks_come_from_the_processes_that_have_them(monkeypatch):
    given = placed(UNTIED, MeshSizes(2, 1, TWO))
    first, second = halves(given, monkeypatch)
    whole = store_of(given).nbytes
    assert max(first.nbytes, second.nbytes) < 0.6 * whole
    with served(first, second) as clients:
        assert_same_arrays(pull(clients), on(target_of(UNTIED), given))
        assert max(client.pulled for client in clients) <= 1.2 * whole / 2
        assert sum(client.pulled for client in clients) == whole
    with served(first) as clients, pytest.raises(Unreachable, match="with no process that answers"):
        pull(clients)


def test_the_busiest_of_two_replicas_serves_half():
    given = placed(UNTIED, MeshSizes(1, 1, TWO, data=2))
    stores = [store_of(given) for _ in range(2)]
    with served(*stores) as clients:
        for tensor in (1, 2, 2):
            pull(clients, 0, target_of(UNTIED, tensor))
        pulled = [client.pulled for client in clients]
    assert sum(pulled) == 3 * stores[0].nbytes
    assert max(pulled) <= 1.2 * sum(pulled) / 2


# -- faults ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def given():
    return placed(UNTIED, MeshSizes(1, 1, (0, 1)))


def corrupted(store, times=1 << 30):
    """The methods of a weight store that hands out damaged chunks."""
    left = iter(range(times))

    def chunk(peer, payload):
        data = weight_methods(store)[CHUNK](peer, payload)
        return data if next(left, None) is None else bytes([data[0] ^ 1]) + data[1:]

    return dict(weight_methods(store)) | {CHUNK: chunk}


def test_a_chunk_with_a_wrong_checksum_comes_from_another_process(given, caplog):
    store = store_of(given)
    with served(corrupted(store), store) as clients:
        assert_same_arrays(pull(clients), on(target_of(UNTIED), given))
    assert caplog.text.count("another checksum than the manifest says") == 1
    with served(corrupted(store)) as clients, pytest.raises(Unreachable, match="another checksum"):
        pull(clients)
    with served(corrupted(store, 1)) as clients, pytest.raises(Unreachable):
        pull(clients)  # not in part either


def other_manifest(store, change):
    def manifest(peer, payload):
        found = read_manifest(weight_methods(store)[MANIFEST](peer, payload))
        return change(found).encode()

    return dict(weight_methods(store)) | {MANIFEST: manifest}


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
        (with_tensor("head", chunks=()), "process that answers: head: 0 of 1 chunks"),
        (lambda m: dataclasses.replace(m, tensors={}), "of another model: see embed/embedding"),
        (lambda m: dataclasses.replace(m, version=1), "version 1 in place of 0"),
        (lambda m: dataclasses.replace(m, attempt="b"), "another attempt"),
    ],
)
def test_a_manifest_of_other_weights_is_refused(given, change, words):
    store = store_of(given)
    with served(other_manifest(store, change)) as clients:
        with pytest.raises((Refused, Unreachable), match=words):
            pull(clients, attempt="a run")
        assert not clients[0].pulled
    with served({MANIFEST: lambda peer, payload: b"{]"}) as clients:
        with pytest.raises(Refused, match="the manifest cannot be read"):
            pull(clients)


def test_processes_with_different_weights_are_refused(given):
    other = jax.tree.map(lambda x: x + 1, given)
    with served(store_of(given), store_of(other)) as clients:
        with pytest.raises(Refused, match="differs from that of other trainers"):
            pull(clients)


def test_requests_that_are_none_are_refused(given):
    with served(store_of(given)) as (client,):
        for method in (MANIFEST, CHUNK):
            for payload in (
                b"",
                b"[]",
                b"{}",
                b'{"version":-1}',
                bytes(1000),
                b"[" * 5000,
                b"[" * 70_000,
            ):
                with pytest.raises(Refused, match="^request: "):
                    client.call(method, payload, HANG)
        for path, start in (("embed/embedding", [1, 1]), ("what", []), ("head", [-1, 0])):
            text = json.dumps({"version": 0, "path": path, "start": start})
            with pytest.raises(Refused, match="there is no chunk of"):
                client.call(CHUNK, text.encode(), HANG)


def test_a_trainer_that_ends_is_replaced_by_another(given, caplog):
    store = store_of(given)
    with served(store, store) as clients:
        served_before = weight_methods(store)[CHUNK]
        count = iter(range(1 << 30))

        def chunk(peer, payload):
            if next(count) == 5:
                threading.Thread(target=clients[0].server.close).start()
            time.sleep(0.01)
            return served_before(peer, payload)

        clients[0].server._methods[CHUNK] = chunk
        assert_same_arrays(pull(clients), on(target_of(UNTIED), given))
    assert caplog.text.count("come no longer from") == 1


def test_a_pull_has_a_deadline(given, monkeypatch):
    """By a clock of ours, which goes on with each chunk that does not come, and with each wait."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    def call(method, payload, seconds):
        if method == CHUNK:
            now[0] += 0.5
            raise Unreachable("a trainer: it is slow")
        return weight_methods(store_of(given))[method]("w", payload)

    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(weight_client, "time", clock)
    trainer = WireWeights(types.SimpleNamespace(address="a trainer", call=call))
    with pytest.raises(Unreachable, match="version 0 of the weights: nobody gives"):
        pull_weights([trainer], 0, target_of(UNTIED), 0.7)
    with pytest.raises(Unreachable, match="version 9 is not there in time"):
        pull_weights([trainer], 9, target_of(UNTIED), 0.3)


# -- versions --------------------------------------------------------------------------------------


def test_versions_are_kept_until_they_are_forgotten(given, monkeypatch):
    monkeypatch.setattr(weight_store, "LINGER_SECONDS", HANG)
    store = store_of(given, 4)
    store.put(5, jax.tree.map(lambda x: 2 * x, given))
    with served(store) as clients:
        for version, scale in ((4, 1), (5, 2)):
            want = on(target_of(UNTIED), jax.tree.map(lambda x, s=scale: s * x, given))
            assert_same_arrays(pull(clients, version), want)
        with pytest.raises(Refused, match=r"version 3 is not kept; versions \[4, 5\] are"):
            pull(clients, 3)
        store.forget(4)
        assert store.versions == [5]
        pull(clients, 4)  # it is being pulled: others may end
        store.put(6, given)
        store.forget(5)  # one at most
        with pytest.raises(Refused, match="version 4 is not kept"):
            pull(clients, 4)
    assert store.nbytes == 2 * store_of(given).nbytes


def test_a_version_that_nobody_pulls_is_forgotten_at_once(given):
    store = store_of(given, 1)
    store.put(2, given)
    store.forget(1)
    assert store.nbytes == store_of(given).nbytes


def test_a_pull_waits_for_a_version_to_come(given):
    store = WeightStore("a run")
    with served(store) as clients, ThreadPoolExecutor(1) as pool:
        run = pool.submit(pull, clients, 2)
        time.sleep(0.2)
        store.put(2, given)
        assert_same_arrays(run.result(), on(target_of(UNTIED), given))


def test_a_store_is_a_source_of_its_own_process(given):
    store = store_of(given)
    found = pull_weights([store], 0, target_of(UNTIED), HANG, "a run")
    assert_same_arrays(found, on(target_of(UNTIED), given))


def test_a_pull_ends_as_refused_when_trainers_have_another_token(given):
    with served(store_of(given)) as (client,):
        stranger = WireClient(client.address, b"another token of a run", "stranger")
        with contextlib.closing(stranger), pytest.raises(Refused, match="token differs"):
            pull([stranger])


# -- chunks ----------------------------------------------------------------------------------------


def cells(chunk):
    return set(
        itertools.product(*(range(a, a + n) for a, n in zip(chunk.start, chunk.shape, strict=True)))
    )


def blocks(draw, shape):
    """Equal blocks of a tensor, as a sharding has them."""
    parts = [draw.choice([d for d in range(1, n + 1) if n % d == 0] or [1]) for n in shape]
    size = [n // p for n, p in zip(shape, parts, strict=True)]
    for place in itertools.product(*map(range, parts)):
        yield tuple(p * n for p, n in zip(place, size, strict=True)), tuple(size)


@pytest.mark.parametrize("seed", range(100))
def test_each_element_lies_in_exactly_one_chunk(seed):
    draw = random.Random(seed)
    shape = tuple(draw.randint(seed % 10 > 0, 9) for _ in range(draw.randint(0, 3)))
    most = draw.choice([1, 8, 40, 10_000])
    chunks = [c for start, size in blocks(draw, shape) for c in cut(start, size, 4, most)]
    found = [cell for chunk in chunks for cell in cells(chunk)]
    assert sorted(found) == sorted(itertools.product(*map(range, shape)))
    assert all(c.size * 4 <= max(most, 4) for c in chunks)
    check_grid("x", shape, chunks)
    for chunk in chunks:
        less = [c for c in chunks if c != chunk]
        with pytest.raises(ValueError, match="^x: "):
            check_grid("x", shape, less)
        with pytest.raises(ValueError, match="^x: "):
            check_grid("x", shape, [*chunks, chunk])


def manifest():
    chunks = tuple(
        ChunkSpec(c.start, c.shape, checksum(b"%d" % i))
        for i, c in enumerate(cut((0, 0), (4, 6), 2, 24))
    )
    tensors = {"embed/embedding": TensorSpec((4, 6), "bfloat16", chunks)}
    return Manifest("a1", 7, tensors)


def test_a_manifest_is_read_as_it_was_written():
    assert read_manifest(manifest().encode()) == manifest()
