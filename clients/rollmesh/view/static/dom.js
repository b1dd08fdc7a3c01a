// Elements, numbers and requests. Text becomes text nodes only: content is never HTML.

export function h(tag, attributes, ...children) {
  const made = document.createElement(tag);
  set(made, attributes, children);
  return made;
}

export function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(made, attributes, children);
  return made;
}

function set(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false));
}

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

// Writes the pairs of a query. A value that is undefined is left out, and an empty one is meant.
function queryOf(pairs) {
  const text = new URLSearchParams(Object.entries(pairs || {}).filter(([, value]) => value !== undefined)).toString();
  return text && `?${text}`;
}

export async function ask(path, query, options) {
  const response = await fetch(`/api/${path}${queryOf(query)}`, options);
  const found = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refused(response.status, found.error || `HTTP ${response.status}`);
  return found;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e12 || (size > 0 && size < 10 ** -digits)) return value.toExponential(2);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return size >= 1000 ? Math.round(value).toLocaleString("en") : value.toFixed(digits);
}

export function time(ms) {
  const at = new Date(ms);
  return ms && !Number.isNaN(at.getTime()) ? at.toISOString().slice(0, 19).replace("T", " ") : "–";
}

export function seconds(ms) {
  return ms < 60000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.floor(ms / 60000)} min ${Math.round((ms % 60000) / 1000)} s`;
}

// An address within the viewer.
export const link = (parts, query) => `#/${parts.map(encodeURIComponent).join("/")}${queryOf(query)}`;

// Returns the advantage of a session in its group: its reward less the group's mean, in standard deviations.
export function advantageIn(group, session) {
  const deviation = Math.sqrt(group?.variance ?? 0);
  if (typeof session.reward !== "number" || session.superseded || !(deviation > 0) || group.lowest === group.highest) return null;
  return (session.reward - group.mean) / deviation;
}

// Writes a pair of the metadata as a term of the filter "where".
export const pairTerm = (name, value) => `"${`metadata.${name}=${value}`.replace(/[\\"]/g, "\\$&")}"`;

export function badge(text, title, warn) {
  return h("span", { class: warn ? "badge warn" : "badge", title }, text);
}

export function table(columns, rows) {
  return h("div", { class: "wide" },
    h("table", {},
      h("thead", {}, h("tr", {}, columns.map(([name, , kind]) => h("th", { scope: "col", class: kind }, name)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, columns.map(([, show, kind]) => h("td", { class: kind }, show(row))))))));
}
