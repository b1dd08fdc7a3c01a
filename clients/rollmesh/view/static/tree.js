// The tree of a session as a graph: a row for each node, a lane for each branch, long linear runs as one row.

import { h, number, svg } from "./dom.js";

const FOLD = 5, ROW = 26, LANE = 16, LEFT = 14;
const STEPS = { ArrowUp: "parent", ArrowDown: "child", ArrowLeft: "before", ArrowRight: "after" };

// Rows from top to bottom: {nodes, lane, above}. `above` is the row of the parent. A row has several nodes if it is a run
// of at least FOLD nodes without branches, which begins with no id in `opened`. The largest branch comes last and stays
// in its parent's lane, which the others leave free, so that no edge crosses a node.
export function layout(nodes, opened = new Set()) {
  const children = Map.groupBy(nodes, (one) => one.parent ?? null), byId = new Map(nodes.map((one) => [one.node_id, one]));
  const below = (one) => children.get(one.node_id) || [];
  const isInner = (one) => Boolean(one?.parent) && below(one).length === 1 && children.get(one.parent).length === 1;
  const sizes = new Map(), rows = [];
  for (const one of [...nodes].reverse()) sizes.set(one.node_id, below(one).reduce((sum, next) => sum + sizes.get(next.node_id), 1));
  const stack = (children.get(null) || []).map((node) => ({ node, lane: 0, above: null })).reverse();
  while (stack.length) {
    const { node, lane, above } = stack.pop(), run = [node];
    if (isInner(node) && !isInner(byId.get(node.parent)) && !opened.has(node.node_id)) {
      while (isInner(below(run.at(-1))[0])) run.push(below(run.at(-1))[0]);
    }
    const row = { nodes: run.length < FOLD ? [node] : run, lane, above };
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
  const labels = new Map();
  found.paths.forEach((one) => {
    const first = one.nodes.find((id) => !labels.has(id));
    for (const id of one.nodes) if (!labels.has(id)) labels.set(id, id === first && found.paths.length > 1 ? one.lineage.toLowerCase().replaceAll("_", " ") : "");
  });
  const x = (row) => LEFT + row.lane * LANE, y = (row) => (rows.indexOf(row) + 0.5) * ROW;
  const at = new Map(rows.map((row) => [row, y(row)]));
  const edge = (row) => svg("path", { class: isOn(row) ? "edge on" : "edge", d: `M${x(row.above)} ${at.get(row.above)}V${at.get(row)}H${x(row)}` });
  const items = rows.map((row) => {
    const [node] = row.nodes, isRun = row.nodes.length > 1, marked = [...new Set(row.nodes.flatMap((one) => one.reasons))].filter((one) => one !== "EXACT");
    const tokens = row.nodes.reduce((sum, one) => sum + one.ids.length, 0), label = labels.get(node.node_id);
    const text = isRun ? `${row.nodes.length} nodes` : `${node.node_id} ${node.role.toLowerCase()}`;
    const place = { cx: x(row), cy: at.get(row), r: isRun ? 7 : 5 };
    return svg("g", {
      class: `item${isOn(row) ? " on" : ""}${node.sampled ? " sampled" : ""}${isRun ? " run" : ""}`, role: "treeitem", tabindex: "-1",
      "aria-selected": String(isOn(row)), "aria-level": String(row.lane + 1), "aria-expanded": isRun ? "false" : null,
      "aria-label": [text, !isRun && node.sampled && "sampled", `${number(tokens)} tokens`, label, ...marked].filter(Boolean).join(", "),
    }, svg("rect", { x: 0, y: at.get(row) - ROW / 2 + 1, width: "100%", height: ROW - 2, rx: 4 }), svg("circle", place),
    svg("text", { x: x(row) + 12, y: at.get(row) + 4 }, text, ` · ${number(tokens)}`, label && ` · ${label}`, marked.length > 0 && svg("tspan", { class: "mark" }, " !")));
  });
  const redraw = (id) => {
    graph(box, found, chosen, opened, choose);
    focus(box, id);
  };
  const act = (row) => {
    if (row.nodes.length > 1) {
      opened.add(row.nodes[0].node_id);
      redraw(row.nodes[0].node_id);
    } else if (!isOn(row)) {
      const index = found.paths.findIndex((one) => one.nodes.includes(row.nodes[0].node_id));
      if (index >= 0) choose(index, row.nodes[0].node_id);
    }
  };
  const move = (index) => {
    for (const one of items) one.setAttribute("tabindex", "-1");
    items[index].setAttribute("tabindex", "0");
    items[index].focus();
  };
  items.forEach((item, index) => {
    const row = rows[index];
    item.dataset.node = row.nodes[0].node_id;
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
  h("p", { class: "quiet" }, "● sampled, ○ given, ! not exact. Arrow keys move, Enter chooses."));
}

export function focus(box, id) {
  const item = box.querySelector(`[data-node="${Number(id)}"]`);
  for (const one of box.querySelectorAll(".item")) one.setAttribute("tabindex", one === item ? "0" : "-1");
  item?.focus({ preventScroll: true });
}
