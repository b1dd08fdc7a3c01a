// The pages: a run, its groups, its sessions, those that are open, and the mesh. Addresses are after "#".

import { chart } from "./chart.js";
import { advantageIn, ask, badge, h, link, number, Refused, seconds, table, time } from "./dom.js";
import { comparePage, sessionPage } from "./session.js";
import { focus } from "./tree.js";

const PAGES = [["run", "Run"], ["groups", "Groups"], ["sessions", "Sessions"], ["evaluations", "Evaluations"], ["open", "Open"], ["mesh", "Mesh"]];
const main = document.getElementById("main"), state = document.getElementById("state");
const LIVE_MS = 2000, ROWS = 100;
let choices = {}, turn = 0, timer = 0;

function theme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("theme", name);
}
theme(localStorage.getItem("theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () =>
  theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));

const FILTERS = {
  __proto__: null,  // an address may name anything
  run: [["run_id", "model", "purpose", "reason"]],
  groups: [["run_id", "model", "outcome", "purpose", "reason"], "group_order"],
  sessions: [["run_id", "model", "outcome", "purpose", "reason"], "session_order"],
};

function filters(page, query) {
  const [names, order] = FILTERS[page];
  const field = (name, label, control) => h("label", {}, label, control);
  const select = (name, values, label) => field(name, label, h("select", { name }, h("option", { value: "" }, "any"),
    [...new Set([values, query[name] ?? []].flat())].map((one) => h("option", { value: one, selected: query[name] === one }, named(one)))));
  const form = h("form", { class: "filters", role: "search" },
    names.map((name) => select(name, choices[name] || [], name.replace("_", " "))),
    field("words", "words", h("input", { name: "words", type: "search", value: query.words || "" })),
    field("where", "where", h("input", {
      name: "where", type: "search", value: query.where || "", placeholder: "task=sort reward>=0.5",
      title: `Metadata as NAME=VALUE, and ${(choices.numbers || []).join(", ")} as NAME<NUMBER, with blanks between. All must hold.`,
    })),
    order && field("order", "order", h("select", { name: "order" },
      choices[order].map((one) => h("option", { selected: query.order === one }, one)))),
    h("button", {}, "Show"));
  const go = (event) => {
    event.preventDefault();
    const given = [...form.elements].filter((one) => one.selectedIndex ?? one.value);  // the first choice is any
    location.hash = link([page], { ...kept(query), ...Object.fromEntries(given.map((one) => [one.name, one.value])) });
  };
  form.addEventListener("submit", go);
  form.addEventListener("change", go);
  return form;
}

const kept = ({ group_id, by, compare }) => ({ group_id, by, compare });
const named = (one) => one || "(none)";

function pages(parts, query, total) {
  const offset = Number(query.offset || 0);
  const to = (at, text) => h("a", { href: link(parts, { ...query, offset: String(at) }) }, text);
  return h("p", {}, `${number(total)} found. `, offset > 0 && to(Math.max(0, offset - ROWS), "Previous"), " ",
    offset + ROWS < total && to(offset + ROWS, "Next"));
}

// What a mesh answers, or without one the other value.
const ofMesh = async (path, other) => choices.mesh ? ask(path) : other;

