// --- coverage --------------------------------------------------------------------------------------------------------

function coverageClass(kind, reason) {
  if (kind !== "call") return kind === "view" ? "view" : "fused";
  if (reason.includes("by design") || !reason) return "design";
  return reason.includes("no lowering rule") ? "norule" : "declined";
}
const COVERAGE = [
  ["fused", "fused"], ["view", "view, no work"], ["design", "library call, by design"], ["declined", "called, declined by its rule"],
  ["norule", "called, no rule yet"],
];

function showCoverage() {
  const section = $("#coverage"), counted = graph.coverage.filter(row => ["fused", "view", "call"].includes(row[2]));
  section.replaceChildren(make("h2", { textContent: "Coverage" }));
  if (!counted.length) {
    section.append(make("p", { className: "muted", textContent: "The coverage is not known: one of torch's caches had the compiled graph, or it has no operators." }));
    return;
  }
  const groups = new Map(), totals = { fused: 0, view: 0, design: 0, declined: 0, norule: 0 };
  for (const row of counted) {
    const class_ = coverageClass(row[2], row[3]), key = `${class_}\0${row[1]}\0${row[3]}`;
    totals[class_] += 1;
    if (!groups.has(key)) groups.set(key, { class_, operator: row[1], reason: row[3], rows: [] });
    groups.get(key).rows.push(row);
  }
  const stack = make("div", { className: "stack" });
  for (const [class_] of COVERAGE) if (totals[class_]) stack.append(make("div", { className: class_, style: `flex:${totals[class_]}` }));
  const legend = make("div", { className: "muted" });
  for (const [class_, title] of COVERAGE) legend.append(make("span", { className: `key ${class_}` }), `${totals[class_]} ${title}`);
  section.append(stack, legend);
  const table = make("table", {}, make("tr", {}, ...["", "operator", "count", "reason", "nodes"].map(title => make("th", { textContent: title }))));
  const order = ["norule", "declined", "design", "fused", "view"];
  const sorted = [...groups.values()].sort((a, b) => order.indexOf(a.class_) - order.indexOf(b.class_) || b.rows.length - a.rows.length);
  for (const group of sorted) {
    const nodes = make("td", { className: "mono" });
    for (const row of group.rows.slice(0, 4)) {
      const link = make("a", { className: "jump", href: "#code", textContent: row[0], title: row[4] });
      link.onclick = event => { event.preventDefault(); if (row[5] >= 0) chooseAndShow(nodeLinks(row[5])); };
      nodes.append(link, row[4] ? ` (${row[4]})  ` : "  ");
    }
    if (group.rows.length > 4) nodes.append(`and ${group.rows.length - 4} more`);
    table.append(make("tr", {},
      make("td", {}, make("span", { className: `key ${group.class_}`, style: "margin-left:0" })),
      make("td", { className: "mono", textContent: group.operator }),
      make("td", { className: "num", textContent: String(group.rows.length) }),
      make("td", { textContent: group.reason || COVERAGE.find(([name]) => name === group.class_)[1] }), nodes));
  }
  section.append(make("h2", { textContent: "Operators" }), table);
}

// --- memory ----------------------------------------------------------------------------------------------------------

const PALETTE = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#86bcb6"];
const LEFT = 84, BOTTOM = 34, TOP = 12, RIGHT = 16;

// The distance of marks on an axis, at most `count` of them: 1, 2, 5, 10, 20... lines, and powers of two of bytes.
function lineStep(lines, count) {
  for (let power = 1; ; power *= 10) for (const digit of [1, 2, 5]) if (lines / (digit * power) <= count) return digit * power;
}
function byteStep(bytes, count) {
  let step = 1;
  while (bytes / step > count) step *= 2;
  return step;
}

