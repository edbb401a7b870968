// Elements and numbers. Text goes in as text nodes only: names and messages of a run are never read as HTML.

const SVG = "http://www.w3.org/2000/svg";
const ROLES = { TR: "row", TD: "cell" }; // said again, because a table shown as blocks on a phone loses them

const build = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
};

export const el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  if (ROLES[node.tagName]) node.setAttribute("role", ROLES[node.tagName]);
  return build(node, attributes, children);
};

export const svg = (tag, attributes = {}, ...children) => build(document.createElementNS(SVG, tag), attributes, children);

export const byId = (id) => document.getElementById(id);

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * One child of `parent` for each item. A child whose item changed is updated in place where it knows how (`child.update`),
 * so that a click or the focus is not lost to the next document; else it is made anew.
 */
export function list(parent, items, key, make) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const children = items.map((item) => {
    const name = String(key(item)), seen = JSON.stringify(item), old = before.get(name);
    if (old?.seen === seen) return old;
    const child = old?.update ? old : make(item);
    child.update?.(item);
    child.dataset.key = name;
    child.seen = seen;
    return child;
  });
  if (children.length !== parent.children.length || children.some((child, n) => child !== parent.children[n])) {
    const focused = parent.contains(document.activeElement) ? document.activeElement : null;
    parent.replaceChildren(...children);
    focused?.focus({ preventScroll: true });
  }
}

/** Only web links: a run card is written by people, and `javascript:` is a URL as well. */
export function link(text, url) {
  let web = false;
  try { web = ["http:", "https:"].includes(new URL(url, document.baseURI).protocol); } catch { /* not a URL */ }
  return web ? el("a", { href: url, rel: "noreferrer" }, text) : el("span", {}, `${text}: ${url}`);
}

/** A state: a shape, a word and a colour, in this order of importance. */
const SHAPES = { ok: "✓", healthy: "✓", quiet: "✓", verified: "✓", unknown: "?", pending: "△", armed: "△" };
const TONES = {
  ok: "ok", healthy: "ok", quiet: "ok", verified: "ok", resolved: "muted", unknown: "muted", outside_window: "muted",
  observed: "muted", superseded: "muted", refused_by_person: "muted", critical: "critical", firing: "critical",
  rejected: "critical", expired: "critical", unacknowledged: "critical", unverified: "critical", unplanned: "critical",
};
export function state(word, more = "", shape = word) {
  const tone = TONES[word] ?? "warning";
  const mark = SHAPES[shape] ?? { critical: "■", warning: "▲", muted: "–" }[tone];
  return el("span", { class: `state ${tone}` }, el("span", { "aria-hidden": "true" }, `${mark} `), word.replaceAll("_", " "),
    more && " ", more && el("small", {}, more));
}

export const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const compact = (value) => (known(value) ? COMPACT.format(value) : "–");
export const whole = (value) => (known(value) ? WHOLE.format(value) : "–");
export const percent = (value) => (known(value) ? `${(value * 100).toFixed(1)} %` : "–");
export function number(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  return size >= 1e5 ? compact(value) : size !== 0 && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(4)));
}

export function duration(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 129600 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
export function clock(seconds) {
  const date = new Date(seconds * 1000);
  const format = Math.abs(Date.now() - date) < 43200e3 ? CLOCK : DAY;
  return el("time", { datetime: date.toISOString() }, format.format(date));
}
