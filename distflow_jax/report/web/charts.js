"use strict";
// Line charts over steps, drawn by uPlot: `makeCharts` builds one figure per chart and draws those
// in view.

const LIMIT = 1e150; // differences of larger values could overflow
const MARKED = 40; // most points that are marked one by one
const NUM_COLORS = 7, DASHES = [[], [8, 4], [2, 3]]; // lines beyond the colours are dashed
const HEIGHT = 176, TALL = 380;

const settings = { smooth: 0, axis: "step", log: false, zoom: null };

const formatValue = (value) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e4 && size < 1e6) return Math.round(value).toLocaleString("en-US");
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"]])
    if (size >= unit && size < 1e4 * unit) return Number((value / unit).toPrecision(3)) + letter;
  if (size === 0 || (size >= 1e-3 && size < 1e4)) return String(Number(value.toPrecision(4)));
  return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
};

const formatSeconds = (seconds) => {
  const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  return `${Math.floor(whole / 3600)}h${two(Math.floor((whole % 3600) / 60))}m`;
};

const formatX = (value) =>
  settings.axis === "seconds" ? formatSeconds(value) : formatValue(value);

const formatTick = (value, step) => {
  if (value === 0) return "0";
  let digits = 0; // of a step of 0.25 two, of 0.2 one
  const isWhole = (number) => number > 0.5 && Math.abs(number - Math.round(number)) < 1e-6;
  while (digits < 9 && !isWhole(step * 10 ** digits)) digits++;
  return digits > 4 || Math.abs(value) >= 1e4 ? formatValue(value) : value.toFixed(digits);
};

// Places of a log axis's lines from `low` to `high`, both above 0: some 3 to 8 of them. uPlot's own
// do not end for a range that begins at an uneven number.
const logTicks = (low, high) => {
  const decades = Math.log10(high / low), ticks = [];
  if (decades < 0.7) { // nearly linear
    const least = (high - low) / 5, power = 10 ** Math.floor(Math.log10(least));
    const step = power * [1, 2, 5, 10].find((n) => n * power >= 0.999 * least);
    for (let n = Math.ceil(low / step); n * step <= high; n++) ticks.push(n * step);
    return ticks;
  }
  const every = Math.ceil(decades / 6), parts = decades < 2.5 ? [1, 2, 5] : [1];
  for (let n = Math.floor(Math.log10(low)); n <= Math.log10(high); n++)
    if (n % every === 0) ticks.push(...parts.map((part) => part * 10 ** n));
  return ticks.filter((tick) => tick >= low && tick <= high);
};

// The sums of an axis at given steps, between whose known points they are linear.
const along = (steps, [known, sums]) => {
  let place = 0;
  return steps.map((step) => {
    while (place < known.length - 1 && known[place + 1] < step) place++;
    if (!known.length) return step;
    const before = step < known[0] ? [0, 0] : [known[place], sums[place]];
    const next = step < known[0] ? 0 : Math.min(place + 1, known.length - 1);
    const span = known[next] - before[0];
    return span > 0 ? before[1] + ((step - before[0]) / span) * (sums[next] - before[1]) : sums[next];
  });
};

// Exponential moving average; the first values are not drawn towards 0.
const smoothed = (values, weight) => {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + (1 - weight) * value;
    total = total * weight + (1 - weight);
    return sum / total;
  });
};

const theme = () => {
  const probe = document.body.appendChild(document.createElement("i"));
  const color = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const found = {
    faint: color("faint"), grid: color("grid"), wrong: color("wrong"),
    lines: [...Array(NUM_COLORS).keys()].map((i) => color(`line${i}`)),
  };
  probe.remove();
  return found;
};

const withAlpha = (rgb, alpha) => rgb.replace("rgb(", "rgba(").replace(")", `, ${alpha})`);

class Chart {
  // `spec`: {title, about, main}; `runs`: all runs of the page, see report.js.
  constructor(spec, runs, colors) {
    this.spec = spec;
    this.runs = runs;
    this.colors = colors;
    this.dirty = true;
    this.visible = false;
    this.plot = null;
    this.shape = "";
    this.figure = this.makeFigure();
  }

