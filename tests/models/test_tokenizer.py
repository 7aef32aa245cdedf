"""Text to ids and back, chat templates, and what a tokenizer refuses."""

import json
import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from support.chat_templates import TRAITS
from support.paths import TESTS

from distflow_jax.models.tokenizer import Tokenizer

GOLDEN = TESTS / "golden" / "smollm2.json"
CHAT = [{"role": "user", "content": "Hi"}]


def gguf_fields(**changes):
    """A byte-level BPE tokenizer of few tokens, as GGUF metadata; None takes a key away."""
    tokens = ["<|end|>", "<tool>", *"abch012Ġ", "ab", "abc", "Ġa"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 4] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": ["a b", "ab c", "Ġ a"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    fields |= {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}
    return {key: value for key, value in fields.items() if value is not None}


def hf_folder(path, settings=None, **files):
    """A Hugging Face tokenizer folder: byte-level, with <s> and </s>."""
    backend = Tokenizer.byte_level(300).backend
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "</s>"} if settings is None else settings
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def test_prompt_ids_equal_the_golden_ones(smollm2):
    for entry in json.loads(GOLDEN.read_text("utf-8"))["entries"]:
        text, ids = smollm2.tokenizer.encode_prompt(entry["prompt"])
        assert ids.dtype == np.int32
        assert ids.tolist() == entry["prompt_ids"]
        assert smollm2.tokenizer.decode(ids, skip_special=False) == text


def test_smollm2_special_ids(smollm2):
    tokenizer = smollm2.tokenizer
    assert tokenizer.stop_ids == (2,)
    assert tokenizer.vocab_size == smollm2.config.vocab_size == 49_152
    assert tokenizer.decode([tokenizer.bos_id], skip_special=False) == "<|im_start|>"


@pytest.mark.parametrize("which", ["smollm2", "bytes"])
def test_decode_inverts_encode(which, smollm2):
    tokenizer = smollm2.tokenizer if which == "smollm2" else Tokenizer.byte_level(400)
    rng = random.Random(0)
    alphabet = "ab z\n\t 09é你🌍\u200d'.<|>"
    texts = ["".join(rng.choices(alphabet, k=rng.randrange(40))) for _ in range(200)]
    for text in ["", *texts]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("which", ["smollm2", "bytes"])
def test_every_id_decodes(which, smollm2):
    tokenizer = smollm2.tokenizer if which == "smollm2" else Tokenizer.byte_level(400)
    for index in range(tokenizer.vocab_size):
        assert isinstance(tokenizer.decode([index]), str)
    # beyond the vocabulary too: a padded embedding has rows that no token owns
    assert tokenizer.decode([tokenizer.vocab_size + 5, -1]) == ""


def test_pickled_tokenizer_is_the_same(smollm2):
    for tokenizer in (smollm2.tokenizer, Tokenizer.byte_level(300)):
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert copy.encode_prompt(CHAT)[1].tolist() == tokenizer.encode_prompt(CHAT)[1].tolist()
        assert copy.stop_ids == tokenizer.stop_ids


def test_byte_level_ids_are_the_bytes():
    tokenizer = Tokenizer.byte_level(259)
    everything = bytes(range(256)).decode("latin-1")
    assert tokenizer.encode(everything).tolist() == list(everything.encode("utf-8"))
    assert tokenizer.encode("a<|im_end|>").tolist() == [97, 258]
    assert (tokenizer.pad_id, tokenizer.stop_ids) == (256, (258,))
    assert tokenizer.render(CHAT) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ValueError, match="needs a vocabulary of 259, got 258"):
        Tokenizer.byte_level(258)


def test_string_prompt_is_not_changed(smollm2):
    text = "  <|im_start|> raw\n"
    assert smollm2.tokenizer.render(text) == text


def test_generation_prompt_is_optional(smollm2):
    with_prompt = smollm2.tokenizer.render(CHAT)
    without = smollm2.tokenizer.render(CHAT, add_generation_prompt=False)
    assert with_prompt == without + "<|im_start|>assistant\n"


def test_gguf_merges_digits_and_special_tokens():
    tokenizer = Tokenizer.from_gguf(gguf_fields())
    spelled = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("abc a<|end|>012")]
    assert spelled == ["abc", "Ġa", "<|end|>", "0", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("ab<tool>c<|end|>")) == "ab<tool>c"
    assert tokenizer.decode(tokenizer.encode("ab<|end|>"), skip_special=False) == "ab<|end|>"
    assert tokenizer.pad_id == 0  # no padding token: the end token stands in
    assert tokenizer.bos_id is None


