"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (selector, root = document) => root.querySelector(selector);
const make = (tag, attributes = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), attributes);
  element.append(...children);
  return element;
};
const escape = text => text.replace(/[&<>"]/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const bytesText = n => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < 4) { n /= 1024; unit += 1; }
  return `${n >= 100 || unit === 0 ? Math.round(n) : n.toPrecision(3)} ${units[unit]}`;
};
const secondsText = s => s >= 1 ? `${s.toFixed(2)} s` : s >= 1e-3 ? `${(s * 1e3).toFixed(1)} ms` : `${(s * 1e6).toFixed(0)} µs`;

let graph = null;          // the graph that is shown
let originsOfNode = [];    // node -> origins that contain it
let nodesOfPlace = null;   // "file:line" -> nodes
let selection = null;      // { nodes: Set, origins: Set }
let panes = [];

// --- colours of texts ------------------------------------------------------------------------------------------------

const TOKENS = {
  program: /(#.*$)|("(?:[^"\\]|\\.)*")|(%[\w.]+)|\b((?:memory|kernel|control|extern|check|symbol|collective|device|random|note|stream)\.\w+)\b|\b([bif]\d+|bf16|u\d+|bool|c\d+)(?=\[)|(@\w[\w.]*)|\b(\d+(?:\.\d+)?)\b/g,
  python: /(#.*$)|("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|()\b(def|return|if|else|elif|for|in|while|with|as|import|from|del|None|True|False|lambda|and|or|not|raise|try|except)\b|()(@[\w.]+)|\b(\d+(?:\.\d+)?)\b/g,
  cpp: /(\/\/.*$|^\s*#.*$)|("(?:[^"\\]|\\.)*")|()\b(for|if|else|return|const|static|inline|extern|void|struct|namespace|using|template|auto|while|switch|case|break)\b|\b(float|double|int|int64_t|int32_t|bool|Tensor|size_t|uint8_t)\b|()\b(\d+(?:\.\d+)?f?)\b/g,
};
const CLASSES = ["c", "y", "v", "k", "y", "k", "d"];

function coloured(text, language) {
  const pattern = TOKENS[language];
  if (!pattern || text.length > 4000) return escape(text);
  let result = "", last = 0;
  pattern.lastIndex = 0;
  for (let match; (match = pattern.exec(text));) {
    if (!match[0]) { pattern.lastIndex += 1; continue; }
    const group = match.slice(1).findIndex(part => part);
    result += escape(text.slice(last, match.index)) + `<span class="${CLASSES[group]}">${escape(match[0])}</span>`;
    last = match.index + match[0].length;
  }
  return result + escape(text.slice(last));
}

// --- panes -----------------------------------------------------------------------------------------------------------
// A pane's content is a list of rows: { text, number, language, node | origin | origins | nodes, kind }.

const hasTimes = () => Object.keys(graph.times).length > 0;

// The time of the line that runs a call; lines that free or check its operands have the same origin, but no time.
function timeOf(text, origin) {
  if (!hasTimes()) return undefined;
  const runs = /\b(kernel\.launch|extern\.\w+|collective\.\w+|control\.call) @/.test(text);
  const time = runs && origin >= 0 ? graph.times[graph.origins[origin][1]] : undefined;
  return time ? secondsText(time[0]) : "";
}

function programRows(position, withDifferences) {
  const stage = graph.stages[position], rows = [];
  const before = position > 0 ? graph.stages[position - 1].rows : [];
  const changes = withDifferences && position > 0 ? stage.changes : [];
  let number = 0, next = 0;
  const row = (index, kind) => {
    const [text, origin, numbered] = graph.rows[index];
    const shown = numbered && kind !== "removed" ? number++ : "";
    rows.push({ text, origin: kind === "removed" ? -1 : origin, number: shown, language: "program", kind, time: timeOf(text, origin) });
  };
  stage.rows.forEach((index, at) => {
    while (next < changes.length && changes[next][2] <= at && changes[next][3] <= at) next += 1;
    const change = changes[next];
    if (change && change[2] === at) {
      for (let old = change[0]; old < change[1]; old += 1) row(before[old], "removed");
    }
    row(index, change && change[2] <= at && at < change[3] ? "added" : "");
  });
  return rows;
}

function fileRows() {
  const rows = [];
  graph.files.forEach((file, index) => {
    rows.push({ text: file.name, kind: "head" });
    for (const [number, text] of file.lines) {
      if (!number) { rows.push({ text: "        ⋯", kind: "" }); continue; }
      rows.push({ text, number, nodes: nodesOfPlace.get(`${index}:${number}`) || [], language: "python" });
    }
  });
  return rows.length ? rows : [{ text: "The graph has no source lines.", kind: "head" }];
}

function moduleRows() {
  const nodesIn = new Map();
  graph.nodeSources.forEach(([, , module], node) => {
    if (!nodesIn.has(module)) nodesIn.set(module, []);
    nodesIn.get(module).push(node);
  });
  if (!graph.modules.length) return [{ text: "The graph has no modules.", kind: "head" }];
  return graph.modules.map(([path, class_]) => {
    const nodes = [];
    for (const [module, own] of nodesIn) if (module === path || module.startsWith(path + ".")) nodes.push(...own);
    const depth = path.split(".").length - 1;
    return { text: `${"  ".repeat(depth)}${path.split(".").pop()}: ${class_}`, nodes, module: path };
  });
}

function kernelRows(loops) {
  const rows = [];
  for (const kernel of graph.kernels) {
    const times = kernel.launches === 1 ? "1 launch" : `${kernel.launches} launches`;
    rows.push({ text: `@${kernel.name}  ${kernel.language}, ${times}`, kind: "head", origins: kernel.origins });
    const text = loops ? kernel.loops || "(no loop IR: the kernel was loaded from a cache, or is the model's own)" : kernel.source;
    const language = loops ? "program" : kernel.language === "cpp" ? "cpp" : "python";
    text.split("\n").forEach((line, index) => rows.push({ text: line, number: index + 1, origins: kernel.origins, language }));
    rows.push({ text: "" });
  }
  return rows.length ? rows : [{ text: "The program has no kernels.", kind: "head" }];
}

const emittedRows = language => graph.emitted[language].map(([text, origin, origins], index) => (
  { text, ...(origins ? { origins } : { origin }), number: index + 1, language: language === "cpp" || origins && text.includes(";") ? "cpp" : "python" }
));

function contents() {
  const last = graph.stages.length - 1;
  const stages = graph.stages.map((stage, index) => [
    `stage ${index}`, `Program after ${stage.name}${index ? ", differences" : ""}`, () => programRows(index, true),
  ]);
  return [
    ["source", "Model source", fileRows],
    ["modules", "Modules", moduleRows],
    ["graph", "FX graph", () => graph.graph.length
      ? graph.graph.map(([text, node], index) => ({ text, node, number: index, language: "program" }))
      : [{ text: "The FX graph is not known: one of torch's caches had the compiled graph.", kind: "head" }]],
    ["program", "Program", () => programRows(last, false)],
    ...stages,
    ["kernels", "Kernels", () => kernelRows(false)],
    ["loops", "Kernels as loop IR", () => kernelRows(true)],
    ["python", "Emitted Python", () => emittedRows("python")],
    ["cpp", "Emitted C++", () => emittedRows("cpp")],
    ["fx", "Emitted FX graph", () => emittedRows("fx")],
  ];
}

const CHUNK = 100;

// By pane, the first row that computes: those before it declare and check inputs.
const FIRST_ROWS = {
  graph: rows => rows.findIndex(row => !row.text.endsWith("= placeholder")),
  program: rows => rows.findIndex(row => typeof row.number === "number" && !row.text.includes("check.")),
  python: rows => rows.findLastIndex(row => row.text.startsWith("def ")),
  cpp: rows => rows.findLastIndex(row => row.text.startsWith("static void run(")),
};

class Pane {
  constructor(shown) {
    this.select = make("select", { ariaLabel: "content of the pane" });
    this.count = make("span", { className: "count" });
    this.body = make("div", { className: "text", tabIndex: 0 });
    this.element = make("div", { className: "pane" }, make("div", { className: "bar" }, this.select, this.count), this.body);
    for (const [key, title] of contents()) this.select.append(make("option", { value: key, textContent: title }));
    this.select.value = shown;
    this.select.onchange = () => this.show(this.select.value);
    this.body.onclick = event => {
      const row = event.target.closest(".row");
      if (row) this.pick(Number(row.dataset.i));
    };
  }

  show(key) {
    this.key = key;
    this.rows = contents().find(([name]) => name === key)[2]();
    const parts = [];
    this.rows.forEach((row, index) => {
      if (index % CHUNK === 0) {
        const height = 18 * Math.min(CHUNK, this.rows.length - index);
        parts.push(`${index ? "</div>" : ""}<div class="chunk" style="contain-intrinsic-size:auto ${height}px">`);
      }
      const number = row.number === undefined ? "" : `<span class="n">${row.number}</span>`;
      const time = row.time === undefined ? "" : `<span class="s">${row.time}</span>`;
      const text = row.kind === "head" ? `<span class="head">${escape(row.text)}</span>` : coloured(row.text, row.language);
      const linked = linksOf(row) ? " link" : "";
      parts.push(`<div class="row${linked} ${row.kind === "head" ? "" : row.kind || ""}" data-i="${index}">${number}${time}<span class="t">${text || " "}</span></div>`);
    });
    this.body.innerHTML = parts.join("") + "</div>";
    this.elements = this.body.querySelectorAll(".row");
    this.mark(selection !== null);
    this.scrollToStart();
  }

  // A hidden element does not scroll, so this is repeated when the section appears.
  scrollToStart() {
    if (selection !== null) return;
    const first = FIRST_ROWS[this.key];
    this.body.scrollTop = first ? 18 * Math.max(0, first(this.rows) - 4) : 0;
  }

  pick(index) {
    const links = linksOf(this.rows[index]);
    if (!links) return;
    choose(links);
    this.elements[index].classList.add("picked");
    for (const pane of panes) pane.mark(pane !== this);
    this.elements[index].classList.add("picked");
  }

  mark(scroll) {
    let first = -1, firstKernel = -1, count = 0;
    this.rows.forEach((row, index) => {
      const hit = selection !== null && isHit(row);
      const element = this.elements[index];
      if (hit !== element.classList.contains("hit")) element.classList.toggle("hit", hit);
      element.classList.remove("picked");
      if (!hit) return;
      count += 1;
      if (row.origins && firstKernel < 0) firstKernel = index;
      if (!row.origins && first < 0) first = index;
    });
    if (first < 0) first = firstKernel;  // a call says more than the text of its kernel
    this.count.textContent = selection !== null ? `${count} of ${this.rows.length} lines` : `${this.rows.length} lines`;
    if (scroll && first >= 0) this.scrollTo(first);
  }

  scrollTo(index) {
    const top = 18 * index, height = this.body.clientHeight;
    if (top < this.body.scrollTop || top > this.body.scrollTop + height - 40) this.body.scrollTop = Math.max(0, top - height / 3);
  }

  find(text) {
    let first = -1;
    this.rows.forEach((row, index) => {
      const matches = text !== "" && row.text.toLowerCase().includes(text);
      this.elements[index].classList.toggle("matches", matches);
      if (matches && first < 0) first = index;
    });
    if (first >= 0) this.scrollTo(first);
  }
}

// --- links -----------------------------------------------------------------------------------------------------------

function linksOf(row) {
  const nodes = new Set(row.nodes || []), origins = new Set(row.origins || []);
  if (row.node !== undefined && row.node >= 0) nodes.add(row.node);
  if (row.origin !== undefined && row.origin >= 0) origins.add(row.origin);
  if (!nodes.size && !origins.size) return null;
  for (const node of row.node !== undefined || row.nodes ? nodes : []) {
    for (const origin of originsOfNode[node] || []) origins.add(origin);
  }
  if (row.origin !== undefined || row.origins) {
    for (const origin of origins) for (const node of graph.origins[origin][2]) nodes.add(node);
  }
  return { nodes, origins };
}

function isHit(row) {
  if (row.kind === "removed") return false;
  if (row.node !== undefined) return selection.nodes.has(row.node);
  if (row.origin !== undefined) return selection.origins.has(row.origin);
  if (row.origins) return row.origins.some(origin => selection.origins.has(origin));
  return row.nodes ? row.nodes.some(node => selection.nodes.has(node)) : false;
}

function choose(links) {
  selection = links;
  showDetails();
}

function clearSelection() {
  selection = null;
  for (const pane of panes) pane.mark(false);
  showDetails();
}

function chooseAndShow(links) {
  location.hash = "code";
  choose(links);
  for (const pane of panes) pane.mark(true);
}

function nodeLinks(node) { return { nodes: new Set([node]), origins: new Set(originsOfNode[node] || []) }; }

function showDetails() {
  const details = $("#details");
  if (!selection) {
    details.textContent = "Click a line: its origins and results are highlighted in all panes. Escape clears.";
    return;
  }
  const nodes = [...selection.nodes], names = nodes.map(node => graph.nodes[node]);
  const places = new Set(), modules = new Set(), reasons = new Set(), operators = new Set();
  const outcomes = new Map(graph.coverage.map(row => [row[5], row]));
  for (const node of nodes) {
    const [file, line, module] = graph.nodeSources[node];
    if (file >= 0) places.add(`${graph.files[file].name.split("/").pop()}:${line}`);
    if (module) modules.add(module);
    const outcome = outcomes.get(node);
    if (outcome) { operators.add(outcome[1]); if (outcome[3]) reasons.add(outcome[3]); }
  }
  const handles = [...selection.origins].map(origin => graph.origins[origin][1]).filter(handle => handle);
  const times = [...selection.origins].map(origin => graph.times[graph.origins[origin][1]]).filter(time => time);
  const time = times.length ? [secondsText(times.reduce((sum, [seconds]) => sum + seconds, 0))] : [];
  const list = (items, most = 12) => {
    const all = [...items];
    return escape(all.slice(0, most).join(", ")) + (all.length > most ? ` and ${all.length - most} more` : "");
  };
  const parts = [["Nodes", names], ["Operators", operators], ["Calls", handles], ["Time", time], ["Source", places], ["Modules", modules], ["Not fused", reasons]];
  details.innerHTML = parts.filter(([, items]) => [...items].length)
    .map(([title, items]) => `<span><b>${title}:</b> ${list(items)}</span>`).join("");
}

