"use strict";
// Everything on the page is drawn from the JSON in #data; the filter decides which runs count. Texts are never parsed as HTML.
// Runs of several tasks have no metric in common: the page shows one task, and the address says which.
const $ = (id) => document.getElementById(id);
const tasks = JSON.parse($("data").textContent), data = tasks[Number(location.hash.slice(1))] || tasks[0];
addEventListener("hashchange", () => location.reload());
const runs = data.runs, metric = data.metric, best = data.mode === "min" ? -1 : 1;
let shown = runs.map(() => true);
const tip = $("tip");

const make = (tag, attributes = {}, ...inside) => {
  const svg = ["svg", "g", "path", "line", "circle", "text", "rect"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...inside);
  return node;
};
const format = (value) => {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  return Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(2) : String(+value.toPrecision(4));
};
const clock = (seconds) => {
  if (typeof seconds !== "number") return "-";
  const s = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  return s >= 3600 ? `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}` : `${Math.floor(s / 60)}:${two(s % 60)}`;
};
const statistics = (values) => {
  const n = values.length, mean = values.reduce((a, b) => a + b, 0) / n;
  return { n, mean, std: n > 1 ? Math.sqrt(values.reduce((a, b) => a + (b - mean) ** 2, 0) / (n - 1)) : null };
};
const spread = (s) => s === null ? "-" : !s.std ? format(s.mean) : `${format(s.mean)} ± ${+s.std.toPrecision(2)}`;
const dark = matchMedia("(prefers-color-scheme: dark)"), colors = new Map();  // asking for a style makes the browser compute all
const color = (name) => {
  if (!colors.has(name)) colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colors.get(name);
};
const hues = [217, 28, 145, 350, 265, 190, 50, 320];
const hue = (at) => `hsl(${hues[at % hues.length]} 75% ${dark.matches ? 66 : 42}%)`;
// From orange (worst) to blue (best), which the color-blind tell apart too.
const shade = (share) => `color-mix(in oklab, ${dark.matches ? "#7db0ff" : "#1746b0"} ${Math.round(100 * share)}%, ${dark.matches ? "#f0913a" : "#e0750a"})`;
const labelOf = (name) => data.labels[name] || name;
const nameOf = (each) => runs[each.runs[0]].name + (each.runs.length > 1 ? ` and ${each.runs.length - 1} more` : "");
// One line: the run, and those of its settings that others do not have.
const lineOf = (i, name = runs[i].name) => [name, ...data.settings.filter((key) => (runs[i].keys[key] ?? null) !== null)
  .map((key) => `${key}=${format(runs[i].keys[key])}`)].join(" ");