@pytest.mark.parametrize("pre", ["smollm", "default", "llama-bpe", "qwen2"])
def test_gguf_pre_tokenizers_lose_nothing(pre):
    fields = gguf_fields(ggml__pre=pre)
    alphabet = pre_alphabet()
    fields["tokenizer.ggml.tokens"] = ["<|end|>", *alphabet]
    fields["tokenizer.ggml.token_type"] = [3] + [1] * len(alphabet)
    fields["tokenizer.ggml.merges"] = []
    tokenizer = Tokenizer.from_gguf(fields)
    text = "It's 12345 o'clock,\r\n\n  né 你好!!  "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def pre_alphabet():
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def test_llama3_cuts_numbers_in_threes():
    fields = gguf_fields(ggml__pre="llama-bpe")
    fields["tokenizer.ggml.tokens"] = ["<|end|>", *"012", "01", "012", "0120"]
    fields["tokenizer.ggml.token_type"] = [3] + [1] * 6
    fields["tokenizer.ggml.merges"] = ["0 1", "01 2", "012 0"]
    assert Tokenizer.from_gguf(fields).encode("0120").tolist() == [5, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ggml__model": "llama"}, "GGUF tokenizer 'llama' is not supported"),
        ({"ggml__pre": "klingon"}, "pre-tokenizer 'klingon' is not supported"),
        ({"ggml__eos_token_id": None}, "has no end token"),
        ({"ggml__tokens": None}, "lacks tokenizer.ggml.tokens"),
        ({"ggml__merges": ["z z"]}, "no valid tokenizer: .*`z` out of vocabulary"),
    ],
)
def test_gguf_tokenizer_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(gguf_fields(**change))


def test_messages_without_a_template_are_refused():
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.from_gguf(gguf_fields()).render(CHAT)


def test_turn_end_of_the_template_stops_too():
    fields = gguf_fields(chat_template="{{ messages[0].content }}<tool>")
    assert Tokenizer.from_gguf(fields).stop_ids == (0,)
    fields["tokenizer.ggml.eos_token_id"] = 2
    fields["tokenizer.chat_template"] = "{{ messages[0].content }}<|end|>"
    assert Tokenizer.from_gguf(fields).stop_ids == (2, 0)