class Chart {
  constructor(parent, width, height, lines, first, maximum) {
    Object.assign(this, { width, height, lines, first, maximum });
    const ratio = window.devicePixelRatio || 1;
    this.canvas = make("canvas", { width: width * ratio, height: height * ratio, style: `width:${width}px;height:${height}px` });
    this.context = this.canvas.getContext("2d");
    this.context.scale(ratio, ratio);
    this.boxes = [];
    parent.append(make("div", { className: "chart" }, this.canvas));
    this.canvas.onmousemove = event => this.hover(event);
    this.canvas.onmouseleave = () => { tip.style.display = "none"; };
    this.canvas.onclick = event => {
      const box = this.at(event);
      if (box && box.origin >= 0) chooseAndShow(linksOf({ origin: box.origin }));
    };
  }
  x(line) { return LEFT + (line - this.first) * (this.width - LEFT - RIGHT) / Math.max(this.lines, 1); }
  y(bytes) { return this.height - BOTTOM - bytes * (this.height - BOTTOM - TOP) / Math.max(this.maximum, 1); }
  axes() {
    const c = this.context, style = getComputedStyle(document.body);
    c.font = "11px system-ui, sans-serif";
    c.fillStyle = c.strokeStyle = style.color;
    c.lineWidth = 1;
    const bytesApart = byteStep(this.maximum, Math.max(1, Math.min(7, this.height / 50)));
    c.textAlign = "right"; c.textBaseline = "middle";
    for (let value = 0; value <= this.maximum; value += bytesApart) {
      c.globalAlpha = 0.15; c.fillRect(LEFT, this.y(value), this.width - LEFT - RIGHT, 1); c.globalAlpha = 1;
      c.fillText(bytesText(value), LEFT - 8, this.y(value));
    }
    const linesApart = lineStep(this.lines, 14);
    c.textAlign = "center"; c.textBaseline = "top";
    for (let line = Math.ceil(this.first / linesApart) * linesApart; line <= this.first + this.lines; line += linesApart) {
      c.fillRect(this.x(line), this.height - BOTTOM, 1, 4);
      c.fillText(String(line), this.x(line), this.height - BOTTOM + 6);
    }
    c.textAlign = "right";
    c.fillText("line of the program →", this.width - RIGHT, this.height - 13);
  }
  box(first, end, low, high, colour, info) {
    const c = this.context, x = this.x(first), y = this.y(high), w = Math.max(this.x(end) - x, 1), h = Math.max(this.y(low) - y, 0.5);
    c.fillStyle = colour;
    c.fillRect(x, y, w, h);
    this.boxes.push({ x, y, w, h, ...info });
  }
  frame(first, end, low, high) {
    this.context.strokeStyle = "rgba(255,255,255,.7)"; this.context.lineWidth = 0.6;
    this.context.strokeRect(this.x(first), this.y(high), Math.max(this.x(end) - this.x(first), 1), Math.max(this.y(low) - this.y(high), 0.5));
  }
  label(first, end, low, high, text) {
    const w = this.x(end) - this.x(first), h = this.y(low) - this.y(high), c = this.context;
    c.font = "11px system-ui, sans-serif";
    if (h < 12 || w < c.measureText(text).width + 6) return;
    c.fillStyle = "#fff"; c.textAlign = "left"; c.textBaseline = "middle";
    c.fillText(text, this.x(first) + 3, (this.y(low) + this.y(high)) / 2);
  }
  at(event) {
    const bounds = this.canvas.getBoundingClientRect();
    const x = (event.clientX - bounds.left) * this.width / bounds.width, y = (event.clientY - bounds.top) * this.height / bounds.height;
    return this.boxes.find(box => x >= box.x && x <= box.x + box.w && y >= box.y && y <= box.y + box.h);
  }
  hover(event) {
    const box = this.at(event);
    tip.style.display = box ? "block" : "none";
    if (!box) return;
    tip.textContent = box.text;
    tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - 420)}px`;
    tip.style.top = `${event.clientY + 14}px`;
  }
}
const tip = make("div", { className: "tip" });

function bufferText(buffer) {
  const offset = buffer.offset === undefined ? "" : ` at offset ${bytesText(buffer.offset)}`;
  return `%${buffer.name}: ${buffer.type}\n${bytesText(buffer.bytes)}${offset}, lines ${buffer.first} to ${buffer.end - 1}`;
}

function drawLive(parent, memory, withInputs) {
  const inside = memory.buffers.filter(item => item.bytes && (withInputs || !(item.owner === "caller" && item.first === 0)));
  const ends = new Map(), begins = new Map();
  inside.forEach((item, index) => {
    (begins.get(item.first) || begins.set(item.first, []).get(item.first)).push(index);
    (ends.get(item.end) || ends.set(item.end, []).get(item.end)).push(index);
  });
  const changes = [...new Set([...begins.keys(), ...ends.keys(), memory.lines])].filter(line => line <= memory.lines).sort((a, b) => a - b);
  // buffers are stacked in the order of their definition; a freed buffer lets those above it move down
  let stack = [], largest = 0;
  const runs = [], open = new Map();
  changes.forEach(line => {
    const gone = new Set(ends.get(line) || []);
    if (gone.size) stack = stack.filter(index => !gone.has(index));
    stack.push(...(begins.get(line) || []));
    const present = new Set(stack);
    for (const [index, run] of open) if (!present.has(index)) { runs.push({ ...run, end: line }); open.delete(index); }
    let low = 0;
    for (const index of stack) {
      const run = open.get(index);
      if (!run || run.low !== low) {
        if (run) runs.push({ ...run, end: line });
        open.set(index, { index, first: line, low });
      }
      low += inside[index].bytes;
    }
    largest = Math.max(largest, low);
  });
  for (const run of open.values()) runs.push({ ...run, end: memory.lines });
  const chart = new Chart(parent, Math.max(700, Math.min(1500, window.innerWidth - 60)), 380, memory.lines, 0, largest);
  chart.axes();
  const widest = new Map();
  for (const run of runs) {
    const item = inside[run.index];
    if (run.end <= run.first) continue;
    const grey = item.owner === "caller" && item.first === 0;
    chart.box(run.first, run.end, run.low, run.low + item.bytes, grey ? "#9aa4ae" : PALETTE[run.index % PALETTE.length], { text: bufferText(item), origin: item.origin });
    if (runs.length < 4000) chart.frame(run.first, run.end, run.low, run.low + item.bytes);
    const best = widest.get(run.index);
    if (!best || run.end - run.first > best.end - best.first) widest.set(run.index, run);
  }
  for (const run of widest.values()) chart.label(run.first, run.end, run.low, run.low + inside[run.index].bytes, `%${inside[run.index].name}`);
  const c = chart.context, x = chart.x(memory.position + 0.5);
  c.strokeStyle = "#cf222e"; c.lineWidth = 1.5; c.setLineDash([5, 4]);
  c.beginPath(); c.moveTo(x, TOP); c.lineTo(x, chart.height - BOTTOM); c.stroke(); c.setLineDash([]);
  c.fillStyle = "#cf222e"; c.textAlign = x > chart.width / 2 ? "right" : "left"; c.textBaseline = "top";
  c.fillText(` peak, line ${memory.position} `, x, TOP);
}

function showMemory() {
  const section = $("#memory"), memory = graph.memory;
  section.replaceChildren(make("h2", { textContent: "Live memory over the lines of the program" }));
  const hints = Object.entries(memory.hints).map(([name, value]) => `${name} = ${value}`).join(", ");
  const live = memory.buffers.filter(item => item.first <= memory.position && memory.position < item.end && item.bytes);
  const inputs = live.filter(item => item.owner === "caller" && item.first === 0);
  const inputBytes = inputs.reduce((sum, item) => sum + item.bytes, 0);
  section.append(make("p", { className: "muted", textContent:
    `Peak ${bytesText(memory.peak)} at line ${memory.position}, of which ${bytesText(inputBytes)} are inputs and constants` +
    `${hints ? `, for ${hints}` : ""}. Point at a buffer for its name; click it for its code.` }));
  const box = make("input", { type: "checkbox", id: "with-inputs" });
  section.append(make("label", {}, box, " show inputs and constants"));
  const area = make("div");
  const draw = () => { area.replaceChildren(); drawLive(area, memory, box.checked); };
  box.onchange = draw;
  section.append(area);
  draw();
  section.append(make("h2", { textContent: `Live at the peak, line ${memory.position}` }));
  const table = make("table", {}, make("tr", {}, ...["buffer", "bytes", "", "type", "lines", "memory of", "computes"].map(title => make("th", { textContent: title }))));
  const own = live.filter(item => !inputs.includes(item)).sort((a, b) => b.bytes - a.bytes);
  const row = (name, bytes, type, lines, owner, origin) => {
    const computes = make("td");
    if (origin >= 0) {
      const link = make("a", { className: "jump", href: "#code", textContent: graph.origins[origin][0].slice(0, 120) });
      link.onclick = event => { event.preventDefault(); chooseAndShow(linksOf({ origin })); };
      computes.append(link);
    }
    table.append(make("tr", {}, make("td", { className: "mono", textContent: name }), make("td", { className: "num", textContent: bytesText(bytes) }),
      make("td", {}, make("span", { className: "meter", style: `width:${Math.max(1, 160 * bytes / Math.max(memory.peak, 1))}px` })),
      make("td", { className: "mono", textContent: type }), make("td", { textContent: lines }), make("td", { textContent: owner }), computes));
  };
  own.slice(0, 60).forEach(item => row(`%${item.name}`, item.bytes, item.type, `${item.first} to ${item.end - 1}`, item.owner, item.origin));
  if (own.length > 60) row(`${own.length - 60} smaller buffers`, own.slice(60).reduce((sum, item) => sum + item.bytes, 0), "", "", "", -1);
  if (inputs.length) row(`${inputs.length} inputs and constants`, inputBytes, "", "", "caller", -1);
  section.append(table);
  section.append(make("h2", { textContent: "Pools" }));
  if (!memory.pools.length) {
    section.append(make("p", { className: "muted", textContent: memory.planned ? "The plan has no pools." : "Memory is not planned: each buffer is an allocation of its own (option memory_planning)." }));
    return;
  }
  section.append(make("p", { className: "muted", textContent: "All pools have one scale of bytes. Lines are those of the program before the step plan_memory." }));
  const largest = Math.max(...memory.pools.map(pool => pool.bytes)), lines = Math.max(...memory.pools.map(pool => pool.end));
  for (const pool of memory.pools) {
    section.append(make("p", {}, make("b", { textContent: pool.name }), ` on ${pool.device}: ${bytesText(pool.bytes)}, lines ${pool.first} to ${pool.end - 1}, ${pool.algorithm}`));
    const height = TOP + BOTTOM + Math.max(30, 330 * pool.bytes / Math.max(largest, 1));
    const chart = new Chart(section, Math.max(700, Math.min(1500, window.innerWidth - 60)), height, lines, 0, pool.bytes);
    chart.axes();
    pool.buffers.forEach((item, index) => {
      chart.box(item.first, item.end, item.offset, item.offset + item.bytes, PALETTE[index % PALETTE.length], { text: bufferText(item), origin: -1 });
      chart.frame(item.first, item.end, item.offset, item.offset + item.bytes);
      chart.label(item.first, item.end, item.offset, item.offset + item.bytes, `%${item.name}`);
    });
  }
}

// --- the time of lines -----------------------------------------------------------------------------------------------

function showTime() {
  const section = $("#time");
  section.replaceChildren(make("h2", { textContent: "Time of each line" }));
  const total = Object.values(graph.times).reduce((sum, [seconds]) => sum + seconds, 0);
  section.append(make("p", { className: "muted", textContent:
    `${secondsText(total)} in these lines of a run. "At the limit" is the time of their bytes and operations at the rates that the device reaches; ` +
    "the lines with the most to gain are first." }));
  const titles = ["call", "time", "", "to gain", "at the limit", "bytes", "rate", "operations", "computes"];
  const table = make("table", {}, make("tr", {}, ...titles.map(title => make("th", { textContent: title }))));
  const origins = new Map(graph.origins.map(([, handle], origin) => [handle, origin]));
  const gain = ([seconds, limit]) => Math.max(0, seconds - limit);
  const rows = Object.entries(graph.times).sort((a, b) => gain(b[1]) - gain(a[1]));
  const most = Math.max(...rows.map(([, [seconds]]) => seconds), 1e-9);
  const number = text => make("td", { className: "num", textContent: text });
  for (const [handle, time] of rows) {
    const [seconds, limit, bytes, flops] = time, origin = origins.get(handle);
    const link = make("a", { className: "jump", href: "#code", textContent: handle });
    link.onclick = event => { event.preventDefault(); if (origin !== undefined) chooseAndShow(linksOf({ origin })); };
    table.append(make("tr", {}, make("td", { className: "mono" }, link), number(secondsText(seconds)),
      make("td", {}, make("span", { className: "meter", style: `width:${Math.max(1, 160 * seconds / most)}px` })),
      number(secondsText(gain(time))), number(secondsText(limit)), number(bytesText(bytes)),
      number(seconds ? `${(bytes / seconds / 1e9).toPrecision(3)} GB/s` : ""),
      number(flops && seconds ? `${(flops / seconds / 1e9).toPrecision(3)} GFLOP/s` : ""),
      make("td", { textContent: origin === undefined ? "" : graph.origins[origin][0].slice(0, 120) })));
  }
  section.append(table);
}

// --- the compile -----------------------------------------------------------------------------------------------------

function showCompile() {
  const section = $("#compile");
  section.replaceChildren(make("h2", { textContent: "Steps" }));
  const steps = new Map();
  for (const event of graph.events) {
    if (event.event !== "StepEnded") continue;
    const step = steps.get(event.step) || { seconds: 0, changed: null };
    step.seconds += event.seconds;
    step.changed = event.changed;
    steps.set(event.step, step);
  }
  const most = Math.max(...[...steps.values()].map(step => step.seconds), 1e-9);
  const table = make("table", {}, make("tr", {}, ...["step", "time", "", "program"].map(title => make("th", { textContent: title }))));
  for (const [name, step] of steps) {
    table.append(make("tr", {}, make("td", { className: "mono", textContent: name }), make("td", { className: "num", textContent: secondsText(step.seconds) }),
      make("td", {}, make("span", { className: "meter", style: `width:${Math.max(1, 260 * step.seconds / most)}px` })),
      make("td", { className: "muted", textContent: step.changed === null ? "" : step.changed ? "changed" : "unchanged" })));
  }
  section.append(steps.size ? table : make("p", { className: "muted", textContent: "The program was loaded from a cache; no step ran." }));
  section.append(make("h2", { textContent: "Events" }));
  const events = make("table", {}, make("tr", {}, ...["at", "event", ""].map(title => make("th", { textContent: title }))));
  for (const event of graph.events) {
    if (["StepEnded", "OperatorDeclined"].includes(event.event)) continue;
    const { at_s: at, event: name, ...fields } = event;
    const text = Object.entries(fields).map(([key, item]) => `${key}: ${Array.isArray(item) ? item.map(part => Array.isArray(part) ? part.join(" ") : part).join(", ") : item}`).join("\n");
    events.append(make("tr", {}, make("td", { className: "num", textContent: secondsText(at) }), make("td", { textContent: name }),
      make("td", { className: "mono", style: "white-space:pre-wrap", textContent: text.slice(0, 3000) })));
  }
  section.append(events, make("h2", { textContent: "Options" }), make("p", { className: "mono", textContent: graph.options || "all at their default" }));
}