async function runPage(query) {
  const by = query.by === "time" ? "time" : "version";
  const wanted = { ...query, by };
  const compared = (query.compare || "").split(",").filter(Boolean).map((one) => one.split(":").map(decodeURIComponent));
  const [found, mesh, seen, history, ...others] = await Promise.all([
    ask("series", wanted), ofMesh("mesh", {}).catch((error) => ({ error: error.message })),
    ofMesh("alarms", { alarms: [] }), ofMesh("history", { points: [], events: [] }),
    ...compared.map(([field, name]) => ask("series", { ...wanted, [field]: name })),
  ]);
  const all = others.length ? others.map((one, index) => [named(compared[index][1]), one]) : [["", found]];
  const label = by === "time" ? (x) => time(x).slice(11) : (x) => `v${x}`;
  const happened = history.events.map((one) => ({ x: one.at, name: one.name }));
  const events = by === "time" ? [...pushes(found.points), ...happened] : [];
  const load = (title, ...names) => chart(title, names.map(([name, shown]) => (
    { name: shown, points: history.points.map((p) => ({ x: p.at, y: p[name] })) })), { label, events: happened });
  const curve = (title, ...names) => chart(title, all.flatMap(([run, one]) => names.flatMap(([name, shown]) =>
    byRun(one.points).map(([policy, points]) => ({
      name: [run, shown, policy].filter(Boolean).join(" "),
      points: points.map((p) => ({ x: p.at, y: p[name] })),
    })))), { label, events });
  const reports = Object.entries(mesh.steps || {}).filter(([, steps]) => steps.length);
  const rate = by === "time" ? found.points.map((p) => ({ x: p.at, y: p.sampled_sum / (found.width_ms / 1000) })) : [];
  return [
    h("h1", {}, "Run"),
    filters("run", query),
    h("div", { class: "bar" }, "Over", ["version", "time"].map((one) => h("button", {
      type: "button", "aria-pressed": String(one === by),
      onclick: () => { location.hash = link(["run"], { ...query, by: one }); },
    }, one === "version" ? "policy versions" : "time")), compareForm(query, compared)),
    alarms(mesh, seen.alarms),
    h("div", { class: "charts" },
      curve("Reward", ["reward", ""]),
      curve("Share with a reward of at least 1", ["passed", ""]),
      curve("Turns of a session", ["turns", ""]),
      curve("Sampled tokens of a session", ["sampled", ""]),
      curve("Shares of sessions", ["failed", "not completed"], ["cut", "cut by length"], ["malformed", "with malformed calls"]),
      curve("Versions within a session", ["lag", ""]),
      by === "time" && chart("Sampled tokens per second", [{ points: rate }], { label, events }),
      curve("Sessions", ["sessions", ""]),
      by === "time" && [
        load("Leases of engines", ["leases", "granted"], ["capacity", "room"]),
        load("Requests that wait", ["queue", "for a lease"], ["waiting", "in engines"]),
        load("Open sessions", ["sessions", ""]),
        load("Engines", ["engines", ""]),
      ],
      reports.flatMap(([name, steps]) => metricNames(steps).map((metric) => chart(`${name}: ${metric}`,
        [{ points: steps.map((one) => ({ x: one.step, y: one[metric] })) }], { label: (x) => `step ${x}` })))),
    h("h2", {}, "Lag"),
    h("p", { class: "quiet" }, "Versions from the first to the last sampled token of a session."),
    table([
      ["versions", (one) => number(one.lag), "number"],
      ["sessions", (one) => number(one.sessions), "number"],
      ["", (one) => bar(one.sessions / Math.max(...found.lags.map((other) => other.sessions))), "share"],
    ], found.lags),
    mesh.members && [
      h("h2", {}, "Engines"), membersTable(mesh.members.filter((one) => one.kind === "engine")),
      h("h2", {}, "Consumers"), consumersTable(mesh.consumers),
    ],
    history.events.length > 0 && [h("h2", {}, "What happened"), table([
      ["time", (one) => time(one.at)],
      ["event", (one) => one.name, "text"],
    ], history.events.slice(-50).reverse())],
    h("h2", {}, "Reasons"),
    table([
      ["reason", (one) => h("a", { href: link(["sessions"], { ...query, reason: one.reason }) }, one.reason)],
      ["sessions", (one) => number(one.sessions), "number"],
      ["meaning", (one) => choices.sentences[one.reason] || "", "text"],
    ], found.reasons),
  ];
}

function bar(share) {
  const made = h("i", {});
  made.style.setProperty("width", `${100 * share}%`);
  return made;
}

