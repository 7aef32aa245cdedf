"""Inputs that a stranger wrote to harm: each is refused in one line, with its place and a fix."""

import dataclasses
import json
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.graph_text import read_graph
from support.programs import finished
from support.waiting import HANG

from distflow_jax.checkpoint.checkpointer import step_of
from distflow_jax.data.files import FileDataset, check_rows, find_files
from distflow_jax.models.chat import dialect, render
from distflow_jax.models.chat.render import is_plain
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.models.tokenizer_files import CHATML
from distflow_jax.models.weights.safetensors_file import open_safetensors
from distflow_jax.parsing.bounded_child import BoundedChild
from distflow_jax.parsing.one_line import one_line, shown

CHAT = [{"role": "user", "content": "Hi"}]


def checked(paths, name):
    """A data set of files, all rows checked."""
    return check_rows(FileDataset(paths, name))


def refusal(function, *arguments):
    """The message of a ValueError, which is one line that a terminal can show."""
    with pytest.raises(ValueError) as caught:
        function(*arguments)
    message = str(caught.value)
    assert type(caught.value) is ValueError and message.isprintable(), message
    return message


# -- YAML ------------------------------------------------------------------------------------------

BOMB = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]" for n in range(1, 10))])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "aliases make more than 100000 values of it: write the values out"),
        ("name: &a [*a]\nnodes: []\n", "line 1: an alias inside the value that it names"),
        ("nodes: &a {x: {y: *a}}\n", "line 1: an alias inside the value that it names"),
        ("nodes: " + "[" * 3000 + "\n", "line 1: lists and maps nested deeper than 64: flatten"),
        ("nodes:\n" + "\n".join(" " * n + "-" for n in range(99)), "deeper than 64"),
        ("x" * (1 << 21) + "\n", "at most 1048576 are read"),
        ("name: 2024-99-99\n", "a value cannot be read (month must be in 1..12): quote it"),
        ("name: " + "9" * 5000 + "\n", "a value cannot be read (Exceeds the limit (4300 digits)"),
        ("name: a\n---\nname: b\n", "line 2: but found another document"),
        ("name: [\x1b[2J\n", "special characters are not allowed"),
        ("base: " + "a" * 5000 + "\nnodes: []\n", "there is no built-in graph 'aaa"),
        ("- a\n- b\n", "a graph is a map with 'name' and 'nodes', got ['a', 'b']"),
    ],
)
def test_graphs(text, message):
    assert message in refusal(read_graph, text)


# -- data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[" * 100_000, "objects nested too deeply: flatten them"),
        ('{"prompt": "a", "n": ' + "9" * 5000 + "}", "digits): write it as a string"),
        ('{"prompt": "a\\ud800"}', "half of a character (the lone surrogate '\\ud800')"),
        ('{"prompt": "' + "a" * (17 << 20) + '"}', "has more than 16 MiB: shorten or divide it"),
        ('{"prompt": 7, "\\u001b[2J": 1}', "expected text or a list of messages, got 7"),
    ],
)
@pytest.mark.parametrize("ending", [".jsonl", ".json"])
def test_rows(tmp_path, row, message, ending):
    path = tmp_path / f"data{ending}"
    good = '{"prompt": "1 + 1?", "answer": "2"}'
    path.write_text(f"{good}\n{row}\n" if ending == ".jsonl" else f"[{good},{row}]")
    said = refusal(checked, [path], "data")
    assert message in said and f"{path}, row 2" in said


GOOD_ROW = {"prompt": "1 + 1?", "answer": "2"}
MIB = 1 << 20


def shortened(value):
    """A value of the same type with little in it."""
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    return [shortened(value[0])] if isinstance(value, list) else value[:1] if value != 7 else 7


