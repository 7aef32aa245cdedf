"""A server's token, certificate and folders; and a long prompt stops nobody."""

import contextlib
import json
import threading

import grpc
import numpy as np
import pytest
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
from support import programs
from support.refusals import refused
from support.serving import TOKENIZER, Serving, expected
from support.waiting import HANG

from distflow_jax.serving.access import Access, read_access
from distflow_jax.serving.client import SamplerClient
from distflow_jax.serving.messages import SERVICE, encode, sentence
from distflow_jax.serving.prompts import PromptReader, longest_token

PROMPT = "12 + 35 ="
TOKEN = "an open secret"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(certificate file, key file) for localhost, by openssl."""
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "cert.pem", folder / "key.pem"
    programs.certificate(*files)
    return files


@pytest.fixture(scope="module")
def closed(certificate, tmp_path_factory):
    """A server with token, TLS and a folder that holds the weights "5"."""
    folder = tmp_path_factory.mktemp("runs")
    token = folder.parent / "token"
    token.write_text(TOKEN + "\n")
    access = read_access(str(token), *map(str, certificate), [str(folder)])
    with Serving(access=access) as running:
        running.folder, running.certificate = folder, certificate[0]
        yield running


def test_with_token_and_certificate_a_client_is_answered(closed):
    with SamplerClient(closed.address, token=TOKEN, ca_file=closed.certificate) as client:
        assert client.status()["healthy"]
        (answer,) = client.responses(prompt=PROMPT, uid=5)
        assert answer["tokens"] == expected(PROMPT, uid=5)[0].tokens.tolist()
        assert client.load_weights(str(closed.folder / "2"), 2) == {"version": 2, "step": 20}


@pytest.mark.parametrize("token", ["", "another secret", TOKEN + " "])
def test_without_the_token_no_method_of_either_protocol_answers(closed, token):
    with SamplerClient(closed.address, token=token, ca_file=closed.certificate) as client:
        for call in (
            client.status,
            lambda: client.responses(prompt=PROMPT),
            lambda: client.load_weights(str(closed.folder / "2")),
        ):
            assert "needs a token" in refused(call, grpc.StatusCode.UNAUTHENTICATED)
        stub = jetstream_pb2_grpc.OrchestratorStub(client._channel)
        text = jetstream_pb2.DecodeRequest.TextContent(text=PROMPT)
        request = jetstream_pb2.DecodeRequest(text_content=text, max_tokens=4)
        refused(lambda: list(stub.Decode(request)), grpc.StatusCode.UNAUTHENTICATED)
        health = jetstream_pb2.HealthCheckRequest()
        refused(lambda: stub.HealthCheck(health), grpc.StatusCode.UNAUTHENTICATED)


def test_without_tls_or_with_an_unknown_certificate_nothing_is_sent(closed):
    for how in ({}, {"tls": True}):
        with SamplerClient(closed.address, token=TOKEN, **how) as client:
            refused(client.status, grpc.StatusCode.UNAVAILABLE)


def test_weights_come_only_from_below_the_servers_folders(closed):
    outside = closed.folder.parent / "secrets"
    outside.mkdir()
    (closed.folder / "link").symlink_to(outside)
    (closed.folder / "loop").symlink_to("loop")
    folder = str(closed.folder)
    with SamplerClient(closed.address, token=TOKEN, ca_file=closed.certificate) as client:
        for path in (
            "/etc",
            "2",
            "..",
            str(outside),
            f"{folder}/../secrets",
            f"{folder}/link/5",
            f"{folder}-2/5",
        ):
            details = refused(
                lambda p=path: client.load_weights(p), grpc.StatusCode.PERMISSION_DENIED
            )
            assert "not below a folder that this server was started with" in details
        for path in (f"{folder}/nowhere", f"{folder}/\n\ud800"):
            call = client._load
            data = json.dumps({"path": path}).encode()
            with pytest.raises(grpc.RpcError) as caught:
                call(data, metadata=client._metadata)
            assert caught.value.code() in (
                grpc.StatusCode.NOT_FOUND,
                grpc.StatusCode.INVALID_ARGUMENT,
            ), caught.value
            assert "\n" not in caught.value.details()
        for path in (f"{folder}/a\0b", "x" * 5000):
            code = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED)
            with pytest.raises(grpc.RpcError) as caught:
                client.load_weights(path)
            assert caught.value.code() in code


def test_a_server_without_folders_loads_nothing():
    with Serving(access=Access()) as running, SamplerClient(running.address) as client:
        details = refused(lambda: client.load_weights("2"), grpc.StatusCode.PERMISSION_DENIED)
        assert "start it with --load_folders=FOLDER" in details


@pytest.mark.parametrize("error", [KeyError("w"), TypeError("x"), RuntimeError("a\nb")])
def test_a_checkpoint_that_breaks_its_reader_is_no_unknown_error(error):
    def load(path):
        if path.endswith("5"):
            raise error
        return Serving.load(path)

    with Serving(load=load) as running, SamplerClient(running.address) as client:
        details = refused(lambda: client.load_weights("5"), grpc.StatusCode.INVALID_ARGUMENT)
        assert f"the checkpoint is damaged: {type(error).__name__}" in details
        assert "\n" not in details and client.status()["version"] == 2


# -- flags -----------------------------------------------------------------------------------------


def test_flags_that_do_not_fit_are_errors(certificate, tmp_path):
    cert, key = map(str, certificate)
    empty, text = tmp_path / "empty", tmp_path / "text"
    empty.write_text(" \n")
    text.write_text("no certificate")
    for arguments, words in [
        (("", cert, "", []), "--tls_cert and --tls_key belong together"),
        ((str(empty), "", "", []), "must hold one line of printable ASCII"),
        ((str(tmp_path / "gone"), "", "", []), "--token_file=.*gone does not exist"),
        (("", str(text), key, []), "--tls_cert=.* is not in PEM format"),
        (("", "", "", [str(tmp_path / "gone")]), "--load_folders=.*gone does not exist"),
    ]:
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            read_access(*arguments)
    assert TOKEN not in repr(Access(TOKEN))


def test_an_open_server_is_warned_of(caplog):
    for host in ("127.0.0.1", "[::1]", "localhost"):
        Access().warn_if_open(host)
    Access(TOKEN).warn_if_open("0.0.0.0")
    assert not caplog.text
    Access().warn_if_open("[::]")
    assert "every client that reaches [::] can use this server; set --token_file" in caplog.text


# -- prompts ---------------------------------------------------------------------------------------


def test_what_is_refused_by_length_is_too_long_by_tokens():
    prompts = PromptReader(TOKENIZER, 48)
    assert prompts.max_text == 48 * longest_token(TOKENIZER)
    for text in ("x", "<|im_start|>", "é", "12 + 35 ="):
        least = text * (1 + prompts.max_text // len(text))
        assert len(TOKENIZER.encode(least)) > 48
        with pytest.raises(ValueError, match="48 tokens, which hold at most 576 characters"):
            prompts.encode(least)
        np.testing.assert_array_equal(prompts.encode(text), TOKENIZER.encode(text))
    prompts.close()


def test_errors_are_one_short_line():
    assert sentence(ValueError("a\nb\x1b[31m\ud800é")) == r"a\nb\x1b[31m\ud800é"
    assert len(sentence(ValueError("x" * 10**6))) < 600


def test_requests_that_are_being_read_stop_nobody():
    """The event loop answers while both reading threads are busy."""
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(Serving())
        client = stack.enter_context(SamplerClient(running.address))
        reader, busy, go_on = running.server._prompts, threading.Semaphore(0), threading.Event()
        stack.callback(go_on.set)
        encode_text = reader.encode

        def slow(text):
            busy.release()
            assert go_on.wait(HANG)
            return encode_text(text)

        reader.encode = slow
        channel = stack.enter_context(grpc.insecure_channel(running.address))
        sample = channel.unary_stream(f"/{SERVICE}/Sample")
        request = encode({"prompt": PROMPT, "uid": 5, "max_tokens": 4})
        calls = [sample(request) for _ in range(2)]
        for _ in calls:
            assert busy.acquire(timeout=HANG)
        assert client.status()["running"] == 2
        go_on.set()
        texts = ["".join(json.loads(event).get("text", "") for event in call) for call in calls]
        assert texts[0] == texts[1] != ""