// Adds a run or a model to those that are side by side.
function compareForm(query, compared) {
  const valueOf = (one) => one.map(encodeURIComponent).join(":"), known = compared.map(valueOf);
  const group = (label, field) => h("optgroup", { label }, (choices[field] || []).map((one) => [valueOf([field, one]), named(one)])
    .filter(([value]) => !known.includes(value)).map(([value, one]) => h("option", { value }, one)));
  const select = h("select", { "aria-label": "Add a run or a model to compare" }, h("option", { value: "" }, "compare with …"),
    group("runs", "run_id"), group("models", "model"));
  select.addEventListener("change", () => {
    const first = known.length || query.run_id === undefined ? known : [valueOf(["run_id", query.run_id])];
    location.hash = link(["run"], { ...query, compare: [...new Set([...first, select.value])].slice(-4).join(",") });
  });
  return [select, known.length > 0 && h("a", { href: link(["run"], { ...query, compare: undefined }) }, "one curve only")];
}

function byRun(points) {
  const found = new Map();
  for (const one of points) {
    const name = one.run ? `run ${one.run}` : "";
    found.set(name, [...(found.get(name) || []), one]);
  }
  return [...found].map(([name, of]) => [name, ended(of)]);
}

// Without the newest point while it has few sessions: the first to end are the short ones.
function ended(points) {
  const [before, last] = points.slice(-2);
  return last && last.sessions < before.sessions / 2 ? points.slice(0, -1) : points;
}

function pushes(points) {
  const newest = points.map((one) => one.newest ?? -1);
  return points.filter((_, index) => index && newest[index] > Math.max(...newest.slice(0, index)))
    .map((one) => ({ x: one.at, name: `first tokens of version ${one.newest % 1e12}` }));
}

const metricNames = (steps) => Object.keys(steps.at(-1)).filter((name) => name !== "step" && name !== "unix_ms").slice(0, 12);

function alarms(mesh, found) {
  return [
    mesh.error && h("p", { class: "error", role: "alert" }, mesh.error),
    found.map((one) => h("p", { class: "alarm" }, h("strong", {}, one.name), ` ${one.where}: ${one.message}.`)),
  ];
}

const spread = (row) => (row.highest !== null && row.highest === row.lowest && row.sessions > 1 ? badge("no variance", "All rewards are equal, so no advantage.", true) : "");

async function groupsPage(query) {
  const found = await ask("groups", { ...query, limit: ROWS });
  return [
    h("h1", {}, "Groups"),
    filters("groups", query),
    pages(["groups"], query, found.total),
    table([
      ["group", (row) => h("a", { href: link(["sessions"], { run_id: row.run_id, group_id: row.group_id, order: "highest reward" }) }, row.group_id)],
      ["run", (row) => row.run_id],
      ["sessions", (row) => `${row.sessions} of ${row.group_size}`, "number"],
      ["mean reward", (row) => number(row.mean), "number"],
      ["lowest", (row) => number(row.lowest), "number"],
      ["highest", (row) => number(row.highest), "number"],
      ["", spread],
      ["turns", (row) => number(row.turns), "number"],
      ["tokens", (row) => number(row.tokens), "number"],
      ["malformed", (row) => number(row.malformed), "number"],
      ["longest", (row) => seconds(row.seconds * 1000), "number"],
      ["closed", (row) => time(row.closed)],
    ], found.rows),
  ];
}