const show = (event, text) => {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 4))}px`;
  tip.style.top = `${Math.max(4, event.clientY + 16 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 16)}px`;
};
const hide = () => { tip.hidden = true; };

// Filter: comparisons joined by and, or, not; words without a comparison are looked for in the name, status and keys of a run.
const names = new Set(["status", "name", "path", "time_s", ...data.keys]);
for (const run of runs) for (const name of Object.keys(run.metrics)) names.add(name);
const valueOf = (run, name) => name in run.keys ? run.keys[name] : name in run.metrics ? run.metrics[name]
  : name === "run" ? run.path : run[name];
const texts = runs.map((run) => `${run.path} ${run.status} ${Object.entries(run.keys).map(([k, v]) => `${k}=${format(v)}`).join(" ")}`.toLowerCase());

function parse(text) {
  const tokens = text.match(/"[^"]*"|'[^']*'|[<>!=]=|[<>=()]|[^\s<>=()!"']+/g) || [];
  let at = 0;
  const fail = (why) => { throw new Error(why); };
  const either = () => { let left = both(); while ((tokens[at] || "").toLowerCase() === "or") { at++; const a = left, b = both(); left = (i) => a(i) || b(i); } return left; };
  const both = () => {
    let left = one();
    while (at < tokens.length && tokens[at] !== ")" && tokens[at].toLowerCase() !== "or") {
      if (tokens[at].toLowerCase() === "and") at++;
      const a = left, b = one();
      left = (i) => a(i) && b(i);
    }
    return left;
  };
  const one = () => {
    if (at >= tokens.length) fail("the condition is incomplete");
    const token = tokens[at++];
    if (token.toLowerCase() === "not") { const inner = one(); return (i) => !inner(i); }
    if (token === "(") { const inner = either(); if (tokens[at++] !== ")") fail("a bracket is open"); return inner; }
    if (/^[<>=!)]/.test(token)) fail(`${token} is out of place`);
    if (!/^([<>]=?|==?|!=)$/.test(tokens[at] || "")) { const word = unquoted(token).toLowerCase(); return (i) => texts[i].includes(word); }
    const operator = tokens[at++], name = token;
    if (at >= tokens.length) fail("a value is missing");
    if (!names.has(name)) fail(`no run has ${name}`);
    const wanted = value(tokens[at++]);
    return (i) => compare(valueOf(runs[i], name), operator, wanted);
  };
  const test = either();
  if (at < tokens.length) fail(`${tokens[at]} is out of place`);
  return test;
}
const unquoted = (token) => /^["']/.test(token) ? token.slice(1, -1) : token;
const value = (token) => {
  const word = token.toLowerCase();
  if (word === "true" || word === "false") return word === "true";
  if (word === "null") return null;
  return token !== "" && !Number.isNaN(Number(token)) ? Number(token) : unquoted(token);
};
function compare(found, operator, wanted) {
  if (operator === "=" || operator === "==" || operator === "!=") {
    const plain = (each) => typeof each === "string" ? each.toLowerCase().replaceAll("_", "") : each;
    let equal = plain(found) === plain(wanted);
    if (typeof wanted === "string" && typeof found === "string" && wanted.includes("*")) {
      const pattern = plain(wanted).split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&")).join(".*");
      equal = new RegExp(`^${pattern}$`).test(plain(found));
    }
    return equal === (operator !== "!=");
  }
  if (typeof found !== typeof wanted || found === null || typeof found === "boolean") return false;
  return operator === "<" ? found < wanted : operator === "<=" ? found <= wanted : operator === ">" ? found > wanted : found >= wanted;
}

// Groups: runs that differ only in seed or fold, the best first.
let groups = [];
function group() {
  const found = new Map();
  runs.forEach((run, i) => {
    if (!shown[i] || run.next !== null) return;
    if (!found.has(run.setting)) found.set(run.setting, { setting: run.setting, runs: [] });
    found.get(run.setting).runs.push(i);
  });
  groups = [...found.values()];
  for (const each of groups) {
    each.value = over(each, metric);
    each.score = each.value && !each.runs.every((i) => runs[i].lost) ? best * each.value.mean : -Infinity;
  }
  groups.sort((a, b) => b.score - a.score || 0);
}
// What a run reached before it failed is no result, unless there is no other.
function over(each, name) {
  const finished = each.runs.filter((i) => runs[i].status === "finished");
  const values = (finished.length ? finished : each.runs)
    .map((i) => name === "time_s" ? runs[i].time_s : runs[i].metrics[name]).filter((v) => typeof v === "number");
  return values.length ? statistics(values) : null;
}

// Table
const metricNames = [metric, metric && `test/${metric.split("/")[1]}`, metric && `${metric.split("/")[0]}/loss`, "step_ms", "peak_memory_mib"]
  .filter((name, at, all) => name && all.indexOf(name) === at && runs.some((run) => name in run.metrics));
let order = { by: metric, down: best > 0 };
function table() {
  const keys = data.settings, head = make("tr");
  const columns = ["run", "status", ...metricNames.slice(0, 1), ...keys, ...metricNames.slice(1), "time_s"];
  for (const name of columns) {
    const button = make("button", { type: "button" }, name === "time_s" ? "time" : labelOf(name));
    button.addEventListener("click", () => { order = { by: name, down: order.by === name ? !order.down : false }; table(); });
    const sorted = order.by === name ? (order.down ? "descending" : "ascending") : "none";
    if (sorted !== "none") button.append(order.down ? " ↓" : " ↑");
    head.append(make("th", { scope: "col", "aria-sort": sorted }, button));
  }
  const cell = (each, name) => {
    if (name === "run") return nameOf(each);
    if (name === "status") {
      const counts = {};
      for (const i of each.runs) counts[runs[i].status] = (counts[runs[i].status] || 0) + 1;
      const all = Object.entries(counts);
      return all.length === 1 ? all[0][0] : all.map(([status, n]) => `${n} ${status}`).join(", ");
    }
    if (keys.includes(name)) return runs[each.runs[0]].keys[name];
    return name === metric ? each.value : over(each, name);
  };
  const plain = (v) => v !== null && typeof v === "object" ? v.mean : v;
  const sorted = groups.map((each) => [each, order.by === metric && each.score === -Infinity ? null : plain(cell(each, order.by))]);
  sorted.sort(([, a], [, b]) => {
    if (a === null || a === undefined || b === null || b === undefined) return (a === null || a === undefined) - (b === null || b === undefined);
    const way = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
    return order.down ? -way : way;
  });
  const body = make("tbody");
  for (const [each] of sorted) {
    const row = make("tr", { title: each.runs.map((i) => runs[i].path).join("\n") });
    for (const name of columns) {
      const found = cell(each, name);
      row.append(make("td", {}, name === "time_s" ? clock(plain(found)) : metricNames.includes(name) ? spread(found) : format(found)));
    }
    row.addEventListener("pointerenter", () => highlight(each.setting));
    row.addEventListener("pointerleave", () => highlight(null));
    body.append(row);
  }
  $("table").replaceChildren(make("table", {}, make("thead", {}, head), body));
}

// Learning curves, on a canvas
const canvas = $("curves"), pen = canvas.getContext("2d"), MARGIN = { left: 70, right: 24, top: 10, bottom: 38 };
const MOST_COLORS = hues.length;
let lines = [], zoom = null, cursor = null, picked = null;
function at(steps, values, step) {
  if (step < steps[0] || step > steps[steps.length - 1]) return null;
  let low = 0, high = steps.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (steps[middle] <= step) low = middle; else high = middle; }
  const width = steps[high] - steps[low];
  return width ? values[low] + (values[high] - values[low]) * (step - steps[low]) / width : values[low];
}
function collect() {
  const name = $("curve").value;
  lines = [];
  groups.forEach((each, rank) => {
    const curves = each.runs.filter((i) => runs[i].curves[name]).map((i) => [i, data.steps[runs[i].curves[name][0]], runs[i].curves[name][1]]);
    if (!curves.length) return;
    if ($("each").checked) {
      for (const [i, steps, values] of curves) lines.push({ setting: each.setting, label: runs[i].name, steps, mean: values, rank, n: 1 });
      return;
    }
    const steps = curves.reduce((a, b) => b[1].length > a[1].length ? b : a)[1];
    const mean = [], low = [], high = [], kept = [];
    for (let k = 0; k < steps.length; k++) {
      const values = [];
      for (const [, s, v] of curves) { const y = s === steps ? v[k] : at(s, v, steps[k]); if (y !== null && y !== undefined) values.push(y); }
      if (!values.length) continue;
      const found = statistics(values);
      kept.push(steps[k]); mean.push(found.mean); low.push(found.mean - (found.std || 0)); high.push(found.mean + (found.std || 0));
    }
    lines.push({ setting: each.setting, label: lineOf(each.runs[0], nameOf(each)), steps: kept, mean, low, high, rank, n: curves.length });
  });
  picked = null;
}
const ticks = (low, high, count) => {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw)), unit = [1, 2, 5, 10].find((u) => u * power >= raw) * power;
  const found = [];
  for (let t = Math.ceil(low / unit) * unit; t <= high + unit * 1e-9; t += unit) found.push(+t.toPrecision(12));
  return found;
};
const powers = (low, high) => {  // of ten, their double and five times, between logarithms
  const units = high - low > 3 ? [1] : [1, 2, 5], found = [];
  for (let k = Math.floor(low); k <= high; k++) for (const unit of units) found.push(Math.log10(unit) + k);
  const inside = found.filter((t) => t >= low && t <= high);
  return inside.length > 1 ? inside : ticks(low, high, 6);
};
let view = null;
function draw() {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
  }
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, sans-serif";
  const logarithmic = $("log").checked, scale = (y) => logarithmic ? Math.log10(y) : y;
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
  for (const line of lines) { x0 = Math.min(x0, line.steps[0]); x1 = Math.max(x1, line.steps[line.steps.length - 1]); }
  if (zoom) [x0, x1] = zoom;
  for (const line of lines) line.steps.forEach((step, k) => {
    const y = line.mean[k];
    if (step >= x0 && step <= x1 && (!logarithmic || y > 0)) { y0 = Math.min(y0, scale(y)); y1 = Math.max(y1, scale(y)); }
  });
  view = null;
  if (!(x1 >= x0) || !(y1 >= y0)) { pen.fillStyle = color("--soft"); pen.fillText("No curve of these runs", 20, 30); legend(); return; }
  if (x1 === x0) { x0 -= 1; x1 += 1; }
  const room = (y1 - y0 || Math.abs(y1) || 1) * 0.05; y0 -= room; y1 += room;
  const X = (x) => MARGIN.left + (x - x0) / (x1 - x0) * (width - MARGIN.left - MARGIN.right);
  const Y = (y) => height - MARGIN.bottom - (scale(y) - y0) / (y1 - y0) * (height - MARGIN.top - MARGIN.bottom);
  view = { X, Y, x0, x1, step: (px) => x0 + (px - MARGIN.left) / (width - MARGIN.left - MARGIN.right) * (x1 - x0) };
  pen.lineWidth = 1;
  pen.textAlign = "center";
  for (const t of ticks(x0, x1, Math.max(2, width / 110))) {
    pen.strokeStyle = color("--grid"); pen.beginPath(); pen.moveTo(X(t), MARGIN.top); pen.lineTo(X(t), height - MARGIN.bottom); pen.stroke();
    pen.fillStyle = color("--soft"); pen.fillText(format(t), X(t), height - MARGIN.bottom + 16);
  }
  pen.fillText("optimizer step", (MARGIN.left + width - MARGIN.right) / 2, height - 6);
  pen.save(); pen.translate(12, (height - MARGIN.bottom + MARGIN.top) / 2); pen.rotate(-Math.PI / 2); pen.fillText($("curve").value, 0, 0); pen.restore();
  pen.textAlign = "right";
  for (const t of logarithmic ? powers(y0, y1) : ticks(y0, y1, 6)) {
    const y = logarithmic ? 10 ** t : t;
    pen.strokeStyle = color("--grid"); pen.beginPath(); pen.moveTo(MARGIN.left, Y(y)); pen.lineTo(width - MARGIN.right, Y(y)); pen.stroke();
    pen.fillText(format(+y.toPrecision(3)), MARGIN.left - 6, Y(y) + 4);
  }
  pen.save();
  pen.beginPath(); pen.rect(MARGIN.left, MARGIN.top, width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom); pen.clip();
  const positive = (y) => logarithmic ? Math.max(y, 10 ** y0) : y;
  const trace = (line) => { pen.beginPath(); line.steps.forEach((step, k) => k ? pen.lineTo(X(step), Y(positive(line.mean[k]))) : pen.moveTo(X(step), Y(positive(line.mean[k])))); pen.stroke(); };
  const front = (line) => line.setting === picked;
  for (const line of [...lines].reverse().sort((a, b) => front(a) - front(b))) {
    const colored = line.rank < MOST_COLORS || front(line);
    const own = line.rank < MOST_COLORS ? hue(line.rank) : front(line) ? color("--text") : color("--faint");
    if (colored && line.low && line.n > 1) {
      pen.globalAlpha = front(line) ? 0.35 : 0.16; pen.fillStyle = own; pen.beginPath();
      line.steps.forEach((step, k) => k ? pen.lineTo(X(step), Y(positive(line.high[k]))) : pen.moveTo(X(step), Y(positive(line.high[k]))));
      for (let k = line.steps.length - 1; k >= 0; k--) pen.lineTo(X(line.steps[k]), Y(positive(line.low[k])));
      pen.fill();
    }
    pen.globalAlpha = picked && !front(line) ? 0.35 : colored ? 1 : 0.6;
    pen.strokeStyle = own; pen.lineWidth = front(line) ? 3 : colored ? 1.7 : 1;
    if (line.steps.length > 1) trace(line);
    else { pen.beginPath(); pen.arc(X(line.steps[0]), Y(positive(line.mean[0])), 3, 0, 7); pen.fillStyle = own; pen.fill(); }
  }
  pen.globalAlpha = 1;
  if (cursor !== null) { pen.strokeStyle = color("--soft"); pen.lineWidth = 1; pen.beginPath(); pen.moveTo(X(cursor), MARGIN.top); pen.lineTo(X(cursor), height - MARGIN.bottom); pen.stroke(); }
  if (drag) { pen.fillStyle = color("--accent"); pen.globalAlpha = 0.2; pen.fillRect(Math.min(drag[0], drag[1]), MARGIN.top, Math.abs(drag[1] - drag[0]), height); }
  pen.restore();
  legend();
}
let legendOf = "";
function legend() {
  const first = groups.slice(0, MOST_COLORS).filter((each) => lines.some((line) => line.setting === each.setting));
  const key = `${dark.matches}${first.map((each) => each.setting).join("|")}${groups.length}`;
  if (key === legendOf) return;
  legendOf = key;
  $("legend").replaceChildren(...first.map((each) => {
    const text = lineOf(each.runs[0], nameOf(each)), entry = make("span", { title: text, style: `--own: ${hue(groups.indexOf(each))}` }, text);
    entry.addEventListener("pointerenter", () => highlight(each.setting));
    entry.addEventListener("pointerleave", () => highlight(null));
    return entry;
  }));
  const rest = groups.length - first.length;
  if (rest > 0) $("legend").append(make("span", { style: "--own: var(--faint)" }, `${rest} others`));
}
const tell = (line, step, event) => {
  const name = $("curve").value, y = at(line.steps, line.mean, step), high = line.high && at(line.steps, line.high, step);
  const deviation = line.n > 1 ? ` ± ${+(high - y).toPrecision(2)} (${line.n} runs)` : "";
  show(event, `${line.label}\n${name} ${y === null ? "-" : format(y)}${deviation}\nstep ${Math.round(step)}`);
};
let drag = null;
canvas.addEventListener("pointerdown", (event) => { if (event.pointerType !== "touch") drag = [event.offsetX, event.offsetX]; });
canvas.addEventListener("pointermove", (event) => {
  if (!view) return;
  if (drag) drag[1] = event.offsetX;
  cursor = Math.min(view.x1, Math.max(view.x0, view.step(event.offsetX)));
  let nearest = null, least = 40;
  for (const line of lines) {
    const y = at(line.steps, line.mean, cursor);
    const distance = y === null ? Infinity : Math.abs(view.Y(y) - event.offsetY);
    if (distance < least) { least = distance; nearest = line; }
  }
  picked = nearest ? nearest.setting : null;
  if (nearest) tell(nearest, cursor, event); else hide();
  draw();
});
addEventListener("pointerup", () => {
  if (!drag) return;
  const [from, to] = [Math.min(...drag), Math.max(...drag)];
  if (view && to - from > 8) zoom = [view.step(from), view.step(to)];
  drag = null;
  draw();
});
canvas.addEventListener("pointerleave", () => { cursor = null; picked = null; hide(); draw(); });
canvas.addEventListener("dblclick", () => { zoom = null; draw(); });
canvas.addEventListener("keydown", (event) => {
  if (!view) return;
  const width = view.x1 - view.x0, middle = cursor === null ? (view.x0 + view.x1) / 2 : cursor, places = lines.map((line) => line.setting);
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], next = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (move) cursor = Math.min(view.x1, Math.max(view.x0, middle + move * width / 50));
  else if (next && lines.length) { picked = places[(places.indexOf(picked) + next + places.length) % places.length]; cursor = middle; }
  else if (event.key === "+" || event.key === "=") zoom = [Math.max(view.x0, middle - width / 4), Math.min(view.x1, middle + width / 4)];
  else if (event.key === "-") zoom = [view.x0 - width / 2, view.x1 + width / 2];
  else if (event.key === "0") zoom = null;
  else if (event.key === "Escape") { picked = cursor = null; hide(); }
  else return;
  event.preventDefault();
  draw();
  const line = lines.find((each) => each.setting === picked) || lines[0], box = canvas.getBoundingClientRect();
  if (line && cursor !== null && view) tell(line, cursor, { clientX: box.left + view.X(cursor), clientY: box.top + 40 });
});
canvas.addEventListener("blur", () => { cursor = null; picked = null; hide(); draw(); });

// Scales of keys: numbers, logarithmic if they span a factor of 10 or more; other values in order.
function scaleOf(values) {
  const kinds = [...new Set(values.map((v) => v === undefined ? null : v))];
  const numbers = kinds.filter((v) => typeof v === "number");
  if (numbers.length === kinds.length && kinds.length) {
    const low = Math.min(...numbers), high = Math.max(...numbers), log = low > 0 && high / low >= 10, f = log ? Math.log10 : (v) => v;
    const place = (v) => typeof v !== "number" ? null : high === low ? 0.5 : (f(v) - f(low)) / (f(high) - f(low));
    const marks = kinds.length <= 8 ? numbers.sort((a, b) => a - b) : log
      ? Array.from({ length: Math.floor(f(high)) - Math.ceil(f(low)) + 1 }, (_, k) => 10 ** (Math.ceil(f(low)) + k)) : ticks(low, high, 5).filter((t) => t >= low && t <= high);
    return { place, marks };
  }
  kinds.sort((a, b) => String(a).localeCompare(String(b)));
  return { place: (v) => kinds.length === 1 ? 0.5 : kinds.indexOf(v === undefined ? null : v) / (kinds.length - 1), marks: kinds };
}
const scored = runs.map((run, i) => i).filter((i) => metric && metric in runs[i].metrics && runs[i].status === "finished");
const scores = scored.map((i) => runs[i].metrics[metric]), lowest = Math.min(...scores), highest = Math.max(...scores);
const share = (i) => { const s = highest === lowest ? 0.5 : (runs[i].metrics[metric] - lowest) / (highest - lowest); return best > 0 ? s : 1 - s; };
const about = (i) => `${lineOf(i)}\n${metric} ${format(runs[i].metrics[metric])}`;
const marksOf = new Map();  // elements of a run, to hide and to color
const mark = (i, node) => {
  if (!marksOf.has(i)) marksOf.set(i, []);
  marksOf.get(i).push(node);
  node.addEventListener("pointermove", (event) => { node.classList.add("hot"); show(event, about(i)); });
  node.addEventListener("pointerleave", () => { node.classList.remove("hot"); hide(); });
};

function parallel() {
  const axes = [...data.settings.filter((key) => new Set(scored.map((i) => format(runs[i].keys[key]))).size > 1), metric].slice(-10);
  if (!scored.length || axes.length < 2) { $("parallel").replaceChildren(make("p", { class: "note" }, "No key differs between finished runs.")); return; }
  // No name may overlap the next one.
  const least = 84 + (axes.length - 1) * (8 + 6.3 * Math.max(...axes.map((name) => labelOf(name).length)));
  const width = Math.max(Math.min($("parallel").clientWidth, 1200), least), height = 340, top = 34, bottom = 316, left = 24, right = width - 60;
  const X = (k) => left + (right - left) * k / (axes.length - 1);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, style: `min-width: ${least}px`, role: "img", "aria-label": `Parallel coordinates of ${axes.join(", ")}` });
  const scales = axes.map((name) => scaleOf(scored.map((i) => valueOf(runs[i], name))));
  const Y = (k, v) => { const place = scales[k].place(v); return place === null ? null : bottom - place * (bottom - top); };
  for (const i of [...scored].sort((a, b) => share(a) - share(b))) {
    const points = axes.map((name, k) => [X(k), Y(k, valueOf(runs[i], name))]).filter((p) => p[1] !== null);
    const path = make("path", { d: points.map(([x, y], k) => `${k ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("") });
    svg.append(path);
    mark(i, path);
  }
  axes.forEach((name, k) => {
    svg.append(make("line", { class: "axis", x1: X(k), x2: X(k), y1: top, y2: bottom }));
    const anchor = k === 0 ? "start" : k === axes.length - 1 ? "end" : "middle";
    svg.append(make("text", { x: k === 0 ? 4 : k === axes.length - 1 ? width - 4 : X(k), y: 16, "text-anchor": anchor, "font-weight": 600 }, labelOf(name)));
    for (const value of scales[k].marks) svg.append(make("text", { x: X(k) + 5, y: Y(k, value) + 4, "paint-order": "stroke", class: "value" }, format(value)));
  });
  $("parallel").replaceChildren(svg);
}
function scatter(title, values, log) {
  const used = scored.filter((i) => values(i) !== undefined && values(i) !== null);
  const width = 340, height = 240, left = 56, right = width - 14, top = 12, bottom = height - 40;
  const scale = scaleOf(used.map(values)), range = highest - lowest || Math.abs(highest) || 1;
  const X = (v) => left + 10 + scale.place(v) * (right - left - 20), Y = (v) => bottom - 6 - (v - lowest) / range * (bottom - top - 12);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${metric} against ${title}` });
  for (const t of ticks(lowest, highest > lowest ? highest : lowest + range, 5)) {
    svg.append(make("line", { class: "grid", x1: left, x2: right, y1: Y(t), y2: Y(t) }), make("text", { class: "soft", x: left - 5, y: Y(t) + 4, "text-anchor": "end" }, format(t)));
  }
  let last = -Infinity;
  for (const value of scale.marks) {
    const x = X(value), text = format(value), room = text.length * 3.4 + 4;
    if (x - room < last) continue;
    last = x + room;
    svg.append(make("text", { class: "soft", x, y: bottom + 16, "text-anchor": "middle" }, text));
  }
  svg.append(make("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }), make("text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, title));
  for (const i of used) { const dot = make("circle", { cx: X(values(i)).toFixed(1), cy: Y(runs[i].metrics[metric]).toFixed(1), r: 3.5, "fill-opacity": 0.75 }); svg.append(dot); mark(i, dot); }
  return make("figure", { style: "margin:0" }, make("h3", {}, `${metric} against ${title}`), svg);
}
function slices() {
  const keys = data.settings.filter((key) => new Set(scored.map((i) => format(runs[i].keys[key]))).size > 1);
  $("slices").replaceChildren(...keys.slice(0, 12).map((key) => scatter(key, (i) => runs[i].keys[key])));
  if (!keys.length) $("slices").replaceChildren(make("p", { class: "note" }, "No key differs between finished runs."));
  const costs = ["samples_per_s", "step_ms", "peak_memory_mib"].filter((name) => scored.some((i) => name in runs[i].metrics));
  const titles = { samples_per_s: "samples/s", step_ms: "time of a step (ms)", peak_memory_mib: "peak memory (MiB)" };
  $("cost").replaceChildren(...costs.map((name) => scatter(titles[name], (i) => runs[i].metrics[name])));
  if (!costs.length) $("cost").replaceChildren(make("p", { class: "note" }, "These runs have no such metrics."));
}

// What does not depend on the filter
function fixed() {
  $("confusions").replaceChildren(...data.confusions.map((found) => {
    const head = make("tr", {}, make("th", {}, "true \\ predicted"), ...found.classes.map((name) => make("th", { scope: "col" }, name)));
    const body = found.matrix.map((row, k) => {
      const total = row.reduce((a, b) => a + b, 0) || 1;
      return make("tr", {}, make("th", { scope: "row" }, found.classes[k]), ...row.map((count, at) => {
        const strong = Math.round(100 * Math.sqrt(count / total));
        const cell = make("td", { style: `background: color-mix(in srgb, ${at === k ? "var(--accent)" : "var(--bad)"} ${strong}%, transparent);${strong > 55 ? "color:var(--ground)" : ""}` }, count ? String(count) : "");
        return cell;
      }));
    });
    return make("figure", { style: "margin:0", class: "wide" }, make("h3", {}, `${found.run}, ${found.split}`), make("table", { class: "matrix" }, make("thead", {}, head), make("tbody", {}, ...body)));
  }));
  $("pictures").replaceChildren(...data.pictures.map((found) => make("figure", { style: "margin:0" }, make("h3", {}, `${found.run}: ${found.what}`), make("img", { src: found.src, alt: `${found.what} of ${found.run}` }))));
  const resumed = runs.map((run, i) => i).filter((i) => runs[i].resumed);
  const before = new Map(runs.map((run, i) => [run.next, i]).filter(([next]) => next !== null));
  const step = (i) => `${runs[i].name} (${runs[i].status}, step ${format(runs[i].metrics.global_step)})`;
  const chain = (i) => make("li", {}, step(i), ...(runs[i].next === null ? [] : [make("ul", {}, chain(runs[i].next))]));
  const roots = runs.map((run, i) => i).filter((i) => runs[i].next !== null && !before.has(i));
  const alone = resumed.filter((i) => !before.has(i)).map((i) => make("li", {}, `${step(i)}, resumed from ${runs[i].resumed}`));
  $("lineage").replaceChildren(make("ul", {}, ...roots.map(chain), ...alone));
  $("failed").replaceChildren(...runs.filter((run) => run.again).flatMap((run) => [
    make("div", { class: "error" }, `${run.path} ${run.status}: ${run.error || "no reason given"}`), make("pre", { tabindex: "0" }, run.again)]));
  for (const [id, count] of [["confusion", data.confusions.length], ["picture", data.pictures.length], ["lineage", resumed.length], ["failed", runs.filter((run) => run.again).length]])
    $(`${id}-section`).hidden = !count;
}
function paint() {
  for (const [i, nodes] of marksOf) for (const node of nodes) node.style[node.tagName === "path" ? "stroke" : "fill"] = shade(share(i));
}
function highlight(setting) {
  picked = setting;
  draw();
  for (const [i, nodes] of marksOf) for (const node of nodes) node.classList.toggle("hot", setting !== null && runs[i].setting === setting);
}
function refresh() {
  group();
  table();
  collect();
  draw();
  for (const [i, nodes] of marksOf) for (const node of nodes) node.classList.toggle("off", !shown[i]);
  $("count").textContent = `${shown.filter(Boolean).length} of ${runs.length} runs`;
}
$("filter").addEventListener("input", () => {
  const text = $("filter").value.trim();
  let test = () => true;
  try { if (text) test = parse(text); } catch (error) {
    $("filter").setAttribute("aria-invalid", "true");
    $("count").textContent = error.message;
    return;
  }
  $("filter").removeAttribute("aria-invalid");
  shown = runs.map((run, i) => test(i));
  refresh();
});
if (tasks.length > 1) $("tasks").append(...tasks.map((each, k) =>
  make("a", { href: `#${k}`, ...(each === data ? { "aria-current": "page" } : {}) }, `${each.task} (${each.runs.length})`)));
for (const name of data.curves) $("curve").append(make("option", {}, name));
for (const id of ["curve", "each"]) $(id).addEventListener("change", () => { collect(); draw(); });
$("log").addEventListener("change", draw);
$("reset").addEventListener("click", () => { zoom = null; draw(); });
addEventListener("resize", draw);
dark.addEventListener("change", () => { colors.clear(); paint(); draw(); });
parallel();
slices();
fixed();
paint();
refresh();
