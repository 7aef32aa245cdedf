// The page's controls, and what a live page fetches.

const root = document.documentElement, all = (query) => [...document.querySelectorAll(query)];
const byId = (id) => document.getElementById(id);
const page = JSON.parse(byId("data").textContent);
const EMPTY = { charts: [], metrics: {}, grids: [], axes: {}, last: 0, total: null, more: 0 };

// A run as the charts take it: `metrics` are {x: steps, y: values, odd: [[step, word]]} by name.
const takeRun = (run, data) => {
  const { charts, metrics, grids, axes, last, total, more } = { ...EMPTY, ...data };
  run.charts = new Map(charts.map((chart) => [chart.title, chart]));
  run.metrics = new Map(Object.entries(metrics).map(([name, [grid, y, odd]]) =>
    [name, { x: [...grids[grid]], y: [...y], odd }]));
  Object.assign(run, { axes, last, total, more, appended: 0 });
  return run;
};
const runs = page.runs.map((data, number) =>
  takeRun({ name: data.name, number, shown: true, token: "" }, data));
let chosen = 0; // the run whose sections are shown

// -- light and dark ---------------------------------------------------------------------------

const wantsDark = matchMedia("(prefers-color-scheme: dark)");
const setTheme = (dark) => {
  root.dataset.theme = dark ? "dark" : "light";
  recolor();
};
setTheme(wantsDark.matches);
wantsDark.addEventListener("change", () => setTheme(wantsDark.matches));
byId("theme").addEventListener("click", () => setTheme(root.dataset.theme !== "dark"));

// -- the curves -------------------------------------------------------------------------------

const filterCharts = () => {
  const word = byId("find").value.toLowerCase();
  for (const figure of all("figure"))
    figure.hidden = !figure.dataset.name.toLowerCase().includes(word);
  for (const group of all("details.group")) {
    const left = [...group.querySelectorAll("figure")].some((figure) => !figure.hidden);
    group.hidden = !left;
    if (word) group.open = left;
  }
};
const showCharts = () => {
  makeCharts(byId("charts"), runs);
  filterCharts();
};
byId("find").addEventListener("input", filterCharts);
byId("smooth").addEventListener("input", (event) => {
  settings.smooth = Number(event.target.value);
  byId("smoothness").textContent = settings.smooth;
  redraw();
});
byId("axis").addEventListener("change", (event) => {
  settings.axis = event.target.value;
  setZoom(null);
});
byId("log").addEventListener("change", (event) => {
  settings.log = event.target.checked;
  redraw();
});
byId("unzoom").addEventListener("click", () => setZoom(null));
new ResizeObserver(() => redraw()).observe(byId("charts"));

const makeLegend = () => {
  const legend = byId("legend"), colors = theme();
  legend.hidden = runs.length < 2;
  legend.replaceChildren(...runs.map((run) => {
    const button = document.createElement("button"), key = document.createElement("i");
    button.type = "button";
    button.className = "key";
    key.style.background = `var(--line${run.number % NUM_COLORS})`;
    button.append(key, run.name);
    button.setAttribute("aria-pressed", run.shown);
    button.addEventListener("click", () => {
      run.shown = !run.shown;
      button.setAttribute("aria-pressed", run.shown);
      redraw();
    });
    return button;
  }));
};

// -- explanations of metrics ------------------------------------------------------------------

const help = document.body.appendChild(document.createElement("div"));
help.id = "help";
help.setAttribute("role", "tooltip");
help.hidden = true;
const explain = (event) => {
  const term = event.target.closest?.(".term");
  help.hidden = !term;
  if (!term) return;
  const chart = charts.find(({ figure }) => figure.contains(term));
  const [meaning, bad] = chart.spec.about;
  help.replaceChildren(meaning);
  if (bad) {
    const line = help.appendChild(document.createElement("div"));
    line.appendChild(document.createElement("b")).textContent = "Watch for: ";
    line.append(bad);
  }
  const box = term.getBoundingClientRect(), room = root.clientWidth;
  help.style.left = `${Math.max(8, Math.min(box.left, room - help.offsetWidth - 8))}px`;
  const above = box.top - help.offsetHeight - 6;
  help.style.top = `${above > 60 ? above : box.bottom + 6}px`;
};
document.addEventListener("mouseover", explain);
document.addEventListener("focusin", explain);
document.addEventListener("scroll", () => (help.hidden = true), { passive: true });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") help.hidden = true;
});

// -- the sections of a run --------------------------------------------------------------------

