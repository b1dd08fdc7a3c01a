// Curves over one axis, drawn once as SVG, with the numbers of the nearest point under the pointer or by arrow keys.

import { h, number, svg } from "./dom.js";

const WIDTH = 420, HEIGHT = 170, LEFT = 46, BOTTOM = 22, TOP = 8;

// `series` is [{name, points: [{x, y}]}], `events` is [{x, name}].
export function chart(title, series, { events = [], label = (x) => number(x) } = {}) {
  const drawn = series.map((one) => ({ ...one, points: one.points.filter((p) => Number.isFinite(p.y)) }))
    .filter((one) => one.points.length);
  const readout = h("output", {});
  const caption = h("figcaption", {}, title, readout);
  if (!drawn.length) return h("figure", {}, caption, h("p", { class: "quiet" }, "No numbers yet."));
  const all = drawn.flatMap((one) => one.points);
  const xs = [...new Set(all.map((p) => p.x))].sort((a, b) => a - b), [first, end] = [xs[0], xs.at(-1)];
  const [x0, x1] = ends(xs), [y0, y1] = ends(all.map((p) => p.y));
  const at = (x) => LEFT + ((x - x0) / (x1 - x0)) * (WIDTH - LEFT - 8);
  const up = (y) => HEIGHT - BOTTOM - ((y / 2 - y0 / 2) / (y1 / 2 - y0 / 2)) * (HEIGHT - BOTTOM - TOP);  // no sum is infinite
  const last = drawn.map((one) => `${one.name || title}: ${number(one.points.at(-1).y)}`).join(", ");
  const picture = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0",
    "aria-label": `${title} from ${label(first)} to ${label(end)}. Last: ${last}. Arrow keys read points.`,
  });
  for (const y of [y0, y0 / 2 + y1 / 2, y1]) {
    picture.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - 8, y1: up(y), y2: up(y) }),
      svg("text", { x: LEFT - 5, y: up(y) + 4, "text-anchor": "end" }, number(y, y1 - y0 < 0.1 ? 4 : 2)));
  }
  const under = (x, anchor) => svg("text", { x: at(x), y: HEIGHT - 6, "text-anchor": anchor }, label(x));
  picture.append(...(first === end ? [under(first, "middle")] : [under(first, "start"), under(end, "end")]));
  for (const event of events.filter((one) => one.x >= x0 && one.x <= x1)) {
    picture.append(svg("line", { class: "event", x1: at(event.x), x2: at(event.x), y1: TOP, y2: HEIGHT - BOTTOM },
      svg("title", {}, event.name)));
  }
  drawn.forEach((one, index) => {
    const colour = `var(--c${(index % 4) + 1})`;
    const line = one.points.map((p) => `${at(p.x).toFixed(1)},${up(p.y).toFixed(1)}`).join(" ");
    picture.append(svg("polyline", { class: "curve", points: line, stroke: colour }));
    if (one.points.length === 1) {
      picture.append(svg("circle", { cx: at(one.points[0].x), cy: up(one.points[0].y), r: 3, fill: colour }));
    }
  });
  let chosen = xs.length - 1;
  const read = () => {
    const x = xs[chosen];
    const values = drawn.map((one) => [one.name, one.points.find((p) => p.x === x)]).filter(([, p]) => p)
      .map(([name, p]) => `${name ? `${name} ` : ""}${number(p.y)}`);
    readout.value = `${label(x)}: ${values.join(", ")}`;
  };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const x = x0 + (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - 8) * (x1 - x0);
    chosen = xs.reduce((best, one, index) => (Math.abs(one - x) < Math.abs(xs[best] - x) ? index : best), 0);
    read();
  });
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    chosen = Math.min(Math.max(chosen + step, 0), xs.length - 1);
    read();
  });
  const names = drawn.length > 1 && h("p", { class: "key" }, drawn.map((one, index) => [dot(index), one.name]));
  return h("figure", {}, caption, picture, names);
}

function dot(index) {
  const mark = h("i", {});
  mark.style.setProperty("background", `var(--c${(index % 4) + 1})`);
  return mark;
}

function ends(values) {
  let low = values[0], high = values[0];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  const pad = Math.max(0.5, Math.abs(low) * 1e-9);
  return low === high ? [low - pad, high + pad] : [low, high];
}
