// A session: the tree, a path as transcript and as tokens, and two sessions from where they part.

import { advantageIn, ask, badge, h, link, number, pairTerm, seconds, time } from "./dom.js";
import { focus, graph } from "./tree.js";

const COLOURS = [["mask", "trained"], ["logprob", "log-probability"], ["version", "version"], ["reason", "reason"], ["none", "none"]];
const GROUP = "group advantage", LONG = 100_000;
const SHADES = { version: 4, reason: 8 };  // the colours that each kind has
const DIFFERENCE = "logprobs";  // a trainer's own ones are shown less those that were sampled
const kept = { path: Object.create(null), opened: Object.create(null), tokens: false, token: {}, colour: "mask" };  // while the reader goes from page to page

export async function sessionPage(id, choices) {
  const found = await ask("session", { id });
  found.special = new Set(choices.special);
  found.advantage = await advantageOf(found);
  const nodes = new Map(found.nodes.map((one) => [one.node_id, one]));
  const body = h("div", {}), tree = h("div", { class: "tree" });
  const draw = () => {
    const chosen = Math.min(kept.path[id] ?? main(found.paths), found.paths.length - 1), path = found.paths[chosen];
    kept.opened[id] ||= new Set();
    graph(tree, found, chosen, kept.opened[id], (index, node) => { kept.path[id] = index; draw(); focus(tree, node); });
    body.replaceChildren(...(path ? [pathHead(path, choices), ...pathView(path.nodes.map((one) => nodes.get(one)), found, choices)]
      : [h("p", {}, found.turns ? "No messages and no tokens of this session are recorded." : "The agent got no answer.")]));
  };
  draw();
  const content = [
    h("h1", {}, `Session ${found.session_id}`),
    summary(found),
    environmentView(found, choices),
    controls(found, draw),
    h("div", { class: "session" }, h("aside", { "aria-label": "Paths" }, tree), body),
  ];
  return { content, live: found.live };
}

// The session's advantage in its group, or null.
async function advantageOf(found) {
  const { group_id, run_id, reward } = found;
  if (!group_id || reward === null || reward === undefined) return null;
  const { rows } = await ask("groups", { group_id, run_id, limit: 1000 });
  return advantageIn(rows.find((one) => one.run_id === run_id), found);
}

function main(paths) {
  const at = paths.findLastIndex((one) => one.lineage === "MAIN");
  return Math.max(at, 0);
}

function originView(origin) {
  const from = (origin.nodes || []).map((one) => [h("a", { href: link(["session", one.session_id]) }, one.session_id), ` at node ${one.node_id}, `]);
  return h("p", { class: "quiet" }, "Started from ", from, origin.document_id && `document ${origin.document_id}, `,
    origin.kind === "TEXT" ? "as text." : "with the recorded tokens.");
}

function summary(found) {
  const row = (name, value) => value !== undefined && value !== "" && value !== null && [h("dt", {}, name), h("dd", {}, value)];
  return [
    h("p", {},
      h("strong", { class: found.outcome === "COMPLETED" ? "good" : found.live ? "" : "bad" }, found.outcome),
      ` reward ${number(found.reward)}, ${number(found.turns)} turns, model ${found.model || "–"}`,
      ["TEXT", "LOGPROBS"].includes(found.capture) && `, recorded as ${found.capture.toLowerCase()}`,
      found.superseded && ", superseded by another attempt", found.in_flight > 0 && `, ${found.in_flight} in flight`,
      found.closed > 0 && `, ${seconds(found.closed - found.opened)}, closed ${time(found.closed)}`, ". ",
      found.group_id && h("a", { href: link(["sessions"], { run_id: found.run_id, group_id: found.group_id }) }, `Group ${found.group_id}`)),
    found.origin && originView(found.origin),
    found.messages_left_out > 0 && h("p", { class: "quiet" }, `The messages of the last ${found.messages_left_out} nodes were not recorded: the session has more than the gateway keeps.`),
    (found.abandoned || found.metadata.error) && h("p", { class: "error" }, found.abandoned || found.metadata.error),
    h("details", {}, h("summary", {}, "Metadata, tools and numerics"),
      h("dl", {}, Object.entries(found.metadata).map(([name, value]) => row(name, value && h("a", {
        href: link(["sessions"], { where: pairTerm(name, value) }), title: "Sessions with the same",
      }, value)))),
      (found.contexts || []).map((one) => h("pre", {}, JSON.stringify(one, null, 1))),
      (found.numerics || []).map((one) => h("pre", {}, JSON.stringify(one, null, 1)))),
  ];
}

