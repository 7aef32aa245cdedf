"""Writes tests/golden/tool_calls.json: what others make of calls and results of tools.

Of each text of tests/support/tool_calls.py [name, arguments] of the calls that PyPI's `renderers`
reads; the text that it writes for two results behind an answer; and the schema that transformers
makes of a function.

    python -m venv /tmp/golden && /tmp/golden/bin/pip install -r scripts/golden/requirements.txt
    /tmp/golden/bin/pip install renderers
    PYTHONPATH=tests /tmp/golden/bin/python scripts/golden/make_golden_tool_calls.py
"""

import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

import transformers
from renderers.base import ToolCallParseStatus
from renderers.llama_3 import Llama3Renderer
from renderers.qwen3 import Qwen3Renderer
from renderers.qwen35 import Qwen35Renderer
from support.chat_templates import TRAITS, write_tokenizer
from support.tool_calls import RESULTS, TOOLS, texts
from transformers.utils import get_json_schema

OUT = Path(__file__).parents[2] / "tests" / "golden" / "tool_calls.json"
RENDERERS = {
    "hermes": Qwen3Renderer,
    "qwen3_coder": Qwen35Renderer,
    "llama3_json": Llama3Renderer,
}
# tokens of these models that the tests' tokenizer lacks
MORE = ["<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
MORE += ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
MORE += ["<|end_of_text|>", "<|eom_id|>"]


def look_up(city: str, days: int = 1, metric: bool = True, where: dict | None = None):
    """Looks up the weather.

    Args:
        city: The city, in
            English.
        days: How many days.
        metric: Whether in metric units.
        where: A place.
    """


def parsed(renderer: Any, ids: list[int]) -> list[list[Any]]:
    """[name, arguments] of the calls that are read."""
    tools = [{"type": "function", "function": tool} for tool in TOOLS.values()]
    calls = renderer.parse_response(ids, tools=tools).tool_calls
    return [[c.name, c.arguments] for c in calls if c.status == ToolCallParseStatus.OK]


def results(renderer: Any, tokenizer: Any) -> str:
    """What follows an answer, up to the next one."""
    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": "zqz"}]
    messages += [{"role": "tool", "content": result} for result in RESULTS]
    return tokenizer.decode(renderer.render_ids(messages)).partition("zqz")[2]


def main() -> None:
    """Makes the file."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), TRAITS["plain"])
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([transformers.AddedToken(t, special=True) for t in MORE])
    forms, written = {}, {}
    for name, make in RENDERERS.items():
        renderer = make(tokenizer)
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts(name)]
        forms[name] = [parsed(renderer, each) for each in ids]
        written[name] = results(renderer, tokenizer)
    found = {
        "renderers": importlib.metadata.version("renderers"),
        "transformers": transformers.__version__,
        "schema": get_json_schema(look_up),
        "results": written,
        "forms": forms,
    }
    OUT.write_text(json.dumps(found, separators=(",", ":")).replace("]],", "]],\n") + "\n")
    print({name: sum(map(len, entries)) for name, entries in forms.items()}, written)


main()