  makeFigure() {
    const figure = document.createElement("figure");
    figure.dataset.name = this.spec.title;
    const caption = figure.appendChild(document.createElement("figcaption"));
    const name = caption.appendChild(document.createElement("span"));
    name.className = "name";
    name.textContent = this.spec.title;
    if (this.spec.about[0]) {
      name.classList.add("term");
      name.tabIndex = 0;
    }
    this.latest = caption.appendChild(document.createElement("b"));
    const button = caption.appendChild(document.createElement("button"));
    button.type = "button";
    button.className = "grow";
    button.textContent = "⤢";
    button.title = "larger or smaller";
    button.setAttribute("aria-label", `larger or smaller: ${this.spec.title}`);
    button.addEventListener("click", () => {
      figure.classList.toggle("large");
      this.shape = "";
      this.draw();
    });
    this.place = figure.appendChild(document.createElement("div"));
    this.place.className = "plot";
    this.tip = figure.appendChild(document.createElement("div"));
    this.tip.className = "tip";
    this.tip.hidden = true;
    return figure;
  }

  // {name, color, dash, band, x, y, last, odd} of each line; a comparison has one per run.
  lines() {
    const found = [], several = this.runs.length > 1;
    for (const run of this.runs) {
      const own = run.shown ? run.charts.get(this.spec.title) : undefined;
      if (!own) continue;
      const color = this.colors.lines[run.number % NUM_COLORS];
      const dash = DASHES[Math.floor(run.number / NUM_COLORS) % DASHES.length];
      const words = several ? own.lines.slice(0, 1) : own.lines;
      for (const [word, metric] of words) {
        const points = run.metrics.get(metric);
        const steps = settings.axis === "step" ? null : run.axes[settings.axis];
        const to = (x) => (steps ? along(x, steps) : x);
        const y = points.y.map((v) => {
          if (v === null || (settings.log && v < 1 / LIMIT)) return null;
          return Math.min(Math.max(v, -LIMIT), LIMIT);
        });
        found.push({
          name: several ? run.name : word, color, dash, band: words.length > 1 && word !== "mean",
          x: to(points.x), y, last: points.y.findLast((v) => v !== null), odd: points.odd.map(([x, what]) => [to([x])[0], what]),
        });
      }
    }
    return found;
  }

  draw() {
    this.dirty = false;
    const lines = this.lines(), weight = settings.smooth;
    this.shown = lines;
    this.figure.classList.toggle("absent", !lines.length);
    const last = lines.find((line) => !line.band)?.last;
    this.latest.textContent = this.runs.length > 1 || last === undefined ? "" : formatValue(last);
    const tables = [], series = [{}], bands = [];
    const order = [...lines.filter((l) => l.band), ...lines.filter((l) => !l.band)];
    for (const line of order) {
      const table = [line.x];
      const points = { show: line.y.length <= MARKED, size: 4, fill: line.color };
      const base = { line, dash: line.dash, spanGaps: false, points };
      if (line.band) {
        const pale = withAlpha(line.color, 0.35);
        series.push({ ...base, stroke: pale, width: 1, points: { show: false } });
        table.push(line.y);
        const others = series.map((s, i) => (s.line?.band && i !== series.length - 1 ? i : 0));
        const other = Math.max(...others);
        if (other)
          bands.push({ series: [other, series.length - 1], fill: withAlpha(line.color, 0.12) });
      } else {
        if (weight) {
          const pale = withAlpha(line.color, 0.25);
          series.push({ ...base, stroke: pale, width: 1, points: { show: false }, raw: true });
          table.push(line.y);
        }
        series.push({ ...base, stroke: line.color, width: 1.75 });
        table.push(weight ? smoothed(line.y, weight) : line.y);
      }
      tables.push(table);
    }
    if (!tables.length) tables.push([[], []]), series.push({});
    const data = uPlot.join(tables);
    const shape = JSON.stringify([
      settings.log, settings.axis, this.colors.lines[0], this.figure.className, bands,
      series.map((s) => [s.stroke, s.width, s.dash, s.points?.show]),
    ]);
    const width = this.place.clientWidth;
    if (this.plot && shape === this.shape) {
      series.forEach((s, i) => (this.plot.series[i].line = s.line));
      if (this.plot.width !== width) this.plot.setSize({ width, height: this.plot.height });
      this.plot.setData(data);
      return;
    }
    this.plot?.destroy();
    this.shape = shape;
    this.plot = new uPlot(this.options(width, series, bands), data, this.place);
  }