// The module that the session names, if the operator allows it. It gets the session and an element.
function environmentView(found, choices) {
  const name = found.metadata.view;
  if (!name || !choices.views.includes(name)) return null;
  const box = h("div", {});
  import(`/views/${name}.js`).then((module) => module.default(found, box)).catch((error) => {
    box.replaceChildren(h("p", { class: "error" }, `The view ${name} failed: ${error.message}`));
  });
  return h("section", { class: "node", "aria-label": `View ${name}` }, box);
}

function coloursOf(found) {
  const title = (name) => (name === DIFFERENCE ? "difference to the trainer's log-probability" : name);
  const ofGroup = typeof found.advantage === "number" ? [[`by ${GROUP}`, GROUP]] : [];
  return [...COLOURS, ...ofGroup, ...(found.annotations || []).map((name) => [`by ${name}`, title(name)])];
}

// What a colour shows of a token, or nothing.
function valueOf(node, at, name, found) {
  if (name === GROUP) return node.mask?.[at] ? found.advantage : null;
  const value = node.annotations?.[name]?.[at];
  if (value === undefined || value === null) return null;
  return name === DIFFERENCE ? (node.mask[at] && typeof node.logprobs[at] === "number" ? value - node.logprobs[at] : null) : value;
}

// The largest absolute value of the session. Two standard deviations are a large advantage.
function largest(found, name) {
  if (name === GROUP) return Math.max(2, Math.abs(found.advantage));
  found.largest ||= new Map();
  let most = found.largest.get(name);
  if (most !== undefined) return most;
  most = 0;
  for (const node of found.nodes) for (let at = 0; at < node.ids.length; at += 1) most = Math.max(most, Math.abs(valueOf(node, at, name, found) ?? 0));
  found.largest.set(name, most);
  return most;
}

function controls(found, draw) {
  const colours = coloursOf(found), bar = h("div", { class: "bar" });
  if (!colours.some(([name]) => name === kept.colour)) kept.colour = "mask";
  const fill = () => bar.replaceChildren(
    h("button", { type: "button", "aria-pressed": String(kept.tokens), onclick: () => { kept.tokens = !kept.tokens; fill(); draw(); } }, "Tokens"),
    ...(kept.tokens ? ["Colour by", ...colours.map(([name, title]) => h("button", {
      type: "button", "aria-pressed": String(kept.colour === name), onclick: () => { kept.colour = name; fill(); draw(); },
    }, title)), legend(found)] : []));
  fill();
  return bar;
}

// The names of the versions or the reasons of a session's tokens, in the order of their colours.
function namesOf(found, kind) {
  found.names ||= {};
  const names = kind === "version" ? found.nodes.flatMap((one) => one.versions.map(versionWords)) : found.nodes.map(reasonWords);
  return found.names[kind] ||= [...new Set(names)].filter(Boolean);
}

const versionWords = (span) => `${span.adapter ? `${span.adapter} ` : ""}${span.run ? `run ${span.run} ` : ""}v${span.version}`;
const reasonWords = (node) => node.reasons.filter((one) => one !== "EXACT").join(" + ");
const shadeOf = (found, kind, name) => namesOf(found, kind).indexOf(name) % SHADES[kind];

function legend(found) {
  const shades = (kind) => [namesOf(found, kind).slice(0, 24).map((name) => h("span", { class: kind },
    h("b", { class: `${kind[0]}${shadeOf(found, kind, name)}` }, name), " ")), namesOf(found, kind).length ? "" : "no token has one."];
  const key = (name, text) => {
    const mark = h("i", {});
    mark.style.setProperty("background", `var(--${name})`);
    return [mark, text];
  };
  const text = {
    mask: [key("train", "trained"), key("sampled", "sampled, not trained.")],
    logprob: ["stronger: less likely."],
    version: shades("version"),
    reason: shades("reason"),
    none: [],
  }[kept.colour] || [key("above", "above 0"), key("below", "below 0"), "stronger: larger in this session."];
  return h("span", { class: "key" }, text, " A box is a special token. Arrow keys in the tokens tell of each one, and Enter tells why.");
}

