"""Writes tests/golden/tool_calls.json: what SGLang's parsers make of calls of tools, and the schema
that transformers makes of a function.

Of each text of tests/support/tool_calls.py, [name, arguments] of the calls of known tools.

    python -m venv /tmp/golden && /tmp/golden/bin/pip install -r scripts/golden/requirements.txt
    /tmp/golden/bin/pip install pydantic orjson && /tmp/golden/bin/pip install --no-deps sglang
    PYTHONPATH=tests /tmp/golden/bin/python scripts/golden/make_golden_tool_calls.py
"""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import transformers
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.hermes_detector import HermesDetector
from sglang.srt.function_call.llama32_detector import Llama32Detector
from sglang.srt.function_call.qwen3_coder_detector import Qwen3CoderDetector
from support.tool_calls import TOOLS, texts
from transformers.utils import get_json_schema

OUT = Path(__file__).parents[2] / "tests" / "golden" / "tool_calls.json"
PARSERS = {
    "hermes": HermesDetector,
    "qwen3_coder": Qwen3CoderDetector,
    "llama3_json": Llama32Detector,
}


def look_up(city: str, days: int = 1, metric: bool = True, where: dict | None = None):
    """Looks up the weather.

    Args:
        city: The city, in
            English.
        days: How many days.
        metric: Whether in metric units.
        where: A place.
    """


def parsed(detector: Any, text: str) -> list[list[Any]]:
    """[name, arguments] of the calls that a parser finds."""
    tools = [Tool(type="function", function=Function(**tool)) for tool in TOOLS.values()]
    if not detector.has_tool_call(text):
        return []
    calls = detector.detect_and_parse(text, tools).calls
    return [[call.name, json.loads(call.parameters)] for call in calls if call.name in TOOLS]


def main() -> None:
    """Makes the file."""
    forms = {
        name: [parsed(parser(), text) for text in texts(name)] for name, parser in PARSERS.items()
    }
    found = {
        "sglang": importlib.metadata.version("sglang"),
        "transformers": transformers.__version__,
        "schema": get_json_schema(look_up),
        "forms": forms,
    }
    OUT.write_text(json.dumps(found, separators=(",", ":")).replace("]],", "]],\n") + "\n")
    print({name: sum(map(len, entries)) for name, entries in forms.items()})


main()
