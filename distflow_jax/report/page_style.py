"""The page around a report: its light and dark style and its script, without external files."""

import html
from typing import Any

_STYLE = """
:root { color-scheme: light; --page: #f8fafc; --card: #fff; --ink: #1f2937; --faint: #64748b;
  --grid: #e2e8f0; --line0: #1d4ed8; --line1: #ea7a0c; --line2: #0f766e; --pale0: #a9c0f5;
  --pale1: #c3cfdf; --wrong: #dc2626; --good: #15803d; --rollout: #15803d; --reward: #b45309;
  --actor: #1d4ed8; --critic: #7e22ce; --reference: #0f766e; --other: #94a3b8; --thread: #cbd5e1; }
:root[data-theme=dark] { color-scheme: dark; --page: #0f172a; --card: #1a2438; --ink: #e5e9f0;
  --faint: #94a3b8; --grid: #2c3a52; --line0: #6ea0ff; --line1: #f6a04d; --line2: #45c4b0;
  --pale0: #3d5a99; --pale1: #475a78; --wrong: #f87171; --good: #4ade80; --rollout: #3fa968;
  --reward: #d98a35; --actor: #5b8cf0; --critic: #ab6be8; --reference: #3aa99d; --other: #64748b;
  --thread: #45546e; }
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 14px/1.45 Inter, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
header { position: sticky; top: 0; z-index: 2; display: flex; flex-wrap: wrap; gap: 6px 16px;
  align-items: center; padding: 10px 24px; background: var(--card);
  border-bottom: 1px solid var(--grid); }
h1 { font-size: 18px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 10px; }
h3 { font-size: 14px; margin: 14px 0 4px; }
h3 i, summary i, .tile i, td i { color: var(--faint); font-style: normal; font-weight: normal; }
nav { display: flex; flex-wrap: wrap; gap: 4px 14px; flex: 1; }
nav a { color: var(--faint); text-decoration: none; }
nav a:hover { color: var(--ink); }
button, input, select { font: inherit; color: inherit; background: var(--page); padding: 3px 9px;
  border: 1px solid var(--grid); border-radius: 6px; }
input { width: 240px; max-width: 100%; margin-bottom: 10px; }
main { max-width: 1500px; margin: 0 auto; padding: 16px 24px 60px; }
section { margin-top: 18px; padding: 16px; background: var(--card); border: 1px solid var(--grid);
  border-radius: 10px; scroll-margin-top: 60px; }
.about, .note { color: var(--faint); margin: 2px 0 10px; overflow-wrap: anywhere; }
.note::before { content: "note: "; }
.status { padding: 2px 10px; border-radius: 10px; border: 1px solid currentColor; }
.status.done { color: var(--good); } .status.open { color: var(--line1); }
.status.none { color: var(--faint); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: 10px; }
.tile { background: var(--card); border: 1px solid var(--grid); border-radius: 10px;
  padding: 10px 12px; overflow-wrap: anywhere; }
.tile b { display: block; font-size: 20px; } .tile span, .tile i { display: block; }
.tile i { font-size: 12px; } .tile.bad b { color: var(--wrong); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 12px; }
figure { margin: 0; padding: 8px 8px 2px; border: 1px solid var(--grid); border-radius: 8px;
  position: relative; }
figcaption { display: flex; justify-content: space-between; gap: 8px; font-size: 12px;
  overflow-wrap: anywhere; }
figure svg { width: 100%; height: auto; display: block; }
.tip { position: absolute; pointer-events: none; background: var(--ink); color: var(--card);
  font-size: 11px; padding: 3px 7px; border-radius: 5px; top: 26px; white-space: pre; }
.rule { position: absolute; pointer-events: none; top: 32px; bottom: 22px; width: 1px;
  background: var(--faint); }
details { margin-top: 10px; } summary { cursor: pointer; margin-bottom: 8px; }
.wide { overflow-x: auto; }
.picture svg { max-width: none; border-radius: 6px; }
:root[data-theme=dark] .picture svg { filter: invert(0.9) hue-rotate(180deg); }
pre { overflow-x: auto; font-size: 12px; }
table { border-collapse: collapse; } td, th { text-align: left; vertical-align: top;
  padding: 5px 10px; border-bottom: 1px solid var(--grid); }
.samples table { width: 100%; table-layout: fixed; }
.samples th:nth-child(1) { width: 70px; } .samples th:nth-child(4) { width: 16%; }
.samples td div { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 190px;
  overflow-y: auto; font-size: 12.5px; }
.config td, .idle td { font-size: 12px; font-family: ui-monospace, monospace;
  overflow-wrap: anywhere; }
"""

