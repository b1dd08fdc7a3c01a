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

export async function ask(path, query, options) {
  const given = new URLSearchParams(Object.entries(query || {}).filter(([, value]) => value !== ""));
  const text = given.toString();
  const response = await fetch(`/api/${path}${text ? `?${text}` : ""}`, options);
  const found = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refused(response.status, found.error || `HTTP ${response.status}`);
  return found;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : value.toFixed(digits);
}

export function time(ms) {
  return ms ? new Date(ms).toISOString().slice(0, 19).replace("T", " ") : "–";
}

export function seconds(ms) {
  return ms < 60000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.floor(ms / 60000)} min ${Math.round((ms % 60000) / 1000)} s`;
}

export function link(parts, query) {
  const given = new URLSearchParams(Object.entries(query || {}).filter(([, value]) => value));
  const text = given.toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

// Returns the function from a row of a group to its advantage: its reward less the group's mean, in standard deviations.
export function advantages(rows) {
  const rewards = rows.map((row) => row.reward).filter((one) => one !== null);
  const average = (values) => values.reduce((sum, one) => sum + one, 0) / values.length;
  const mean = average(rewards), deviation = Math.sqrt(average(rewards.map((one) => (one - mean) ** 2)));
  return (row) => (row.reward === null || !(deviation > 0) ? null : (row.reward - mean) / deviation);
}

export function badge(text, title, warn) {
  return h("span", { class: warn ? "badge warn" : "badge", title }, text);
}

export function table(columns, rows) {
  return h("div", { class: "wide" },
    h("table", {},
      h("thead", {}, h("tr", {}, columns.map(([name, , kind]) => h("th", { scope: "col", class: kind }, name)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, columns.map(([, show, kind]) => h("td", { class: kind }, show(row))))))));
}
