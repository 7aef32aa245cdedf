"""Images in messages: data URIs alone, and answers to them over real gRPC.

Nightly: an answer over gRPC is that of the sampler.
"""

import base64
import dataclasses
import io
import json

import grpc
import numpy as np
import pytest
from PIL import Image as Pictures
from support.serving import Serving
from support.tiny_model import mesh_of, random_params

from distflow_jax.images.picture_files import PictureFile
from distflow_jax.images.placing import SeeingTokenizer, read_image
from distflow_jax.models.vision.chunks import patch_room
from distflow_jax.models.weights.source import open_model
from distflow_jax.observe.compilations import Compilations
from distflow_jax.planning.run_data import prompt_encoder
from distflow_jax.rollout.decode_state import EngineConfig
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import run_requests
from distflow_jax.serving import prompts
from distflow_jax.serving.client import SamplerClient
from distflow_jax.serving.jetstream import service_config
from distflow_jax.serving.messages import Limits, sample_request
from distflow_jax.serving.prompts import PromptReader

SOURCE = (
    "random:smolvlm?hidden=32&layers=2&heads=2&kv_heads=1&mlp=64&vocab=272&max_position=512"
    "&vision_hidden=32&vision_layers=2&vision_heads=2&patch=8&image=32"
)
LIMITS = Limits(256, 16, 16, 8, 272)