async function sessionsPage(query) {
  const { group_id, run_id } = query;
  const [found, groups] = await Promise.all([ask("sessions", { ...query, limit: ROWS }),
    group_id ? ask("groups", { group_id, run_id, limit: 1000 }) : { rows: [] }]);
  const groupOf = new Map(groups.rows.map((one) => [one.run_id, one]));
  const marked = new Set();
  const compare = h("button", { type: "button", disabled: true, onclick: () => { location.hash = link(["compare", ...marked]); } }, "Compare two");
  const mark = (row) => h("input", { type: "checkbox", "aria-label": `Compare ${row.session_id}`, onchange: (event) => {
    if (event.target.checked) marked.add(row.session_id); else marked.delete(row.session_id);
    compare.disabled = marked.size !== 2;
  } });
  return [
    h("h1", {}, query.group_id ? `Group ${query.group_id}` : "Sessions"),
    filters("sessions", query),
    h("div", { class: "bar" }, compare, query.group_id && h("a", { href: link(["sessions"], { ...query, group_id: undefined }) }, "All groups")),
    pages(["sessions"], query, found.total),
    query.group_id && h("p", { class: "quiet" }, "The advantage is the reward less the mean of the whole group, divided by the group's standard deviation."),
    table([
      ["", mark],
      ["session", (row) => h("a", { href: link(["session", row.session_id]) }, row.session_id), "id"],
      ["group", (row) => row.group_id && h("a", { href: link(["sessions"], { run_id: row.run_id, group_id: row.group_id }) }, `${row.group_id} ${row.sample_index}`)],
      ["outcome", (row) => [h("span", { class: row.outcome === "COMPLETED" ? "good" : "bad" }, row.outcome), row.superseded ? " superseded" : ""]],
      ["reward", (row) => number(row.reward), "number"],
      ...(query.group_id ? [["advantage", (row) => number(advantageIn(groupOf.get(row.run_id), row)), "number"]] : []),
      ["turns", (row) => number(row.turns), "number"],
      ["sampled", (row) => number(row.sampled), "number"],
      ["trained", (row) => number(row.trained), "number"],
      ["versions", versions],
      ["seconds", (row) => seconds(row.closed - row.opened), "number"],
      ["error", (row) => row.error.slice(0, 160), "text"],
      ["closed", (row) => time(row.closed)],
    ], found.rows),
  ];
}

function versions(row) {
  if (row.last_version === null) return "–";
  const shown = (one) => `${one >= 1e12 ? `run ${Math.floor(one / 1e12)} ` : ""}v${one % 1e12}`;
  return row.first_version === row.last_version ? shown(row.last_version) : `${shown(row.first_version)} to ${shown(row.last_version)}`;
}

const share = (one) => one && `${number(100 * one.value, 1)} % (${number(100 * one.low, 1)} to ${number(100 * one.high, 1)})`;

async function evaluationsPage() {
  const { rows } = await ask("evaluations");
  const most = (row) => Math.max(0, ...Object.keys(row.pass_at).map(Number));
  return [
    h("h1", {}, "Evaluations"),
    h("p", { class: "quiet" }, "Sessions of the purpose eval, by run and policy version. An attempt passes with a reward of at least 1. Intervals are of 95 %."),
    table([
      ["run", (row) => h("a", { href: link(["sessions"], { run_id: row.run_id, purpose: "EVAL", order: "lowest reward" }) }, row.run_id)],
      ["model", (row) => row.model],
      ["policy", (row) => row.version],
      ["tasks", (row) => number(row.tasks), "number"],
      ["sessions", (row) => number(row.sessions), "number"],
      ["without result", (row) => number(row.without_result), "number"],
      ["mean reward", (row) => number(row.reward), "number"],
      ["pass@1", (row) => share(row.pass_at[1]), "number"],
      ["pass@k", (row) => most(row) > 1 && `pass@${most(row)}: ${share(row.pass_at[most(row)])}`],
      ["numerics", (row) => row.numerics.map((one) => badge(one.slice(0, 12), one))],
      ["ended", (row) => time(row.closed)],
    ], rows),
  ];
}

async function openPage() {
  const { rows } = await ask("open");
  return [
    h("h1", {}, "Open sessions"),
    h("p", {}, `${number(rows.length)} open. The page follows them.`),
    table([
      ["session", (row) => h("a", { href: link(["session", row.session_id]) }, row.session_id), "id"],
      ["run", (row) => row.run_id],
      ["group", (row) => row.group_id && `${row.group_id} ${row.sample_index}`],
      ["turns", (row) => number(row.turns), "number"],
      ["in flight", (row) => number(row.in_flight), "number"],
      ["idle", (row) => seconds(row.idle_ms), "number"],
      ["opened", (row) => time(row.opened_unix_ms)],
    ], rows),
  ];
}