function pathHead(path, choices) {
  return h("p", {}, path.lineage && badge(path.lineage, path.label), path.label && h("span", { class: "quiet" }, `${path.label} `),
    path.reward !== null && `Its own reward: ${number(path.reward)}. `,
    path.reasons.map((one) => badge(one, choices.sentences[one], one !== "EXACT")));
}

const pathView = (nodes, found, choices) => nodes.map((one, at) => nodeView(one, found, choices, nodes[at - 1], nodes[at + 1]));

// A node. The results of its tool calls, in the node after it, stand next to the calls.
function nodeView(node, found, choices, before, after) {
  const versions = [...new Map(node.versions.map((one) => [versionWords(one), one])).values()];
  const why = node.reasons.filter((one) => one !== "EXACT");
  const box = h("section", { class: node.sampled ? "node sampled" : "node", "aria-label": `Node ${node.node_id}` },
    h("header", {}, h("strong", {}, node.role), h("span", {}, `node ${node.node_id}`), h("span", {}, `${number(node.ids.length)} tokens`),
      versions.map((one) => badge(versionWords(one), `sampled by ${one.engine_id}`)),
      node.finish_reason && badge(node.finish_reason, "", node.finish_reason === "LENGTH"),
      node.reward !== null && node.reward !== undefined && badge(`reward ${number(node.reward)}`),
      node.sampled && node.trained === false && badge("not trained", "", true),
      why.map((one) => badge(one, choices.sentences[one], true)),
      kept.tokens && h("button", { type: "button", onclick: () => copy(node.ids.join(" ")) }, "Copy ids")),
    (node.sampled || why.length > 0) && h("details", { class: "why" }, h("summary", {}, "Why"), whyView(node, choices)),
    !node.messages?.length && node.images.map((one) => imageView(one.sha256, found)));
  if (!node.ids.length && !node.messages?.length) box.append(h("p", { class: "quiet" }, "No messages and no tokens of this node are recorded."));
  else if (kept.tokens || (!node.text && !node.messages?.length)) box.append(...tokensView(node, found));
  else if (node.messages?.length) {
    const called = new Set(callsOf(before).map((one) => one.id)), shown = node.messages.filter((one) => !one.tool_call_id || !called.has(one.tool_call_id));
    box.append(...shown.map((one) => messageView(one, found, after)));
    if (shown.length < node.messages.length) box.append(h("p", { class: "quiet" }, "The results are next to their calls."));
  }
  else box.append(...textView(node.text));
  return box;
}

// What the tree made of a turn, why its tokens are not trained, and its request.
function whyView(node, choices) {
  const sampled = node.versions.reduce((sum, one) => sum + one.end - one.start, 0), trained = (node.mask || []).filter(Boolean).length;
  return [
    h("p", {}, node.parent ? `It follows node ${node.parent}. ` : "It begins a conversation. ", node.lineage && h("strong", {}, `${node.lineage}. `), node.label),
    node.reasons.map((one) => h("p", {}, h("strong", {}, `${one}. `), choices.sentences[one] || "")),
    sampled > trained && h("p", {}, node.mask && `${number(sampled - trained)} of ${number(sampled)} sampled tokens are not trained. `, node.why.untrained),
    node.request_ids?.length > 0 && h("p", {}, `Requests: ${node.request_ids.join(", ")}`),
    node.sampling && h("pre", {}, JSON.stringify(node.sampling, null, 1)),
  ];
}

const callsOf = (node) => (node?.messages || []).flatMap((one) => one.tool_calls || []).filter(Boolean);

// Copies a text by the selection of a field: `navigator.clipboard` is not there without TLS, except on this machine.
function copy(text) {
  const field = h("textarea", { "aria-hidden": "true" }), active = document.activeElement;
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
  active.focus({ preventScroll: true });
}

// A text of any length. What is long is folded, so that it is drawn only for who reads it.
function textView(text) {
  const end = text.codePointAt(LONG - 1) > 0xffff ? LONG + 1 : LONG, rest = text.slice(end);
  return [h("pre", {}, text.slice(0, end)), rest && h("details", {}, h("summary", {}, `${number(rest.length)} more characters`), h("pre", {}, rest))];
}