  options(width, series, bands) {
    const { faint, grid } = this.colors, font = "11px system-ui, sans-serif";
    const whole = settings.axis === "step";
    return {
      width,
      height: this.figure.classList.contains("large") ? TALL : HEIGHT,
      padding: [8, 12, 0, 0],
      legend: { show: false },
      series,
      bands,
      scales: {
        x: { time: false, range: (plot) => settings.zoom ?? this.ends(plot.data[0]) },
        y: { distr: settings.log ? 3 : 1, range: (_, low, high) => this.height(low, high) },
      },
      axes: [
        {
          stroke: faint, font, size: 24, gap: 3, space: 64, grid: { show: false },
          ticks: { stroke: grid, size: 4 },
          ...(whole ? { incrs: [1, 2, 5].concat(this.powers()) } : {}),
          values: (_, splits) => splits.map(formatX),
        },
        {
          stroke: faint, font, size: 54, gap: 4, space: 30, grid: { stroke: grid, width: 1 },
          ticks: { show: false },
          ...(settings.log ? { splits: (_, axis, low, high) => logTicks(low, high) } : {}),
          filter: (_, splits) => splits,
          values: (_, splits, axis, space, step) =>
            splits.map((v) => (v === null ? null : settings.log ? formatValue(v) : formatTick(v, step))),
        },
      ],
      cursor: {
        points: { size: 7 },
        drag: { x: true, y: false, setScale: false },
        dataIdx: (plot, number, place) => this.nearest(plot.data[number], place),
        bind: { dblclick: () => () => setZoom(null) },
      },
      hooks: {
        setCursor: [(plot) => this.point(plot)],
        setSelect: [(plot) => this.select(plot)],
        draw: [(plot) => this.mark(plot)],
      },
    };
  }

  powers() {
    return [...Array(14).keys()].flatMap((n) => [1, 2, 5].map((m) => m * 10 ** (n + 1)));
  }

  // uPlot's own range of one point is twice as wide
  ends(places) {
    if (!places.length) return [0, 1];
    const low = places[0], high = places.at(-1);
    if (low !== high) return [low, high];
    // a single point stands where it is in the run
    const whole = settings.axis === "step" ? Math.max(...this.runs.map((run) => run.last)) : 2 * low;
    return [0, Math.max(whole, low, 1)];
  }

  height(low, high) {
    if (low === null) return settings.log ? [1, 10] : [0, 1];
    if (settings.log) return low === high ? [low / 2, high * 2] : [low / 1.15, high * 1.15];
    const margin = high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high))
      ? 0.06 * (high - low) : Math.abs(low) / 2;
    return margin ? [low - margin, high + margin] : [-0.06, 1]; // all values are 0
  }

  nearest(values, place) {
    if (values[place] !== null && values[place] !== undefined) return place;
    for (let away = 1; away < values.length; away++)
      for (const other of [place - away, place + away])
        if (values[other] !== null && values[other] !== undefined) return other;
    return place;
  }

  point(plot) {
    const { idx, left } = plot.cursor;
    this.tip.hidden = idx === null || idx === undefined || left < 0;
    if (this.tip.hidden) return;
    const at = plot.data[0][idx], word = settings.axis === "step" ? "step " : "";
    this.tip.replaceChildren();
    const head = this.tip.appendChild(document.createElement("div"));
    head.textContent = word + formatX(at);
    plot.series.forEach((series, number) => {
      if (!series.line || series.raw) return;
      const place = this.nearest(plot.data[number], idx), x = plot.data[0][place];
      const odd = series.line.odd.find(([odd]) => odd === at);
      const row = this.tip.appendChild(document.createElement("div"));
      const key = row.appendChild(document.createElement("i"));
      key.style.background = series.stroke instanceof Function ? series.stroke() : series.stroke;
      const value = odd ? odd[1] : formatValue(plot.data[number][place]);
      const where = odd || x === at ? "" : ` (${word}${formatX(x)})`;
      row.append(`${series.line.name} ${value}${where}`);
    });
    const room = this.figure.clientWidth, x = plot.over.offsetLeft + left;
    const wide = this.tip.offsetWidth;
    const beside = x + 14 + wide < room ? x + 14 : Math.max(4, x - 14 - wide);
    this.tip.style.left = `${Math.min(beside, Math.max(4, room - wide - 4))}px`;
  }

  select(plot) {
    if (plot.select.width < 4) return;
    const low = plot.posToVal(plot.select.left, "x");
    const high = plot.posToVal(plot.select.left + plot.select.width, "x");
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    setZoom([low, high]);
  }

  // Values that are not finite are triangles on the axis.
  mark(plot) {
    const { ctx, bbox } = plot, size = 4 * devicePixelRatio, bottom = bbox.top + bbox.height;
    ctx.save();
    ctx.fillStyle = this.colors.wrong;
    for (const line of this.shown)
      for (const [x] of line.odd) {
        const at = plot.valToPos(x, "x", true);
        if (at < bbox.left || at > bbox.left + bbox.width) continue;
        ctx.beginPath();
        ctx.moveTo(at - size, bottom);
        ctx.lineTo(at + size, bottom);
        ctx.lineTo(at, bottom - 2 * size);
        ctx.fill();
      }
    ctx.restore();
  }
}

