// The tree of a session as a graph: a row for each node, a lane for each branch, long linear runs as one row.

import { h, number, svg } from "./dom.js";

const FOLD = 5, ROW = 26, LANE = 16, LEFT = 14;
const STEPS = { ArrowUp: "parent", ArrowDown: "child", ArrowLeft: "before", ArrowRight: "after" };

// Rows from top to bottom: {nodes, lane, above, run}. `above` is the row of the parent. A run has at least FOLD nodes without
// branches. It is one row, or has `run` at its first node if that one is in `opened`. The largest branch comes last and
// stays in its parent's lane, which the others leave free, so that no edge crosses a node.
export function layout(nodes, opened = new Set()) {
  const children = Map.groupBy(nodes, (one) => one.parent ?? null), byId = new Map(nodes.map((one) => [one.node_id, one]));
  const below = (one) => children.get(one.node_id) || [];
  const isInner = (one) => Boolean(one?.parent) && below(one).length === 1 && children.get(one.parent).length === 1;
  const sizes = new Map(), rows = [];
  for (const one of [...nodes].reverse()) sizes.set(one.node_id, below(one).reduce((sum, next) => sum + sizes.get(next.node_id), 1));
  const stack = (children.get(null) || []).map((node) => ({ node, lane: 0, above: null })).reverse();
  while (stack.length) {
    const { node, lane, above } = stack.pop(), run = [node];
    if (isInner(node) && !isInner(byId.get(node.parent))) {
      while (isInner(below(run.at(-1))[0])) run.push(below(run.at(-1))[0]);
    }
    const isRun = run.length >= FOLD;
    const row = { nodes: isRun && !opened.has(node.node_id) ? run : [node], lane, above, run: isRun };
    rows.push(row);
    const next = below(row.nodes.at(-1)).toSorted((one, other) => sizes.get(one.node_id) - sizes.get(other.node_id));
    for (const [index, one] of [...next.entries()].reverse()) {
      stack.push({ node: one, lane: lane + (index < next.length - 1 ? 1 : 0), above: row });
    }
  }
  return rows;
}

// Draws the graph into `box`. `choose(path)` is called with the index of the path that the reader chose.
export function graph(box, found, chosen, opened, choose) {
  const rows = layout(found.nodes, opened), path = found.paths[chosen], onPath = new Set(path?.nodes);
  const isOn = (row) => onPath.has(row.nodes[0].node_id);
  const siblings = (row) => rows.filter((one) => one.above === row.above);
  const labels = labelsOf(found);
  const x = (row) => LEFT + row.lane * LANE, y = (row) => (rows.indexOf(row) + 0.5) * ROW;
  const at = new Map(rows.map((row) => [row, y(row)]));
  const edge = (row) => svg("path", { class: isOn(row) ? "edge on" : "edge", d: `M${x(row.above)} ${at.get(row.above)}V${at.get(row)}H${x(row)}` });
  const items = rows.map((row) => {
    const [node] = row.nodes, isFolded = row.nodes.length > 1, marked = [...new Set(row.nodes.flatMap((one) => one.reasons))].filter((one) => one !== "EXACT");
    const tokens = row.nodes.reduce((sum, one) => sum + one.ids.length, 0), label = row.nodes.map((one) => labels.get(one.node_id)).filter(Boolean).join(", ");
    const text = isFolded ? `${row.nodes.length} nodes` : `${node.node_id} ${cut(node.role.toLowerCase())}`;
    const place = { cx: x(row), cy: at.get(row), r: row.run ? 7 : 5 };
    return svg("g", {
      class: `item${isOn(row) ? " on" : ""}${node.sampled ? " sampled" : ""}${row.run ? " run" : ""}`, role: "treeitem", tabindex: "-1",
      "aria-selected": String(isOn(row)), "aria-level": String(row.lane + 1), "aria-expanded": row.run ? String(!isFolded) : null,
      "aria-label": [text, !isFolded && node.sampled && "sampled", `${number(tokens)} tokens`, label, ...marked].filter(Boolean).join(", "),
    }, svg("rect", { x: x(row) + 8, y: at.get(row) - ROW / 2 + 1, width: "100%", height: ROW - 2, rx: 4 }), svg("circle", place),
    svg("text", { x: x(row) + 12, y: at.get(row) + 4 }, text, ` · ${number(tokens)}`, label && ` · ${label}`, marked.length > 0 && svg("tspan", { class: "mark" }, " !")));
  });
  const act = (row) => {
    const id = row.nodes[0].node_id, index = found.paths.findIndex((one) => one.nodes.includes(id));
    if (row.run && (row.nodes.length > 1 || isOn(row))) {
      if (!opened.delete(id)) opened.add(id);
      graph(box, found, chosen, opened, choose);
      focus(box, id);
    } else if (!isOn(row) && index >= 0) choose(index, id);
  };
  const move = (index) => {
    for (const one of items) one.setAttribute("tabindex", "-1");
    items[index].setAttribute("tabindex", "0");
    items[index].focus();
  };
  items.forEach((item, index) => {
    const row = rows[index];
    item.dataset.nodes = row.nodes.map((one) => one.node_id).join(" ");
    item.addEventListener("click", () => act(row));
    item.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") act(row);
      else if (!STEPS[event.key]) return;
      event.preventDefault();
      const beside = siblings(row), own = beside.indexOf(row), below = rows.filter((one) => one.above === row);
      const to = { parent: row.above, child: below.find(isOn) || below.at(-1), before: beside[own - 1], after: beside[own + 1] }[STEPS[event.key]];
      if (to) move(rows.indexOf(to));
    });
  });
  const last = rows.findLastIndex(isOn);
  items[Math.max(last, 0)]?.setAttribute("tabindex", "0");
  const height = rows.length * ROW, width = 230 + LANE * Math.max(0, ...rows.map((row) => row.lane));
  box.replaceChildren(svg("svg", { role: "tree", "aria-label": "Conversation tree", width, height },
    rows.filter((row) => row.above).toSorted((one, other) => isOn(one) - isOn(other)).map(edge), items),
  h("p", { class: "quiet" }, "● sampled, ○ given, ◌ a run, ! not exact. Arrow keys move, Enter chooses a path, and opens or folds a run."));
}

// The label of each node that begins a path, or whose label is another one than its parent's.
function labelsOf(found) {
  const labels = new Map(), byId = new Map(found.nodes.map((one) => [one.node_id, one]));
  for (const path of found.paths) {
    let first = found.paths.length > 1;
    for (const id of path.nodes.filter((one) => !labels.has(one))) {
      const node = byId.get(id), before = byId.get(node.parent)?.lineage ?? node.lineage;
      labels.set(id, cut(first ? path.lineage : node.lineage === before ? "" : node.lineage).toLowerCase().replaceAll("_", " "));
      first = false;
    }
  }
  return labels;
}

const cut = (text) => (text.length > 24 ? `${text.slice(0, 24)}…` : text);

// Focuses the row of a node, also if it is in a run.
export function focus(box, id) {
  const item = box.querySelector(`[data-nodes~="${Number(id)}"]`);
  if (!item) return;
  for (const one of box.querySelectorAll(".item")) one.setAttribute("tabindex", one === item ? "0" : "-1");
  item.focus({ preventScroll: true });
}