async function meshPage() {
  const [mesh, seen] = await Promise.all([ask("mesh").catch((error) => ({ error: error.message })), ask("alarms")]);
  if (!mesh.members) return [h("h1", {}, "Mesh"), alarms(mesh, seen.alarms)];
  return [
    h("h1", {}, "Mesh"),
    alarms(mesh, seen.alarms),
    h("p", {}, Object.entries(mesh.models).map(([model, version]) => `${model || "model"}: ${version}. `),
      `${number(mesh.sessions)} sessions, ${number(mesh.complete_groups)} complete groups, ${number(mesh.open_groups)} open ones, `,
      `${number(mesh.waiting_for_rewards)} wait for rewards, ${number(mesh.stored_bytes / 1e6)} MB stored.`,
      mesh.damaged > 0 && h("strong", { class: "bad" }, ` ${mesh.damaged} sessions are damaged.`)),
    h("h2", {}, "Members"),
    membersTable(mesh.members),
    h("h2", {}, "Consumers"),
    consumersTable(mesh.consumers),
  ];
}

function membersTable(members) {
  return table([
    ["kind", (one) => one.kind],
    ["id", (one) => one.replica_id],
    ["address", (one) => one.address],
    ["model", (one) => one.model],
    ["version", (one) => (one.kind === "engine" ? one.version : "")],
    ["leases", (one) => (one.kind === "engine" ? `${one.leases} of ${one.lease_capacity}` : ""), "number"],
    ["sessions", (one) => number(one.sessions), "number"],
    ["running", (one) => number(one.running), "number"],
    ["waiting", (one) => number(one.waiting), "number"],
    ["state", (one) => one.state.map((name) => badge(name, "", true))],
  ], members);
}

function consumersTable(consumers) {
  return table([
    ["name", (one) => one.name],
    ["ready", (one) => number(one.ready), "number"],
    ["leased", (one) => number(one.leased), "number"],
    ["acknowledged", (one) => number(one.acknowledged), "number"],
    ["filtered", (one) => Object.entries(one.filtered).map(([name, units]) => badge(`${name} ${units}`))],
  ], consumers);
}

function loginPage() {
  const field = h("input", { type: "password", name: "key", autocomplete: "off", required: true });
  const said = h("p", { role: "alert" });
  const form = h("form", { class: "filters" }, h("label", {}, "Key of this viewer", field), h("button", {}, "Log in"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await ask("login", {}, { method: "POST", body: field.value });
      show();
    } catch (error) {
      said.textContent = error.message;
    }
  });
  return [h("h1", {}, "Log in"), form, said];
}

const SHOWN = {
  __proto__: null,
  run: [runPage, 5000], groups: [groupsPage, 5000], sessions: [sessionsPage, 0], evaluations: [evaluationsPage, 5000], open: [openPage, LIVE_MS], mesh: [meshPage, LIVE_MS],
};

function missingPage(path) {
  return [
    h("h1", {}, "There is no such page"),
    h("p", {}, `The viewer has no page ${path.slice(0, 200)}. `, h("a", { href: link(["run"]) }, "Go to the run")),
  ];
}

// Returns what reads a page, and after how many milliseconds it is read again. Never is 0.
function pageOf(path, page, ids) {
  if (page === "session" && ids[0]) return [() => sessionPage(ids[0], choices), 0];
  if (page === "compare" && ids[1]) return [() => comparePage(ids, choices), 0];
  return SHOWN[page] || [() => missingPage(path), 0];
}

// What stays the same of an element when its page is drawn anew.
const keyOf = (one) => one.dataset.key || `${one.tagName} ${one.textContent}`;