const showFile = (section) => {
  const chosenFile = section.querySelector("select.file").value;
  for (const file of section.querySelectorAll(".samples"))
    file.hidden = file.dataset.file !== chosenFile;
};
// The greatest first; responses without the number come last.
const sortResponses = (section) => {
  const key = section.querySelector("select.order")?.value;
  const number = (item) => Number(item.dataset[key] ?? -Number.MAX_VALUE);
  for (const list of section.querySelectorAll(".responses")) {
    const items = [...list.children].filter((item) => !item.matches(".about"));
    list.prepend(...items.sort((a, b) => number(b) - number(a)));
  }
};
document.addEventListener("change", (event) => {
  const section = event.target.closest("section");
  if (event.target.matches("select.file")) showFile(section);
  if (event.target.matches("select.order")) sortResponses(section);
});
const filterSamples = (section) => {
  const word = section.querySelector(".grep")?.value.toLowerCase() ?? "";
  for (const card of section.querySelectorAll(".card"))
    card.hidden = !card.textContent.toLowerCase().includes(word);
};
document.addEventListener("input", (event) => {
  if (event.target.matches(".grep")) filterSamples(event.target.closest("section"));
});
document.addEventListener("click", (event) => {
  if (event.target.matches("button.full"))
    event.target.closest("section").querySelector(".picture").classList.toggle("natural");
});

const linkSections = () => {
  for (const link of all("nav a[data-section]")) {
    const id = `${link.dataset.section}-${chosen}`;
    link.hidden = !byId(id);
    link.href = `#${id}`;
  }
};
const chooseRun = (number) => {
  chosen = number;
  for (const block of all(".top, .run")) block.hidden = block.dataset.run !== String(number);
  linkSections();
};
byId("run")?.addEventListener("change", (event) => {
  chooseRun(Number(event.target.value));
  if (page.live) showStatus(), refreshSections().catch(showLost);
  else setStatus(...page.status[chosen]);
});

const setStatus = (word, text) => {
  byId("status").className = `status ${word}`;
  byId("status").textContent = text;
};

// -- live -------------------------------------------------------------------------------------

// Between two updates lie SHARE times what the last one took, from the request until its result was
// painted. The time of the page and of the server therefore stays a small share on a busy machine too.
const SHORTEST = 5000, LONGEST = 60000, SHARE = 200; // ms; ms per ms
const SECTIONS = 20000, SECTIONS_LONGEST = 300000; // ms
const ROWS_KEPT = 3000; // rows appended until the server thins the points again
const NAMES = all("nav a[data-section]").map((link) => link.dataset.section);
const shownHtml = new Map(); // "run name" -> HTML of a part
let sectionsAt = 0, failures = 0, work = 0;

const fetchJson = async (url) => {
  const reply = await fetch(url, { cache: "no-cache" });
  if (!reply.ok) throw new Error(`${url}: ${reply.status}`);
  return reply.json();
};

const showLost = () => setStatus("lost", "no answer from the server");
const showStatus = () => {
  const { last, total } = runs[chosen];
  if (total && last >= total) setStatus("done", `done: ${last} steps`);
  else if (last) setStatus("open", `step ${last}${total ? ` of ${total}` : ""}`);
  else setStatus("none", "no step yet");
};

const loadRun = async (run) => {
  const found = await fetchJson(`data/${run.number}`);
  takeRun(run, found.data);
  run.token = found.token;
  run.fresh = true;
};

// Whether a metric has a point of this step, or its chart is left out.
const has = (run, name, step) => {
  const points = run.metrics.get(name);
  return points ? points.x.includes(step) : Boolean(run.more);
};

// Appends rows of metrics.jsonl; false: the run must be loaded again.
const append = (run, rows) => {
  for (const { step, ...row } of rows) {
    if (step <= run.last && (step > 0 || run.last > 0)) {
      // written while the run was loaded?
      if (run.fresh && Object.keys(row).every((name) => has(run, name, step))) continue;
      return false; // also of an evaluation that ended after later steps
    }
    for (const [name, value] of Object.entries(row)) {
      const points = run.metrics.get(name);
      if (!points && run.more) continue; // of a chart that is left out
      if (!points) return false;
      points.x.push(step);
      points.y.push(typeof value === "number" ? value : null);
      if (typeof value === "string") points.odd.push([step, value]);
    }
    for (const [axis, metric] of [["seconds", "timing_s/step"], ["tokens", "perf/total_num_tokens"]]) {
      const [steps, sums] = run.axes[axis], value = row[metric];
      if (typeof value !== "number") continue;
      sums.push((sums.at(-1) ?? 0) + value * (step - (steps.at(-1) ?? 0)));
      steps.push(step);
    }
    run.last = step;
    run.appended += 1;
  }
  if (rows.length) run.fresh = false;
  return run.appended <= ROWS_KEPT;
};