// Agents' messages may have any shape.
const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value) ?? "");

function contentView(message, found) {
  const parts = Array.isArray(message.content) ? message.content : message.content ? [message.content] : [];
  const urlOf = (one) => (one?.type === "image_url" ? String(one.image_url?.url ?? "") : "");
  return parts.map((one) => imageView(urlOf(one).replace("sha256:", ""), found) || textView(asText(one?.text ?? one)));
}

function messageView(message, found, after) {
  const resultOf = (call) => (after?.messages || []).find((one) => one.tool_call_id && one.tool_call_id === call.id);
  return h("div", {},
    message.tool_call_id && h("p", { class: "quiet" }, `result of ${message.name || ""} ${message.tool_call_id}`),
    message.reasoning_content && h("details", {}, h("summary", {}, "Reasoning"), textView(asText(message.reasoning_content))),
    contentView(message, found),
    (message.tool_calls || []).filter(Boolean).map((call) => h("div", { class: "call" },
      h("div", {}, h("strong", {}, call.function?.name), ` ${call.id || ""}`, textView(asText(call.function?.arguments ?? call))),
      resultOf(call) && h("div", {}, h("span", { class: "quiet" }, "result"), contentView(resultOf(call), found)))));
}

function imageView(sha256, found) {
  const known = found.images?.find((one) => one.sha256 === sha256);
  return known && h("img", { src: `/api/image/${encodeURIComponent(sha256)}?session=${encodeURIComponent(found.session_id)}`, alt: known.bytes ? `Image of ${number(known.bytes)} bytes` : "The file of this image is missing", loading: "lazy", decoding: "async" });
}

// The tokens are drawn when the node comes near the window and dropped when it is far away, so that
// a browser's memory does not grow with the session.
const drawers = new WeakMap();
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) drawers.get(entry.target)?.(entry.isIntersecting);
}, { rootMargin: "1500px" });

function tokensView(node, found) {
  const name = `${found.session_id} ${node.node_id}`, told = h("output", { class: "quiet" });
  const box = h("div", {
    class: `tokens ${kept.colour.split(" ")[0]}${node.texts ? "" : " plain"}`, "data-key": `tokens ${name}`,
    tabindex: "0", role: "group", "aria-label": `Tokens of node ${node.node_id}`,
    onclick: (event) => tell([...box.children].indexOf(event.target)),
    onkeydown: (event) => {
      const at = kept.token.name === name ? kept.token.at : -1;
      const to = { ArrowRight: at + 1, ArrowLeft: Math.max(at - 1, 0), Home: 0, End: node.ids.length - 1 }[event.key];
      const why = event.key === "Enter" && box.parentElement.querySelector(".why");
      if (why) why.open = true;
      if (why) why.firstChild.focus();
      else if (to === undefined) return;
      else tell(to);
      event.preventDefault();
    },
  });
  const tell = (at) => {
    drawers.get(box)(true);  // a key may come before they are drawn
    if (!box.children[at]) return;
    box.querySelector(".here")?.classList.remove("here");
    box.children[at].classList.add("here");
    kept.token = { name, at };
    const part = partOf(node, at);
    told.value = `${tokenWords(node, at, found)}.${part === "trained" ? "" : ` ${node.why[part]}`}`;
  };
  drawers.set(box, (near) => {
    if (!near) {
      if (box.childElementCount) box.style.setProperty("min-height", `${box.offsetHeight}px`);
      box.replaceChildren();
    } else if (!box.childElementCount) {
      box.replaceChildren(...tokens(node, found));
      if (kept.token.name === name) tell(kept.token.at);
      box.style.removeProperty("min-height");
    }
  });
  if (!node.texts) box.style.setProperty("min-height", `${Math.min(node.ids.length / 2, 2000)}px`);
  watcher.observe(box);
  return [box, told];
}

const spanOf = (node, at) => node.versions.find((one) => one.start <= at && at < one.end);
const partOf = (node, at) => (node.mask?.[at] ? "trained" : spanOf(node, at) ? "untrained" : "context");

