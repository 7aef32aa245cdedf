"""Damaged and hostile files for every parser, each tried in this process under limits.

    python -m support.fuzz FOLDER COUNT [PARSER ...]

Mutation n of a parser is the same in every run. Prints the parser and the number of each mutation
before it is tried, so that the last line names the one that ended the process, and the counts of
what was read and of what was refused at the end. A third outcome ends the process with a traceback.
"""

import faulthandler
import json
import pathlib
import random
import resource
import sys
import zlib

import gguf
import pyarrow as pa
import pyarrow.parquet as pq

from distflow_jax.data.files import FileDataset, check_rows
from distflow_jax.models.chat.render import MOST_TEMPLATE, render
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.weights.source import open_model
from distflow_jax.parsing.json_text import read_text
from support.graph_text import read_graph
from support.model_files import SIZES, random_params, tensors_of, write_gguf, write_hf
from support.waiting import HANG

MEMORY = 6 << 30  # bytes that a mutation may make this process allocate
NASTY = [
    *(b"NaN", b"-1", b"1e999", b"9" * 5000, b"null", b"true", b"[]", b"{}", b'""', b"0", b"1.5"),
    *(b"\\ud800", b"\xff\xfe", b"\x00", b"\x1b[2J", b"[" * 3000, b"{" * 3000, b"&a [*a]", b"*a"),
    *(b"18446744073709551616", b"-9223372036854775808", b'"x"', b"..", b"/dev/zero", b"0" * 40),
    b'{"a":' * 2000,
]
ROWS = [
    {"question": f"{i} + 1?", "answer": f"{i + 1}", "extra_info": {"tags": ["a", "é"], "n": i}}
    for i in range(8)
]
GRAPH = """name: mine
base: grpo
settings: {algorithm.clip_high: 0.28}
nodes:
- {id: &id reward, role: REWARD, type: COMPUTE, reads: [uid, prompt, response, finished],
   writes: [score], deps: [rollout], options: {a: [1, 2.5, null, 1e-6]}, when: {every: 2}}
- id: extra
  role: REFERENCE
  type: MODEL_INFERENCE
  reads: {prompt: prompt}
  writes: [other]
  model: *id
"""
TEMPLATE = """{%- if tools %}{{ tools | tojson }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
  {%- if ns.last < 0 %}{% set ns.last = loop.index0 * 2 %}{% endif %}
  {{- '<|im_start|>' + message.role + '\\n' + message['content'] | trim ~ '<|im_end|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"""


def mutated(content, number, name):
    """Mutation `number` of the bytes of a file."""
    rng = random.Random(zlib.crc32(name.encode()) + number)
    data = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at, kind = rng.randrange(len(data) + 1), rng.randrange(6)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + rng.randint(1, 8)] = rng.randbytes(rng.randint(0, 8))
        elif kind == 2:
            data[at : at + rng.randint(0, 12)] = rng.choice(NASTY)
        elif kind == 3:
            del data[at : at + rng.randint(1, 64)]
        elif kind == 4:
            start = rng.randrange(len(data) + 1)
            data[at:at] = data[start : start + rng.randint(1, 200)]
        elif len(data) > 8:
            data[at % len(data) :] = b"" if rng.random() < 0.5 else bytes(len(data) - at)
    return bytes(data)


def data_rows(path):
    dataset = check_rows(FileDataset([path], "data"))
    return [dataset[row].prompt for row in range(len(dataset))]


def model(path):
    opened = open_model(str(path if path.suffix == ".gguf" else path.parent))
    for _, array in opened.params():
        array.sum()
    prompt = [{"role": "user", "content": "hi"}]
    opened.tokenizer.encode_prompt(prompt if opened.tokenizer.chat_template else "hi")
    return opened


def template(path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    variables = {"messages": messages, "tools": None, "add_generation_prompt": True}
    return render(read_text(path, MOST_TEMPLATE), variables)


def write_seeds(folder):
    """{parser: (a file that it reads, function of its path)}; a model's are in one folder."""
    config = DecoderConfig(**SIZES, max_position=128)
    params = random_params(config)
    for name in ("rows.jsonl", "rows.json"):
        lines = [json.dumps(row) for row in ROWS]
        text = "\n".join(lines) if name.endswith("l") else f"[{', '.join(lines)}]"
        (folder / name).write_text(text)
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, folder / "rows.parquet")
    for name, writer in (("rows.arrow", pa.ipc.new_file), ("rows.feather", pa.ipc.new_stream)):
        with pa.OSFile(str(folder / name), "wb") as file, writer(file, table.schema) as out:
            out.write_table(table)
    (folder / "graph.yaml").write_text(GRAPH)
    (folder / "template.jinja").write_text(TEMPLATE)
    write_gguf(
        folder / "model.gguf",
        config,
        tensors_of(config, params, "gguf"),
        quant=gguf.GGMLQuantizationType.Q8_0,
    )
    scaled = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32}}
    hf = write_hf(folder / "hf", config, tensors_of(config, params), shards=2, **scaled)
    (hf / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE})
    )
    (hf / "generation_config.json").write_text('{"eos_token_id": [258]}')
    found = {
        "jsonl": (folder / "rows.jsonl", data_rows),
        "json": (folder / "rows.json", data_rows),
        "parquet": (folder / "rows.parquet", data_rows),
        "arrow_file": (folder / "rows.arrow", data_rows),
        "arrow_stream": (folder / "rows.feather", data_rows),
        "graph": (folder / "graph.yaml", read_graph),
        "template": (folder / "template.jinja", template),
        "gguf": (folder / "model.gguf", model),
        "safetensors": (hf / "model-00001-of-00002.safetensors", model),
        "index": (hf / "model.safetensors.index.json", model),
    }
    for name in ("config", "tokenizer", "tokenizer_config", "generation_config"):
        found[name] = (hf / f"{name}.json", model)
    return found


PARSERS = [
    *("jsonl", "json", "parquet", "arrow_file", "arrow_stream", "graph", "template", "gguf"),
    *("safetensors", "index", "config", "tokenizer", "tokenizer_config", "generation_config"),
]


def head_of(name, content):
    """How much of a file is mutated: of weights, whose bytes may be anything, the header."""
    if name == "safetensors":
        return 8 + int.from_bytes(content[:8], "little")
    return len(content) // 2 if name == "gguf" else len(content)


def fuzz(name, path, parse, count):
    """{outcome: number of mutations}. Anything but a value and one line of ValueError raises."""
    whole = path.read_bytes()
    parse(path)
    head, outcomes = head_of(name, whole), {"read": 0, "refused": 0}
    for number in range(count):
        print(name, number, flush=True)
        path.write_bytes(mutated(whole[:head], number, name) + whole[head:])
        faulthandler.dump_traceback_later(HANG, exit=True)
        try:
            parse(path)
            outcomes["read"] += 1
        except (ValueError, FileNotFoundError) as error:
            message = str(error)
            assert message and "\n" not in message and message.isprintable(), repr(message)
            assert len(message) < 2000, message
            kind = type(error).__name__
            assert type(error) in (ValueError, FileNotFoundError), (kind, message)
            outcomes["refused"] += 1
        finally:
            faulthandler.cancel_dump_traceback_later()
    path.write_bytes(whole)
    return outcomes


def main(folder, count, *names):
    seeds = write_seeds(pathlib.Path(folder))
    assert list(seeds) == PARSERS
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    found = {name: fuzz(name, *seeds[name], int(count)) for name in names or PARSERS}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