def write_table(path, rows):
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return path
    writer = pa.ipc.new_file if path.suffix == ".arrow" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as file, writer(file, table.schema) as out:
        out.write_table(table)
    return path


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".feather"])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a " * (30 * MIB // 2), "answer": "2"},
        {"prompt": "\u00e9" * (9 * MIB), "answer": "2"},  # two bytes each
        {"prompt": [{"role": "user", "content": "a" * (6 * MIB)}] * 3, "answer": "2"},
        {"prompt": "a", "answer": "2", "extra_info": {"note": "a" * (17 * MIB)}},
        {"prompt": "a", "answer": "2", "numbers": [7] * (3 * MIB)},
        {"prompt": "a" * (9 * MIB), "answer": "b" * (9 * MIB)},
    ],
    ids=["text", "bytes", "messages", "nested", "numbers", "together"],
)
def test_rows_of_tables_have_the_bound_of_json(tmp_path, ending, row):
    """A text of 30 MiB keeps the tokenizer busy for longer than a watchdog waits for a beat."""
    small = {key: shortened(value) for key, value in row.items()}
    few = [small] * 1500  # into the second part that is converted
    path = write_table(tmp_path / f"rows{ending}", [*few, row, small])
    assert f"{path}, row 1501: has more than 16 MiB: shorten" in refusal(checked, [path], "x")


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".feather"])
def test_large_rows_below_the_bound_are_read(tmp_path, ending):
    rows = [GOOD_ROW | {"extra_info": {"note": "a" * (15 * MIB)}}] * 3
    dataset = checked([write_table(tmp_path / f"rows{ending}", rows)], "x")
    assert len(dataset) == 3 and dataset[2].prompt == "1 + 1?"
    rows = [GOOD_ROW | {"blob": b"x" * (20 * MIB)}, GOOD_ROW | {"blob": b""}]
    dataset = checked([write_table(tmp_path / f"blobs{ending}", rows)], "x")
    assert len(dataset) == 2  # bytes are pictures, which have a bound of their own


def test_a_pattern_does_not_follow_links_in_circles(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD_ROW) + "\n")
    (tmp_path / "again").symlink_to(".")
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    assert find_files(str(tmp_path / "**" / "*.jsonl")) == [tmp_path / "a.jsonl"]


def test_a_folder_among_data_files_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD_ROW) + "\n")
    (tmp_path / "notes").mkdir()
    assert find_files(str(tmp_path)) == [tmp_path / "a.jsonl"]
    (tmp_path / "b.parquet").mkdir()
    said = refusal(checked, find_files(str(tmp_path)), "x")
    assert f"{tmp_path}/b.parquet" in said


def test_an_offset_that_leads_out_of_a_table_is_refused_before_a_row_is_read(tmp_path):
    """Reading such a row ends Python with a segmentation fault."""
    path = tmp_path / "rows.arrow"
    table = pa.table({"prompt": ["aaaa", "bbbb", "cccc"]})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    offsets = struct.pack("<4i", 0, 4, 8, 12)
    whole = path.read_bytes()
    assert whole.count(offsets) == 1
    path.write_bytes(whole.replace(offsets, struct.pack("<4i", 0, 4, 2**30, 2**31 - 1)))
    assert "truncated or damaged: write it again" in refusal(checked, [path], "data")


def test_a_time_that_python_does_not_have_names_its_row(tmp_path):
    path = tmp_path / "rows.arrow"
    times = pa.array([0, 2**62], pa.timestamp("s"))
    table = pa.table({"prompt": ["a", "b"], "answer": ["1", "2"], "at": times})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    said = refusal(checked, [path], "data")
    assert f"{path}, row 2: a value has no form in Python" in said


# -- weights ---------------------------------------------------------------------------------------


def safetensors(path, header, data=b"\0" * 16):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def tensor(begin, end, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"w": tensor(-16, 0)}, "expected usize"),
        ({"w": tensor(0, 16, dtype="F99")}, "unknown variant `F99`"),
        ({"w": tensor(0, 16, shape=[-2, -2])}, "expected usize"),
        ({"w": tensor(0, 16, shape=[2**40, 2**40])}, "overflow computing buffer size"),
        ({"w": tensor(0, 16, shape=[2**70])}, "expected usize"),
        ({"w": tensor(0, 8, shape=[4])}, "invalid shape, data type, or offset"),
        ({"w": tensor(0, 16), "v": tensor(0, 16)}, "invalid offset for tensor"),
        ({"w": tensor(0, 8, shape=[2])}, "file not fully covered"),
        ({"w": tensor(0, 32, shape=[8])}, "file not fully covered"),
        ({"w\x1b[2J": 3}, "invalid type: integer `3`"),
        ({"w\x1b[2J": tensor(0, 8)}, "invalid"),
        ({"w\x1b[2J": tensor(0, 16), "v": tensor(0, 16)}, "invalid offset"),
        ([], "is not a safetensors file"),
    ],
)
def test_headers_of_safetensors(tmp_path, header, message):
    path = safetensors(tmp_path / "w.safetensors", header)
    said = refusal(open_safetensors, path)
    assert message in said and str(path) in said
    assert not header or said.endswith("fetch or export it again")