let charts = [];
const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const chart = charts.find((one) => one.figure === entry.target);
      if (!chart) continue;
      chart.visible = entry.isIntersecting;
      if (chart.visible && chart.dirty) chart.draw();
    }
  },
  { rootMargin: "100px" },
);

// Draws the charts in view again; the others are drawn when they come into view.
const redraw = () => {
  for (const chart of charts) {
    chart.dirty = true;
    if (chart.visible) chart.draw();
  }
};

const setZoom = (zoom) => {
  settings.zoom = zoom;
  document.getElementById("unzoom").hidden = zoom === null;
  redraw();
};

// Builds the figures of all charts of the runs below `place`: main ones, then groups by first word.
const makeCharts = (place, runs) => {
  const specs = new Map(), colors = theme();
  for (const run of runs)
    for (const [title, chart] of run.charts) if (!specs.has(title)) specs.set(title, chart);
  const before = new Map(charts.map((chart) => [chart.spec.title, chart]));
  const open = new Set(
    [...place.querySelectorAll("details[open]")].map((group) => group.dataset.group));
  seen.disconnect();
  charts = [...specs].map(([title, spec]) => {
    const chart = before.get(title) ?? new Chart({ title, ...spec }, runs, colors);
    Object.assign(chart, { runs, colors, dirty: true, visible: false });
    return chart;
  });
  const grid = (figures) => {
    const box = document.createElement("div");
    box.className = "charts";
    box.append(...figures);
    return box;
  };
  const groups = new Map();
  for (const { spec, figure } of charts) {
    if (spec.main) continue;
    const first = spec.title.split("/")[0];
    groups.set(first, [...(groups.get(first) ?? []), figure]);
  }
  const folded = [...groups].sort(([a], [b]) => (a < b ? -1 : 1)).map(([name, figures]) => {
    const group = document.createElement("details");
    group.className = "group";
    group.dataset.group = name;
    group.open = open.has(name);
    const summary = group.appendChild(document.createElement("summary"));
    summary.append(name, " ");
    summary.appendChild(document.createElement("i")).textContent = figures.length;
    group.append(grid(figures));
    return group;
  });
  const more = Math.max(0, ...runs.map((run) => run.more)), note = document.createElement("p");
  note.className = "about";
  note.textContent = more ? `${more} more are in metrics.jsonl` : "";
  const main = charts.filter(({ spec }) => spec.main).map(({ figure }) => figure);
  place.replaceChildren(grid(main), ...folded, ...(more ? [note] : []));
  for (const chart of charts) seen.observe(chart.figure);
};

const recolor = () => {
  const colors = theme();
  for (const chart of charts) chart.colors = colors;
  redraw();
};