// All that may be opened, with a key: its title, and its number among those with this title.
function foldable() {
  const counts = new Map();
  return [...main.querySelectorAll("details")].map((one) => {
    const title = one.firstChild.textContent, count = counts.get(title) ?? 0;
    counts.set(title, count + 1);
    return [`${title} ${count}`, one];
  });
}

// Whether the reader types, chooses, marks text or reads a point, so that the page should not change now.
function isInUse() {
  return !getSelection().isCollapsed || main.contains(document.activeElement) && ["INPUT", "SELECT"].includes(document.activeElement.tagName)
    || main.querySelector("figure:hover, details[open] > summary:hover") !== null;
}

// Draws the page anew. What is open, focused and scrolled stays so if it is the same page.
function replace(content) {
  const top = scrollY, aside = main.querySelector("aside")?.scrollTop, again = main.dataset.at === location.hash;
  const active = main.contains(document.activeElement) && document.activeElement, focused = active && active !== main && keyOf(active);
  const [node] = (active && active.dataset.nodes || "").split(" ");
  const opened = new Set(foldable().filter(([, one]) => one.open).map(([key]) => key));
  main.replaceChildren(...[content].flat(Infinity).filter(Boolean));
  if (again) {
    for (const [key, one] of foldable()) one.open = opened.has(key);
    const same = focused && [...main.querySelectorAll("[data-key], a, button, summary")].find((one) => keyOf(one) === focused);
    if (node) focus(main, node);
    else if (same) same.focus({ preventScroll: true });
    scrollTo(0, top);
    if (aside) main.querySelector("aside").scrollTop = aside;
  } else {
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
  main.dataset.at = location.hash;
}

function navigation(page) {
  const shown = PAGES.filter(([name]) => choices.mesh !== false || !["open", "mesh"].includes(name));
  document.querySelector("nav").replaceChildren(...shown.map(([name, title]) =>
    h("a", { href: link([name]), "aria-current": name === page ? "page" : null }, title)));
}

// What a list leaves out, and why.
const notes = (page) => SHOWN[page] ? choices.notes.map((one) => h("p", { class: "error", role: "status" }, one)) : [];

// The names in an address, or of a wrong one nothing.
function partsOf(path) {
  try {
    return path.split("/").map(decodeURIComponent);
  } catch {
    return [""];
  }
}

async function show() {
  const mine = ++turn;
  clearTimeout(timer);
  const [path, text] = location.hash.replace(/^#\/?/, "").split("?");
  const [page, ...ids] = partsOf(path || "run");
  const query = Object.fromEntries(new URLSearchParams(text || ""));
  navigation(page);
  const [read, again] = pageOf(path, page, ids);
  let live = again;
  try {
    if (SHOWN[page] || !choices.sentences) choices = await ask("choices");
    navigation(page);
    const made = await read(query);
    if (mine !== turn) return;
    live ||= made.live ? LIVE_MS : 0;
    if (main.dataset.at !== location.hash || !isInUse()) replace([notes(page), made.content || made]);
    document.title = `${main.querySelector("h1")?.textContent || "rollmesh"} - rollmesh`;
    state.textContent = live ? "live" : "";
  } catch (error) {
    if (mine !== turn) return;
    if (error instanceof Refused && error.status === 401) {
      delete main.dataset.at;
      main.replaceChildren(...loginPage());
      return;
    }
    live = again || 5000;
    if (main.dataset.at === location.hash) state.textContent = `not live: ${error.message}`;  // what was shown stays
    else {
      state.textContent = "";
      delete main.dataset.at;
      main.replaceChildren(h("h1", {}, "This page cannot be shown"), h("p", { class: "error", role: "alert" }, error.message),
        FILTERS[page] && choices.sentences ? filters(page, query) : "");
    }
  }
  if (live) timer = setTimeout(show, live);
}

addEventListener("hashchange", show);
show();
