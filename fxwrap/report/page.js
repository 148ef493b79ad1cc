// --- the page --------------------------------------------------------------------------------------------------------

const SECTIONS = { code: () => panes.forEach(pane => pane.scrollToStart()), coverage: showCoverage, memory: showMemory, time: showTime, compile: showCompile };
let drawn = new Set();

function showSection() {
  const name = location.hash.slice(1) in SECTIONS ? location.hash.slice(1) : "code";
  for (const key of Object.keys(SECTIONS)) {
    $(`#${key}`).classList.toggle("on", key === name);
    $(`nav a[href="#${key}"]`).classList.toggle("on", key === name);
  }
  if (!drawn.has(name)) { drawn.add(name); SECTIONS[name](); }
}

function showGraph(index) {
  graph = DATA.graphs[index];
  selection = null;
  drawn = new Set();
  originsOfNode = [];
  graph.origins.forEach(([, , nodes], origin) => {
    for (const node of nodes) (originsOfNode[node] = originsOfNode[node] || []).push(origin);
  });
  nodesOfPlace = new Map();
  graph.nodeSources.forEach(([file, line], node) => {
    if (file < 0) return;
    const key = `${file}:${line}`;
    (nodesOfPlace.get(key) || nodesOfPlace.set(key, []).get(key)).push(node);
  });
  const lines = graph.rows.length ? graph.stages[graph.stages.length - 1].rows.filter(row => graph.rows[row][2]).length : 0;
  const seconds = graph.events.reduce((sum, event) => sum + (event.event === "StepEnded" ? event.seconds : 0), 0);
  const launches = graph.kernels.reduce((sum, kernel) => sum + kernel.launches, 0);
  $("#summary").textContent = `${graph.kind}: ${graph.coverage.length} calls, ${lines} lines, ${launches} launches of ${graph.kernels.length} kernels, ` +
    `peak ${bytesText(graph.memory.peak)}, ${graph.cached ? "from a cache" : `compiled in ${secondsText(seconds)}`}, emitter ${graph.emitter}`;
  const emitted = graph.emitter in graph.emitted ? graph.emitter : "python";
  const shown = graph.files.length ? ["source", "graph", "program", emitted] : ["graph", "program", emitted];
  panes = shown.map(key => new Pane(key));
  $("#panes").replaceChildren(...panes.map(pane => pane.element));
  for (const pane of panes) pane.show(pane.select.value);
  $('nav a[href="#time"]').hidden = !hasTimes();
  if (location.hash === "#time" && !hasTimes()) location.hash = "code";
  showDetails();
  showSection();
}

const chooser = $("#graphs");
DATA.graphs.forEach((item, index) => chooser.append(make("option", { value: index, textContent: item.name })));
chooser.hidden = DATA.graphs.length === 1;
chooser.onchange = () => showGraph(Number(chooser.value));
document.body.append(tip);
window.onhashchange = showSection;
document.onkeydown = event => { if (event.key === "Escape") clearSelection(); };
let pending = 0;
$("#search").oninput = event => {
  clearTimeout(pending);
  pending = setTimeout(() => { for (const pane of panes) pane.find(event.target.value.trim().toLowerCase()); }, 150);
};
showGraph(0);
document.body.dataset.ready = "true";