def test_folder_gives_specials_stops_and_template(tmp_path):
    folder = hf_folder(
        tmp_path,
        {
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
            "chat_template": [
                {"name": "tool_use", "template": "no"},
                {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
            ],
        },
        generation_config__json='{"eos_token_id": [260, 258]}',
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.bos_id == 259
    assert tokenizer.stop_ids == (260, 258)
    assert tokenizer.render(CHAT) == "<s>Hi"
    assert tokenizer.encode_prompt(CHAT)[1].tolist() == [259, ord("H"), ord("i")]


def test_template_file_wins_over_the_config(tmp_path):
    folder = hf_folder(
        tmp_path,
        {"eos_token": "</s>", "chat_template": "old"},
        chat_template__jinja="{%- for m in messages + messages %}\n    {% if not loop.first %}"
        "{% break %}{% endif %}\n{{ m.content | tojson }}\n{%- endfor %}",
    )
    messages = [{"role": "user", "content": "é<"}]
    assert Tokenizer.from_folder(folder).render(messages) == '"é<"'


def test_template_errors_are_the_users(tmp_path):
    def render(template):
        settings = {"eos_token": "</s>", "chat_template": template}
        return Tokenizer.from_folder(hf_folder(tmp_path, settings)).render(CHAT)

    assert len(render("{{ strftime_now('%Y') }}{{ messages[0].content }}")) == 6
    with pytest.raises(ValueError, match="template is not valid"):
        render("{% if %}")
    with pytest.raises(ValueError, match="rejects the messages"):
        render("{{ messages[0].content + 1 }}")


def test_folder_refusals(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    hf_folder(tmp_path, tokenizer_config__json="{")
    with pytest.raises(ValueError, match="tokenizer_config.json: not valid JSON"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_an_answer_ends_as_a_sampled_one_would():
    tokenizer = Tokenizer.byte_level(300)
    text = tokenizer.encode_answer("say:", "hi")
    assert text.tolist() == [*tokenizer.encode("hi"), tokenizer.stop_ids[0]]
    turn = tokenizer.encode_answer(CHAT, "hi")
    assert tokenizer.decode(turn, skip_special=False) == "hi<|im_end|>"
    assert turn[-1] in tokenizer.stop_ids
    messages = [{"role": "assistant", "content": "hi"}]
    assert tokenizer.encode_answer(CHAT, messages).tolist() == turn.tolist()
    assert turn.dtype == text.dtype == np.int32
    # prompt and answer together are what the template writes
    whole = tokenizer.render(
        [*CHAT, {"role": "assistant", "content": "hi"}], add_generation_prompt=False
    )
    start = tokenizer.encode_prompt(CHAT)[1]
    assert tokenizer.encode(whole).tolist()[: len(start) + len(turn)] == [*start, *turn]


def sentencepiece(kind, template):
    """A tokenizer of characters that begins a text with a space, as Llama 2's or as Mistral's."""
    words = ["<s>", "</s>", "▁a", "▁▁", *"\n▁abcdefghijklmnopqrstuvwxyzINST[]/<|>:"]
    ids = {word: number for number, word in enumerate(words)}
    model = tokenizers.models.BPE(vocab=ids, merges=[("▁", "a"), ("▁", "▁")])
    backend = tokenizers.Tokenizer(model)
    if kind == "prepend":
        steps = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        backend.normalizer = tokenizers.normalizers.Sequence(steps)
    else:
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
            prepend_scheme="first", split=False
        )
    backend.add_special_tokens(["<s>", "</s>"])
    settings = {"bos_id": 0, "stop_ids": (1,), "pad_id": 1, "chat_template": template}
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend, vocab_size=len(words), special_tokens=specials, **settings)


@pytest.mark.parametrize("kind", ["prepend", "first"])
@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} "
        "[/INST]{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    ],
    ids=["llama2", "zephyr"],
)
def test_an_answer_begins_without_the_space_that_begins_a_text(kind, template):
    tokenizer = sentencepiece(kind, template)
    asked = [{"role": "user", "content": "what"}]
    whole = tokenizer.render(
        [*asked, {"role": "assistant", "content": "ab"}], add_generation_prompt=False
    )
    found = [*tokenizer.encode_prompt(asked)[1], *tokenizer.encode_answer(asked, "ab")]
    assert found == tokenizer.encode(whole).tolist()[: len(found)]
    assert tokenizer.encode_answer("say:", "ab").tolist() == [*tokenizer.encode("say:ab")[-2:], 1]
    assert tokenizer.encode_answer("say: ", "ab").tolist() == [*tokenizer.encode("ab"), 1]


def qwen_folder(path):
    """Laid out as Qwen2.5-Instruct and Qwen3: a template, two ends, no token for the beginning."""
    backend = Tokenizer.byte_level(300).backend
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(path / "tokenizer.json"))
    settings = {
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "chat_template": TRAITS["plain"],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 259]}))
    (path / "config.json").write_text(json.dumps({"eos_token_id": 258}))
    return path


def test_qwen_ends_at_both_of_its_tokens(tmp_path):
    tokenizer = Tokenizer.from_folder(qwen_folder(tmp_path))
    assert (tokenizer.stop_ids, tokenizer.pad_id, tokenizer.bos_id) == ((258, 259), 259, None)
    # and what was written beforehand ends as a turn does
    answer = tokenizer.encode_answer(CHAT, "ab")
    assert answer.tolist() == [97, 98, 258]
    assert tokenizer.is_chat(tokenizer.render(CHAT))
    turn = tokenizer.encode_turn("ok")
    wanted = "\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(turn, skip_special=False) == wanted


def test_an_answer_begins_as_the_generation_prompt_ends(tmp_path):
    template = TRAITS["plain"].replace("'<|im_start|>assistant\\n'", "'<|im_start|>model\\n'")
    tokenizer = replace(Tokenizer.from_folder(qwen_folder(tmp_path)), chat_template=template)
    with pytest.raises(ValueError, match="begins an answer in a conversation with 'assistant"):
        tokenizer.encode_answer(CHAT, "ab")


def test_gguf_of_qwen_ends_at_both_of_its_tokens():
    fields = gguf_fields(ggml__pre="qwen2")
    fields["tokenizer.ggml.tokens"][:2] = ["<|im_end|>", "<|endoftext|>"]
    assert Tokenizer.from_gguf(fields).stop_ids == (0, 1)
    fields["tokenizer.ggml.pre"] = "smollm"
    assert Tokenizer.from_gguf(fields).stop_ids == (0,)