def test_tensors_of_other_dtypes_lie_beside_weights(tmp_path):
    header = {
        "w": tensor(0, 8, (2,)),
        "ids": tensor(8, 16, (1,), "I64"),
        "no": tensor(16, 16, (0,)),
        "huge": tensor(16, 16, (0, 2**64 - 1)),
    }
    files = open_safetensors(safetensors(tmp_path / "w.safetensors", header))
    assert files.read("w").shape == (2,) and files.read("no").shape == (0,)
    assert "ids has dtype I64, supported are BF16, F16" in refusal(files.read, "ids")
    assert "Maximum allowed dimension exceeded" in refusal(files.read, "huge")


def test_a_file_that_is_cut_after_it_was_opened(tmp_path):
    path = safetensors(tmp_path / "w.safetensors", {"w": tensor(0, 16)})
    files = open_safetensors(path)
    assert files.read("w").shape == (4,)
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path} is not a valid safetensors file, truncated" in refusal(files.read, "w")
    assert "fetch or export it again" in refusal(files.read, "w", slice(0, 1))


def test_what_is_read_of_a_large_tensor_is_what_is_asked_for(tmp_path):
    """32 GiB, a hole of the file system but for the last expert's last row."""
    experts, rows, columns = 1 << 7, 1 << 7, 1 << 19
    end = 4 * experts * rows * columns
    header = {"w": tensor(0, end, (experts, rows, columns)), "x": tensor(end, end + 16)}
    path = safetensors(tmp_path / "w.safetensors", header, b"")
    start = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(start + end)
        file.seek(start + end - 4)
        file.write(np.float32(7).tobytes() + np.arange(4, dtype=np.float32).tobytes())
    files = open_safetensors(path)
    assert files.read("x").tolist() == [0, 1, 2, 3]
    parts = files.tensors["w"].split(experts * rows)
    assert len(parts) == experts * rows
    files.tensors.update(first=parts[0], last=parts[-1])
    assert files.read("last").shape == parts[-1].shape == (1, columns)
    assert files.read("last")[0, -2:].tolist() == [0, 7] and not files.read("first").any()


# -- chat templates --------------------------------------------------------------------------------


def templated(template):
    return dataclasses.replace(Tokenizer.byte_level(300), chat_template=template)


LOOPS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
DOUBLES = "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}"


@pytest.mark.parametrize("template", [LOOPS, "{{ 9 ** (9 ** 9) }}"], ids=["loops", "power"])
def test_templates_without_an_end(template):
    fix = "took more than 2 s of processor time: give the model another chat_template"
    assert fix in refusal(templated(template).render, CHAT)


