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

from distflow_jax.flow.wire.caller import Caller
from distflow_jax.flow.wire.calls import Refused, Unreachable
from distflow_jax.flow.wire.door import Door
from distflow_jax.flow.workers import weight_pull, weight_shelf
from distflow_jax.flow.workers.weight_pull import WeightPull, pull_target
from distflow_jax.flow.workers.weight_shelf import MANIFEST, PIECE, WeightShelf
from distflow_jax.flow.workers.weight_slices import Manifest, TensorSpec, read_manifest
from distflow_jax.models import lora
from distflow_jax.models.decoder_config import LoraConfig, adapted, without_adapters
from distflow_jax.models.parameters import abstract_params, param_shardings
from distflow_jax.models.sampler_layout import SamplerLayout
from distflow_jax.parallel.mesh import MeshSizes, role_mesh, sampler_mesh
from distflow_jax.resharding.weight_sync import WeightSync

TOKEN = b"the token of a run, 32 bytes long"
TWO = (0, 2)  # devices of the trainer, and of the worker
LORA = LoraConfig(rank=2, alpha=6.0)
UNTIED = dataclasses.replace(TINY, tie_embeddings=False)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Nobody is late, but where a test says so."""
    monkeypatch.setattr(weight_pull, "PIECE_SECONDS", HANG)


def placed(model, sizes, seed=1):
    return jax.device_put(random_params(model, seed), param_shardings(model, role_mesh(sizes)))


def target_of(model, tensor=2, dtype="float32"):
    model = without_adapters(model)
    mesh = sampler_mesh(tensor, submesh=TWO)
    return pull_target(abstract_params(model), param_shardings(model, mesh), dtype)


def shelf_of(params, version=0, **options):
    shelf = WeightShelf("a run", chunk_bytes=2048, **options)
    shelf.put(version, params)
    return shelf


@contextlib.contextmanager
def served(*shelves, token=TOKEN):
    """Callers of doors that serve shelves, or methods."""
    with contextlib.ExitStack() as stack:
        callers = []
        for shelf in shelves:
            methods = shelf.methods() if isinstance(shelf, WeightShelf) else shelf
            door = Door("127.0.0.1:0", token, methods)
            stack.callback(door.close)
            caller = Caller(f"127.0.0.1:{door.port}", token, "a worker")
            stack.callback(caller.close)
            caller.door = door
            callers.append(caller)
        yield callers


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
    with served(shelf_of(given, 3, prepare=prepare, dtype=dtype)) as callers:
        pulled = WeightPull(callers).pull(3, target_of(model, 2, dtype), HANG)
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
    shelf = shelf_of(given)
    jax.jit(lambda p: jax.tree.map(jnp.zeros_like, p), donate_argnums=0)(given)
    with served(shelf) as callers:
        assert_same_arrays(WeightPull(callers).pull(0, target_of(UNTIED), HANG), want)


def halves(given, monkeypatch):
    """Shelves of two processes, each with one of the two devices of the trainer."""
    whole, shelves = weight_shelf._blocks, []
    for device in jax.devices()[:2]:
        mine = functools.partial(
            lambda x, device: [s for s in x.addressable_shards if s.device == device],
            device=device,
        )
        monkeypatch.setattr(weight_shelf, "_blocks", mine)
        shelves.append(shelf_of(given))
    monkeypatch.setattr(weight_shelf, "_blocks", whole)
    return shelves


def test_blocks_come_from_the_processes_that_have_them(monkeypatch):
    given = placed(UNTIED, MeshSizes(2, 1, TWO))
    first, second = halves(given, monkeypatch)
    whole = shelf_of(given).nbytes
    assert max(first.nbytes, second.nbytes) < 0.6 * whole
    with served(first, second) as callers:
        assert_same_arrays(
            WeightPull(callers).pull(0, target_of(UNTIED), HANG), on(target_of(UNTIED), given)
        )
        assert max(first.bytes_served, second.bytes_served) <= 1.2 * whole / 2
        assert first.bytes_served + second.bytes_served == whole
    with served(first) as callers, pytest.raises(Unreachable, match="with no process that answers"):
        WeightPull(callers).pull(0, target_of(UNTIED), HANG)


def test_the_busiest_of_two_replicas_serves_half():
    given = placed(UNTIED, MeshSizes(1, 1, TWO, data=2))
    shelves = [shelf_of(given) for _ in range(2)]
    pulled = 0
    with served(*shelves) as callers:
        for tensor in (1, 2, 2):
            pull = WeightPull(callers)
            pull.pull(0, target_of(UNTIED, tensor), HANG)
            pulled += sum(pull.bytes_pulled.values())
    assert pulled == 3 * shelves[0].nbytes == sum(s.bytes_served for s in shelves)
    assert max(s.bytes_served for s in shelves) <= 1.2 * pulled / 2


# -- faults ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def given():
    return placed(UNTIED, MeshSizes(1, 1, (0, 1)))


def corrupted(shelf, times=1 << 30):
    """The methods of a shelf that hands out damaged pieces."""
    left = iter(range(times))

    def piece(peer, payload):
        data = shelf.methods()[PIECE](peer, payload)
        return data if next(left, None) is None else bytes([data[0] ^ 1]) + data[1:]

    return dict(shelf.methods()) | {PIECE: piece}


def test_a_piece_with_a_wrong_checksum_comes_from_another_process(given, caplog):
    shelf = shelf_of(given)
    with served(corrupted(shelf), shelf) as callers:
        got = WeightPull(callers).pull(0, target_of(UNTIED), HANG)
        assert_same_arrays(got, on(target_of(UNTIED), given))
    assert caplog.text.count("another checksum than the manifest says") == 1
    with served(corrupted(shelf)) as callers, pytest.raises(Unreachable, match="another checksum"):
        WeightPull(callers).pull(0, target_of(UNTIED), HANG)
    with served(corrupted(shelf, 1)) as callers, pytest.raises(Unreachable):
        WeightPull(callers).pull(0, target_of(UNTIED), HANG)  # not in part either


def other_manifest(shelf, change):
    def manifest(peer, payload):
        found = read_manifest(shelf.methods()[MANIFEST](peer, payload), "")
        return change(found).encode()

    return dict(shelf.methods()) | {MANIFEST: manifest}


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
        (lambda m: dataclasses.replace(m, incarnation="b"), "another incarnation"),
    ],
)
def test_a_manifest_of_other_weights_is_refused(given, change, words):
    shelf = shelf_of(given)
    with served(other_manifest(shelf, change)) as callers:
        with pytest.raises((Refused, Unreachable), match=words):
            WeightPull(callers).pull(0, target_of(UNTIED), HANG, "a run")
        assert shelf.bytes_served == 0
    with served({MANIFEST: lambda peer, payload: b"{]"}) as callers:
        with pytest.raises(Refused, match="not valid JSON"):
            WeightPull(callers).pull(0, target_of(UNTIED), HANG)


def test_processes_with_different_weights_are_refused(given):
    other = jax.tree.map(lambda x: x + 1, given)
    with served(shelf_of(given), shelf_of(other)) as callers:
        with pytest.raises(Refused, match="differs from that of other trainers"):
            WeightPull(callers).pull(0, target_of(UNTIED), HANG)


def test_requests_that_are_none_are_refused(given):
    with served(shelf_of(given)) as (caller,):
        for method in (MANIFEST, PIECE):
            for payload in (b"", b"[]", b"{}", b'{"version":-1}', bytes(1000), b"[" * 5000):
                with pytest.raises(Refused, match="^request: "):
                    caller.call(method, payload, HANG)
        for path, start in (("embed/embedding", [1, 1]), ("what", []), ("head", [-1, 0])):
            text = json.dumps({"version": 0, "path": path, "start": start})
            with pytest.raises(Refused, match="there is no chunk of"):
                caller.call(PIECE, text.encode(), HANG)


def test_a_trainer_that_ends_is_replaced_by_another(given, caplog):
    shelf = shelf_of(given)
    with served(shelf, shelf) as callers:
        served_before = shelf.methods()[PIECE]
        count = iter(range(1 << 30))

        def piece(peer, payload):
            if next(count) == 5:
                threading.Thread(target=callers[0].door.close).start()
            time.sleep(0.01)
            return served_before(peer, payload)

        callers[0].door._methods[PIECE] = piece
        got = WeightPull(callers).pull(0, target_of(UNTIED), HANG)
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
        return shelf_of(given).methods()[method]("w", payload)

    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(weight_pull, "time", clock)
    trainer = types.SimpleNamespace(address="a trainer", call=call)
    pull = WeightPull([trainer])
    with pytest.raises(Unreachable, match="version 0 of the weights: nobody gives"):
        pull.pull(0, target_of(UNTIED), 0.7)
    with pytest.raises(Unreachable, match="version 9 is not there in time"):
        WeightPull([trainer]).pull(9, target_of(UNTIED), 0.3)


# -- versions --------------------------------------------------------------------------------------


def test_versions_are_kept_until_they_are_forgotten(given, monkeypatch):
    monkeypatch.setattr(weight_shelf, "LINGER_SECONDS", HANG)
    shelf = shelf_of(given, 4)
    shelf.put(5, jax.tree.map(lambda x: 2 * x, given))
    with served(shelf) as callers:
        for version, scale in ((4, 1), (5, 2)):
            want = on(target_of(UNTIED), jax.tree.map(lambda x, s=scale: s * x, given))
            assert_same_arrays(WeightPull(callers).pull(version, target_of(UNTIED), HANG), want)
        with pytest.raises(Refused, match=r"version 3 is not kept; versions \[4, 5\] are"):
            WeightPull(callers).pull(3, target_of(UNTIED), HANG)
        shelf.forget(4)
        assert shelf.versions == [5]
        WeightPull(callers).pull(4, target_of(UNTIED), HANG)  # it is being pulled: others may end
        shelf.put(6, given)
        shelf.forget(5)  # one at most
        with pytest.raises(Refused, match="version 4 is not kept"):
            WeightPull(callers).pull(4, target_of(UNTIED), HANG)
    assert shelf.nbytes == 2 * shelf_of(given).nbytes


def test_a_version_that_nobody_pulls_is_forgotten_at_once(given):
    shelf = shelf_of(given, 1)
    shelf.put(2, given)
    shelf.forget(1)
    assert shelf.nbytes == shelf_of(given).nbytes


def test_a_pull_waits_for_a_version_to_come(given):
    shelf = WeightShelf("a run")
    with served(shelf) as callers, ThreadPoolExecutor(1) as pool:
        run = pool.submit(WeightPull(callers).pull, 2, target_of(UNTIED), HANG)
        time.sleep(0.2)
        shelf.put(2, given)
        assert_same_arrays(run.result(), on(target_of(UNTIED), given))


def test_a_pull_ends_as_refused_when_trainers_have_another_token(given, caplog):
    caplog.set_level(logging.WARNING)
    with served(shelf_of(given)) as (caller,):
        stranger = Caller(caller.address, b"another token of a run", "stranger")
        with contextlib.closing(stranger), pytest.raises(Refused, match="token is another one"):
            WeightPull([stranger]).pull(0, target_of(UNTIED), HANG)
    assert Manifest("", 0, {"x": TensorSpec((), "float32", ())}).encode()