def picture(height=20, width=30, seed=0):
    """The bytes of a PNG."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    out = io.BytesIO()
    Pictures.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def uri_of(content):
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def part(url):
    return {"type": "image_url", "image_url": {"url": url}}


def message(*parts, role="user"):
    return {"role": role, "content": list(parts)}


@pytest.fixture(scope="module")
def seeing():
    encoder = prompt_encoder(open_model(SOURCE), 64)
    assert isinstance(encoder, SeeingTokenizer)
    return encoder


@pytest.fixture(scope="module")
def reader(seeing):
    reader = PromptReader(open_model(SOURCE).tokenizer, LIMITS.max_prompt, seeing)
    yield reader
    reader.close()


def read(reader, *messages, **more):
    data = json.dumps({"messages": messages, **more}).encode()
    return sample_request(data, LIMITS, reader, lambda: 7).group.prompt


def test_a_data_uri_is_the_image_that_a_file_would_be(reader, seeing):
    text = {"type": "text", "text": "How many? <image>"}
    files = [picture(), picture(40, 16, seed=1)]
    prompt = read(reader, message(part(uri_of(files[0])), text, part(uri_of(files[1]))))
    sources = [PictureFile("file", content) for content in files]
    images = [read_image(source, seeing.layout) for source in sources]
    assert [x.digest for x in prompt.images] == [x.digest for x in images]
    for mine, wanted in zip(prompt.images, images, strict=True):
        np.testing.assert_array_equal(mine.patches.patches, wanted.patches.patches)
    features = sum(x.patches.features for x in images)
    assert (prompt.patch >= 0).sum() == features and prompt.patch.max() == features - 1
    assert len(prompt.tokens) == len(prompt.patch)
    assert prompt.text.count("How many? <image>") == 1


def test_a_list_of_texts_is_their_text(reader):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    prompt, plain = read(reader, message(*parts)), read(reader, {"role": "user", "content": "ab"})
    assert prompt.tokens.tolist() == plain.tokens.tolist()
    assert prompt.images == () and prompt.patch is None


GOOD = part(uri_of(picture()))
BAD = [
    ([message(part("https://example.org/a.png"))], "message 0, part 0: an image must be a data"),
    ([message(part("/etc/passwd"))], "fetches nothing and opens no file, got '/etc/passwd'"),
    ([message(part("file:///etc/passwd"))], "must be a data URI"),
    ([message(part("data:image/png,xx"))], "must be like data:image/png;base64"),
    ([message(part("data:image/png;base64,@@"))], "the data URI is not valid base64"),
    ([message(part(uri_of(b"nothing")))], "message 0, part 0: not a picture in a known format"),
    ([message(part(uri_of(picture()[:60])))], "truncated or damaged"),
    ([message(part(None))], "an image must be a data URI"),
    ([message({"type": "image", "image": "a.png"})], "message 0, part 0 must be"),
    ([message({"type": "video_url", "video_url": "x"})], "message 0, part 0 must be"),
    ([message("text")], "message 0, part 0 must be"),
    ([message({"type": "text", "text": 3})], "message 0, part 0 must be"),
    ([message(GOOD, role="assistant")], "message 0 of the assistant has an image"),
    ([message(*[GOOD] * 17)], "17 images are too many; give at most 16"),
    ([message(GOOD, {"type": "text", "text": "\ud83d"})], "the prompt is not valid Unicode"),
    ([message(GOOD, {"type": "text", "text": "x" * 100_000})], "the prompt has 100000 characters"),
    ([message(GOOD, {"type": "text", "text": "x" * 256})], "tokens; this server reads at most 256"),
    ([message(part(uri_of(picture(2, 500))))], "a side may be at most 200 times the other"),
]


@pytest.mark.parametrize(("messages", "says"), BAD)
def test_what_is_no_image_is_said_in_one_line(reader, messages, says):
    with pytest.raises(ValueError) as error:
        read(reader, *messages)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_sizes_are_bounded_before_anything_is_decoded(reader, monkeypatch):
    monkeypatch.setattr(prompts, "MAX_PIXELS", 599)
    monkeypatch.setattr(PictureFile, "pixels", None)  # never called
    with pytest.raises(ValueError, match="part 0: the image has 30 x 20 pixels; .* at most 599"):
        read(reader, message(GOOD))
    monkeypatch.setattr(prompts, "MAX_URI_BYTES", 100)
    with pytest.raises(ValueError, match="the images have 0 MiB as data URIs; give at most 0"):
        read(reader, message(GOOD))


def test_a_model_without_a_tower_says_so():
    blind = PromptReader(open_model("random:llama?hidden=32&layers=1").tokenizer, 256)
    assert blind.image_bytes == 0
    with pytest.raises(ValueError, match="part 0 is an image, and the model has no vision tower"):
        read(blind, message(GOOD))
    blind.close()


@pytest.mark.slow
def test_an_answer_to_a_picture_is_that_of_the_sampler(seeing):
    """Over gRPC, with a request above 4 MiB; a second picture compiles nothing."""
    source = open_model(SOURCE)
    config = EngineConfig(
        slots=4,
        max_prompt=LIMITS.max_prompt,
        max_response=16,
        tokens_per_call=4,
        page_size=16,
        group_size=4,
        max_read=272,
        images=patch_room(source.config.vision, 256, longest=256, image_tokens=64, rotary=False),
    )
    mesh = mesh_of(1, 1, names=("data", "tensor"))
    options = dict(stop_ids=(258,), seed=3, tokenizer=source.tokenizer)
    first, second = (
        RolloutEngine(source.config, c, mesh, **options) for c in (config, service_config(config))
    )
    params = first.load_params(random_params(source.config, 0))
    with Serving(
        (first, second), lambda path: (params, 0), tokenizer=source.tokenizer, seeing=seeing
    ) as serving:
        with SamplerClient(serving.address) as client:
            counter, found = Compilations(), []
            for seed in range(2):
                asked = [message(part(uri_of(picture(seed=seed))), {"type": "text", "text": "?"})]
                found += client.responses(messages=asked, uid=1, temperature=0.0)
            assert counter.take() == 0, counter.names()
            counter.close()
            large = [message(part(uri_of(picture(1200, 1300))), {"type": "text", "text": "?"})]
            assert len(large[0]["content"][0]["image_url"]["url"]) > 4 << 20
            assert client.responses(messages=large)[0]["tokens"]
            with pytest.raises(grpc.RpcError) as error:
                client.responses(messages=[message(part("https://example.org/a.png"))])
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    reader = PromptReader(source.tokenizer, LIMITS.max_prompt, seeing)
    for seed, answer in enumerate(found):
        asked = message(part(uri_of(picture(seed=seed))), {"type": "text", "text": "?"})
        prompt = dataclasses.replace(read(reader, asked), counter=1, row=1)
        request = GroupRequest(prompt, SamplingParams(1, 16, 0.0))
        (wanted,) = run_requests(first, params, first.init_decode_state(), [request])[1]
        assert answer["tokens"] == wanted.tokens.tolist()
        np.testing.assert_allclose(answer["logp"], wanted.logp, atol=1e-5)
    reader.close()