_SCRIPT = """
const root = document.documentElement, all = (query) => [...document.querySelectorAll(query)];
const on = (id, event, act) => document.getElementById(id)?.addEventListener(event, act);
root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
on("theme", "click", () => {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
});
on("find", "input", (event) => {
  const word = event.target.value.toLowerCase();
  for (const figure of all("figure"))
    figure.hidden = !figure.dataset.name.toLowerCase().includes(word);
  for (const group of all("details.group")) {
    const left = [...group.querySelectorAll("figure")].some((figure) => !figure.hidden);
    group.hidden = !left;
    if (word) group.open = left;
  }
});
on("file", "change", (event) => {
  for (const table of all(".samples")) table.hidden = table.dataset.file !== event.target.value;
});
on("grep", "input", (event) => {
  const word = event.target.value.toLowerCase();
  for (const row of all(".samples tbody tr"))
    row.hidden = !row.textContent.toLowerCase().includes(word);
});
const nearest = (steps, wanted) => {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < wanted) low = middle; else high = middle;
  }
  return wanted - steps[low] <= steps[high] - wanted ? low : high;
};
for (const figure of all("figure")) {
  let data = null;
  const clear = () => { for (const old of figure.querySelectorAll(".tip, .rule")) old.remove(); };
  figure.addEventListener("mouseleave", clear);
  figure.addEventListener("mousemove", (event) => {
    data ??= JSON.parse(figure.dataset.points);
    const box = figure.querySelector("svg").getBoundingClientRect();
    const outer = figure.getBoundingClientRect(), [first, last] = data.scale;
    const left = LEFT / WIDTH, span = 1 - (LEFT + RIGHT) / WIDTH;
    const share = (event.clientX - box.left) / box.width;
    const wanted = first + ((share - left) / span) * (last - first);
    const steps = data.series[0][1], step = steps[nearest(steps, wanted)];
    const lines = data.series.map(([name, own, values]) => {
      const place = nearest(own, step);
      return own[place] === step ? `${name} ${values[place]}` : null;
    });
    clear();
    const tip = figure.appendChild(document.createElement("div"));
    const rule = figure.appendChild(document.createElement("div"));
    tip.className = "tip";
    rule.className = "rule";
    tip.textContent = [`step ${step}`, ...lines.filter((line) => line !== null)].join("\\n");
    const at = last > first ? (step - first) / (last - first) : 0.5;
    const x = box.left - outer.left + (left + span * at) * box.width;
    rule.style.left = `${x}px`;
    tip.style.left = `${x < outer.width / 2 ? x + 8 : x - 8 - tip.offsetWidth}px`;
  });
}
"""

_PAGE = """<!doctype html>
<html lang="en" data-theme="light">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<script>{script}</script>
</body>
</html>
"""


def fill(*, title: str, body: str, plot: tuple[float, float, float]) -> str:
    """The page. `plot` is a chart's width and its left and right margin, in the chart's pixels."""
    script = _SCRIPT
    for name, value in zip(("WIDTH", "LEFT", "RIGHT"), plot, strict=True):
        script = script.replace(name, f"{value:g}")
    return _PAGE.format(title=title, style=_STYLE, body=body, script=script)


def escaped(value: Any) -> str:
    """Any text as HTML; lone surrogates, which cannot be encoded, are replaced."""
    clean = str(value).encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")
    return html.escape(clean)
