"""Texts with calls of tools in the forms of models, and the schemas of these tools.

Imported by tests and by scripts/golden/make_golden_tool_calls.py: needs the standard library alone.
"""

import json
import random

TOOLS = {
    "look_up": {
        "name": "look_up",
        "description": "Looks up the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
    "run": {
        "name": "run",
        "description": "Runs code.",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {"type": "string"},
                "share": {"type": "number"},
                "quiet": {"type": "boolean"},
                "options": {"type": "object"},
                "names": {"type": "array"},
            },
            "required": ["code"],
        },
    },
}
RESULTS = ["84", "a\n<b>"]  # of two calls
_VALUES = {
    "city": ["Rome", "São Paulo", "New York, NY", "x\ny", 'a "quoted" word', "5"],
    "days": [1, 12, -3],
    "code": ["print(1)", "for i in range(3):\n    print(i)", "a < b and c > d", "'''x'''", "{}"],
    "share": [0.5, 2.25],
    "quiet": [True, False],
    "options": [{"a": 1}, {"a": {"b": [1, "c"]}}],
    "names": [["a", "b"], [1, 2]],
}
_BEFORE = ["", "I look it up.\n", "Let me see: 5 < 6.\n\n"]


def _call(rng: random.Random) -> tuple[str, dict]:
    name = rng.choice(list(TOOLS))
    schema = TOOLS[name]["parameters"]
    chosen = [k for k in schema["properties"] if k in schema["required"] or rng.random() < 0.5]
    return name, {key: rng.choice(_VALUES[key]) for key in chosen}


def _hermes(name: str, arguments: dict) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _qwen3_coder(name: str, arguments: dict) -> str:
    written = "".join(
        f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n"
        for k, v in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def _llama3_json(name: str, arguments: dict) -> str:
    return json.dumps({"name": name, "parameters": arguments})


_WRITERS = {"hermes": _hermes, "qwen3_coder": _qwen3_coder, "llama3_json": _llama3_json}


def texts(form: str) -> list[str]:
    """Turns in a form: none, one or (where others read that) several calls, behind text or not."""
    rng, found = random.Random(form), ["No call.", "5 < 6 {x}"]
    write = _WRITERS[form]
    for _ in range(40):
        count, before = rng.choice((1, 1, 2, 3)), rng.choice(_BEFORE)
        if form == "llama3_json":
            count, before = 1, ""
        found.append(before + "\n".join(write(*_call(rng)) for _ in range(count)))
    return found