@pytest.fixture(scope="module")
def patient():
    """A child without a limit of time: another limit is met on every machine."""
    return BoundedChild(
        dialect.__name__, seconds=HANG, memory=render.MEMORY, most_answer=render.MOST_TEXT
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (DOUBLES + "{% endfor %}", "took more than 1024 MiB of memory"),
        ("{{ 'a' * 10 ** 10 }}", "took more than 1024 MiB of memory"),
        ("{{ '%999999999d' % 1 }}", "took more than 1024 MiB of memory"),
        ("{{ 'a' | center(10 ** 10) }}", "took more than 1024 MiB of memory"),
        ("{{ 'a' * 10 ** 8 }}", "gives more than 64 MiB"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself too deeply"),
        ("{{ " + "(" * 5000 + " }}", "calls itself too deeply"),
        ("a" * (2 << 20), "at most 1048576 are read"),
        ("{{ raise_exception('no\x1b[2J') }}", "rejects the messages: no\\x1b[2J"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_templates(template, message, patient, monkeypatch):
    monkeypatch.setattr(render, "_child", lambda: patient)
    assert message in refusal(templated(template).render, CHAT)


def test_a_template_is_rendered_after_another_was_ended():
    refusal(templated(LOOPS).render, CHAT)
    text = "{% set x = messages[0].content %}{{ x }}"
    assert not is_plain(text) and templated(text).render(CHAT) == "Hi"


def test_templates_of_one_loop_need_no_process(smollm2):
    for template in (CHATML, smollm2.tokenizer.chat_template):
        assert is_plain(template)
    for template in (
        *("{% set a = 1 %}", "{{ range(9) }}", "{{ 2 ** 9 }}", "{{ 'a' * 9 }}", "{{ 'a' ~ 'b' }}"),
        *(
            "{% macro f() %}{% endmacro %}",
            "{{ 'a' | center(9) }}",
            "{% for a in 'ab' %}{% endfor %}",
        ),
        "{% for a in messages %}{% for b in messages %}{% endfor %}{% endfor %}",
    ):
        assert not is_plain(template), template


def test_both_ways_of_rendering_give_one_text():
    plain = CHATML + "{{ messages | length }}"
    child = "{% set nothing = 1 %}" + plain
    assert is_plain(plain) and not is_plain(child)
    chat = [*CHAT, {"role": "assistant", "content": "é\U0001f600<|im_end|>"}]
    assert templated(plain).render(chat) == templated(child).render(chat)


# -- messages and names ----------------------------------------------------------------------------


def test_messages_command_no_terminal():
    assert one_line("a\x1b[2Jb\n\u202e\u2028\x9b") == "a\\x1b[2Jb\\n\\u202e\\u2028\\x9b"
    assert one_line("é 漢 \U0001f600") == "é 漢 \U0001f600"
    assert one_line("a" * 9999 + "z").endswith("z") and len(one_line("a" * 9999)) < 1600
    assert shown(10**5000) == "a value of type int" and shown(np.float32(2)) == "np.float32(2.0)"


def test_steps_of_checkpoints_are_plain_numbers():
    assert [step_of(name) for name in ("0", "7", "1200")] == [0, 7, 1200]
    foreign = ["", "007", "²", "٣", "-1", "+1", "1_0", " 1", "1e3", "1.tmp", "9" * 40, "copy of 3"]
    assert [step_of(name) for name in foreign] == [None] * len(foreign)


CONFIG_FILES = {
    "def get_config():\n    raise KeyError('x')\n": "KeyError: 'x' (line 2)",
    "import sys\nsys.exit(0)\n": "SystemExit: 0 (line 2)",
    "def get_config():\n    return get_config()\n": "recursion depth exceeded (line 2)",
    "def get_config(:\n": "SyntaxError: invalid syntax",
    "x = 1\n": "has no get_config(): define it, returning a config",
    "def get_config():\n    pass\n": "get_config() returned None: let it return the config",
    "def get_config():\n    raise ValueError('two\\nlines')\n": "two\\nlines",
}
# each in a process of its own, which need not import anything again
PLANS = """
import os, sys
from distflow_jax.commands import plan_command
from distflow_jax.commands.main import run_script
for path in sys.argv[1:]:
    if os.fork() == 0:
        sys.argv = ["plan.py", f"--config={path}"]
        run_script("plan")
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_config_files(tmp_path):
    paths = [tmp_path / f"mine{number}.py" for number in range(len(CONFIG_FILES))]
    for path, text in zip(paths, CONFIG_FILES, strict=True):
        path.write_text(text)
    done = finished("-W", "ignore", "-c", PLANS, *paths)
    assert done.stdout.split() == ["2"] * len(paths)
    lines = done.stderr.splitlines()
    for path, line, message in zip(paths, lines, CONFIG_FILES.values(), strict=True):
        assert line.startswith(f"error: config file '{path}'") and message in line