function tokenWords(node, at, found) {
  const span = spanOf(node, at), logprob = node.logprobs?.[at], numbers = Object.entries(node.annotations || {});
  return [`id ${node.ids[at]}`, found.special?.has(node.ids[at]) && "special token", span && typeof logprob === "number" && `log-prob ${logprob.toFixed(4)}`,
    node.mask && (node.mask[at] ? "trained" : "not trained"), node.mask?.[at] && typeof found.advantage === "number" && `${GROUP} ${found.advantage.toFixed(3)}`,
    reasonAt(node, at),
    ...numbers.map(([name, values]) => typeof values[at] === "number" && `${name} ${values[at].toFixed(4)}`),
    span && `${span.run ? `run ${span.run} ` : ""}version ${span.version}`].filter(Boolean).join(", ");
}

// The reasons of a token: those of its node, but not what the template put around an answer.
const reasonAt = (node, at) => (node.sampled && !spanOf(node, at) ? "" : reasonWords(node));

function tokens(node, found) {
  const by = kept.colour.startsWith("by ") ? kept.colour.slice(3) : null, most = by && largest(found, by);
  const versionOf = new Int8Array(node.ids.length).fill(-1), reason = reasonWords(node) && `r${shadeOf(found, "reason", reasonWords(node))}`;
  for (const span of node.versions) versionOf.fill(shadeOf(found, "version", versionWords(span)), span.start, span.end);
  return node.ids.map((id, at) => {
    const logprob = node.logprobs?.[at], trained = node.mask?.[at], sampled = versionOf[at] >= 0;
    const special = found.special?.has(id), classes = [special ? "special" : "", trained ? "train" : sampled ? "sampled" : "", sampled ? `v${versionOf[at]}` : ""];
    if (sampled || !node.sampled) classes.push(reason);
    if (sampled && typeof logprob === "number") classes.push(logprob < -4 ? "l4" : logprob < -2 ? "l3" : logprob < -0.7 ? "l2" : logprob < -0.1 ? "l1" : "");
    const value = by && valueOf(node, at, by, found);
    if (value) classes.push(`${value > 0 ? "above" : "below"}${Math.ceil(4 * Math.abs(value) / most)}`);
    return h("b", { class: classes.filter(Boolean).join(" "), title: tokenWords(node, at, found) }, node.texts ? node.texts[at] : String(id));
  });
}

// Whether two nodes are the same: their tokens, or what was said where no tokens are recorded.
const saidBy = (node) => (node.ids.length ? String(node.ids) : JSON.stringify(node.messages));

export async function comparePage(ids, choices) {
  const both = await Promise.all(ids.slice(0, 2).map((id) => ask("session", { id })));
  const all = { nodes: both.flatMap((one) => one.nodes), names: {}, annotations: [...new Set(both.flatMap((one) => one.annotations || []))] };
  for (const one of both) Object.assign(one, { names: all.names, special: new Set(choices.special), advantage: await advantageOf(one) });
  for (const kind of Object.keys(SHADES)) namesOf(all, kind);
  const advantage = both.map((one) => one.advantage).find((one) => typeof one === "number");
  const paths = both.map((one) => {
    const nodes = new Map(one.nodes.map((node) => [node.node_id, node]));
    return one.paths[main(one.paths)]?.nodes.map((id) => nodes.get(id)) || [];
  });
  let same = 0;
  while (same < Math.min(...paths.map((one) => one.length)) && saidBy(paths[0][same]) === saidBy(paths[1][same])) same += 1;
  const body = h("div", {});
  const draw = () => body.replaceChildren(
    h("details", {}, h("summary", {}, "What they share"), pathView(paths[0].slice(0, same), both[0], choices)),
    h("div", { class: "pair" }, both.map((one, index) => h("div", {},
      h("h2", {}, h("a", { href: link(["session", one.session_id]) }, one.session_id), ` reward ${number(one.reward)}`,
        typeof one.advantage === "number" && `, advantage ${number(one.advantage)}`),
      pathView(paths[index].slice(same), one, choices)))));
  draw();
  return {
    content: [
      h("h1", {}, "Two sessions"),
      h("p", {}, `They share ${number(same)} nodes, ${number(paths[0].slice(0, same).reduce((sum, one) => sum + one.ids.length, 0))} tokens.`),
      controls({ ...all, advantage }, draw),
      body,
    ],
    live: both.some((one) => one.live),
  };
}
