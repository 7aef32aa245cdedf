"""The frame of a report: its style and script in one file, and text made safe for HTML.

The script and the style of a page stand in it, so that it opens from disk without a network. Its
Content-Security-Policy names them by their digests: no other script or style runs, whatever text a
run contains. uPlot (MIT, web/uplot/LICENSE) draws the charts.
"""

import base64
import functools
import hashlib
import html
import importlib.resources
import json
from typing import Any

_MOST_TEXT = 3000  # characters of a prompt or a response
PICTURES = "<div class='pictures'>"  # the start of pictures in a page
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


@functools.cache
def web_file(name: str) -> str:
    """A file of the folder web/."""
    path = importlib.resources.files("distflow_jax.report") / "web" / name
    return path.read_text(encoding="utf-8").strip()


def fill(*, title: str, body: str, data: Any, live: bool) -> str:
    """The page. `data` are JSON values for its script; a live page may fetch from its server."""
    style = f"{web_file('uplot/uPlot.min.css')}\n{web_file('report.css')}"
    scripts = ("uplot/uPlot.iife.min.js", "charts.js", "report.js")
    script = "\n".join(web_file(name) for name in scripts)
    return _PAGE.format(
        policy=policy(style, script, live, pictures=live or PICTURES in body),
        title=title,
        style=style,
        body=body,
        data=json_block(data),
        script=script,
    )


def policy(style: str, script: str, live: bool, *, pictures: bool = False) -> str:
    """The Content-Security-Policy of a page with this style and script.

    `pictures`: whether the page may show images that stand in it.
    """
    images = "; img-src data:" if pictures else ""
    connect = "; connect-src 'self'" if live else ""
    # bars and chips carry their widths and shades as style attributes
    return (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src-elem '{_digest(style)}'; "
        f"style-src-attr 'unsafe-inline'; base-uri 'none'; form-action 'none'{images}{connect}"
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def json_block(data: Any) -> str:
    """JSON that may stand in a script element: no tag can begin in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def escaped(value: Any) -> str:
    """Any text as HTML; lone surrogates, which cannot be encoded, are replaced."""
    clean = str(value).encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")
    return html.escape(clean)


def long_text(value: Any, most: int = _MOST_TEXT) -> str:
    """A value as HTML, with text beyond `most` characters cut."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    more = len(text) - most
    return escaped(text[:most]) + (f"<i> ... {more} more characters</i>" if more > 0 else "")