// Gives a new section of samples the step, order and words that its reader chose; the first step of
// the list is the newest, and a reader who has not left it goes on to the next.
const keepChoices = (old, next) => {
  const [was, is] = [old, next].map((section) => section.querySelector("select.file"));
  const listed = [...is.options].some(({ value }) => value === was.value);
  if (was.selectedIndex > 0 && listed) is.value = was.value;
  const order = old.querySelector("select.order")?.value;
  const known = [...(next.querySelector("select.order")?.options ?? [])];
  if (known.some(({ value }) => value === order)) next.querySelector("select.order").value = order;
  next.querySelector(".grep").value = old.querySelector(".grep").value;
  showFile(next);
  sortResponses(next);
  filterSamples(next);
};

const replacePart = (block, name, html, before) => {
  const id = `${chosen}-${name}`, old = byId(`${name}-${chosen}`);
  if (shownHtml.get(id) === html) return;
  const busy = name === "samples" && old && (old.matches(":hover") || old.contains(document.activeElement));
  if (busy) return; // the reader keeps the samples that are being read
  shownHtml.set(id, html);
  const made = document.createElement("template");
  made.innerHTML = html;
  const next = made.content.firstElementChild;
  if (old && next) {
    const keyed = (section) =>
      [...section.querySelectorAll("details")].map((part, i) => [part.dataset.key ?? i, part]);
    const earlier = new Map(keyed(old));
    for (const [key, part] of keyed(next)) part.open = earlier.get(key)?.open ?? part.open;
    if (name === "samples") keepChoices(old, next);
    next.querySelector(".picture")?.classList.toggle(
      "natural", old.querySelector(".picture")?.classList.contains("natural") ?? false);
  }
  if (old) old.remove();
  if (next) block.insertBefore(next, before);
};

let sectionsAsked = 0, sectionsShown = 0; // answers may come in another order than they were asked

const refreshSections = async () => {
  const asked = ++sectionsAsked;
  const number = chosen, block = document.querySelector(`.run[data-run="${number}"]`);
  const started = performance.now(), found = await fetchJson(`sections/${number}`);
  if (number !== chosen || asked < sectionsShown) return;
  sectionsShown = asked;
  const top = document.querySelector(`.top[data-run="${number}"]`);
  if (shownHtml.get(`${number}-top`) !== found.parts.top) top.innerHTML = found.parts.top;
  shownHtml.set(`${number}-top`, found.parts.top);
  let before = null;
  for (const name of [...NAMES].reverse()) {
    replacePart(block, name, found.parts[name] ?? "", before);
    before = byId(`${name}-${number}`) ?? before;
  }
  linkSections();
  await painted();
  const now = performance.now(), pause = (now - started) * SHARE;
  sectionsAt = now + Math.min(SECTIONS_LONGEST, Math.max(SECTIONS, pause));
};

const painted = () => new Promise((done) => {
  requestAnimationFrame(() => setTimeout(done));
  setTimeout(done, 1000); // a tab in the background is not painted
});

const showDifferences = async () => {
  if (runs.length > 1) byId("differences").innerHTML = (await fetchJson("differences")).html;
};

const poll = async () => {
  const words = runs.map((run) => `${run.number}=${encodeURIComponent(run.token)}`);
  const started = performance.now(), news = await fetchJson(`news?${words.join("&")}`);
  let reload = false, changed = false;
  for (const run of runs) {
    const found = news[run.number];
    if (found.rows.length) changed = true;
    if (found.token && append(run, found.rows)) run.token = found.token;
    else {
      await loadRun(run);
      reload = changed = true;
    }
  }
  if (reload) showCharts();
  else if (changed) redraw();
  if (changed) showStatus();
  if (changed) await painted();
  work = performance.now() - started;
  if (reload) await showDifferences();
  if (performance.now() > sectionsAt) await refreshSections();
};

const follow = async () => {
  if (following) return;
  following = true;
  let wait = SHORTEST;
  try {
    if (!document.hidden) await poll();
    if (failures) showStatus();
    failures = 0;
    wait = Math.min(LONGEST, Math.max(SHORTEST, work * SHARE));
  } catch (error) {
    failures += 1;
    showLost();
    wait = Math.min(LONGEST, SHORTEST * 2 ** failures);
  }
  following = false;
  timer = setTimeout(follow, wait);
};
let timer = 0, following = false;

const start = async () => {
  if (!page.live) return;
  try {
    for (const run of runs) await loadRun(run);
    showCharts();
    showStatus();
    await refreshSections();
    await showDifferences();
  } catch (error) {
    showLost();
  }
  timer = setTimeout(follow, SHORTEST);
};
document.addEventListener("visibilitychange", () => {
  if (!page.live || document.hidden) return;
  clearTimeout(timer);
  follow();
});

makeLegend();
showCharts();
start();
