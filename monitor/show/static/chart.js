// The pictures: loss over the token budget, the nodes' lanes on the same axis, sparklines.

import { compact, known, number, percent, svg, whole } from "./dom.js";

const HEIGHT = 300, LEFT = 44, RIGHT = 14, TOP = 14, BOTTOM = 26;

/** The axis that chart and lanes share: tokens to pixels. It ends with the declared budget or, `soFar`, with the run. */
export function axis(status, width, soFar) {
  const { tokens, token_budget: force, declared_budget: declared } = status.run;
  const budget = declared ?? force ?? Math.max(tokens ?? 1, 1);
  const end = soFar && tokens ? Math.min(tokens * 1.03, Math.max(budget, tokens)) : Math.max(budget, force ?? 0, tokens ?? 0);
  return { budget, planned: known(declared ?? force), force: force ?? budget, end, width, at: tokens, x: (t) => LEFT + (t / end) * (width - LEFT - RIGHT) };
}

function points(xs, ...columns) {
  return (xs ?? []).map((x, n) => [x, ...columns.map((column) => column[n])]).filter(([x]) => known(x));
}

/** Registered loss and band at `tokens`, as the daemon reads them: straight in log loss over log tokens; null outside. */
function registered({ curve_tokens: at, curve, curve_low: low, curve_high: high }, tokens) {
  const right = at.findIndex((t) => t >= tokens), left = Math.max(0, right - 1);
  if (right < 0 || tokens < at[0]) return null;
  const [t, from, to] = [tokens, at[left], at[right]].map((value) => Math.log(Math.max(value, 1)));
  const share = to > from ? (t - from) / (to - from) : 1;
  const between = (column) => Math.exp(Math.log(column[left]) * (1 - share) + Math.log(column[right]) * share);
  return { loss: between(curve), low: between(low), high: between(high) };
}

/** The registered curve over the picture: tokens, low, high, loss. */
function sampled(loss, end) {
  const rows = Array.from({ length: 201 }, (_, n) => [(n / 200) * end, registered(loss, (n / 200) * end)]);
  return rows.filter(([, at]) => at).map(([t, at]) => [t, at.low, at.high, at.loss]);
}

/**
 * Heights of the picture: what the run and the curve do after the first fifth of what is seen; the steep start runs out
 * of the picture at the top. Of the run's buckets the highest hundredth does not count, but the newest does.
 */
function extent(loss, curve, view) {
  const rows = points(loss.tokens, loss.loss).filter(([, value]) => known(value));
  const from = 0.2 * Math.min(view.at ?? view.end, view.end);
  const settled = rows.filter(([t]) => t >= from).map(([, value]) => value).sort((a, b) => a - b);
  const band = curve.filter(([t]) => t >= from);
  const ends = [rows.at(-1)?.[1], settled[0], settled[Math.floor(0.99 * (settled.length - 1))]];
  const values = [...ends, ...band.flatMap(([, below, above]) => [below, above])].filter(known);
  if (!values.length) return [0, 1];
  const low = Math.min(...values), high = Math.max(...values), pad = (high - low) * 0.06 || 0.1;
  return [low - pad, high + pad];
}

/** Round numbers between low and high, about `wanted` of them. */
export function ticks(low, high, wanted) {
  const raw = (high - low) / wanted, size = 10 ** Math.floor(Math.log10(raw));
  const step = size * [1, 2, 5, 10].find((factor) => factor * size >= raw);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, n) => Number(((first + n) * step).toPrecision(12)));
}

/** A line with gaps where a value is missing. */
function line(rows, x, y) {
  let path = "", gap = true;
  for (const [t, value] of rows) {
    if (known(value)) path += `${gap ? "M" : "L"}${x(t).toFixed(1)} ${y(value).toFixed(1)}`;
    gap = !known(value);
  }
  return path;
}

function area(rows, x, y) {
  const kept = rows.filter(([, low, high]) => known(low) && known(high));
  if (kept.length < 2) return "";
  const corner = (value) => ([t, ...pair]) => `${x(t).toFixed(1)} ${y(pair[value]).toFixed(1)}`;
  return `M${kept.map(corner(1)).join("L")}L${kept.reverse().map(corner(0)).join("L")}Z`;
}

const vertical = (x, label, className, row = 0, anchor = "start") => [
  svg("line", { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM, class: className }),
  svg("text", { x: anchor === "end" ? x - 5 : x + 5, y: TOP + 10 + 16 * row, class: `${className} tag`, "text-anchor": anchor }, label),
];

/** Draw the loss; returns what the readout needs. */
export function chart(node, status, view) {
  const { loss } = status, { x } = view, curve = sampled(loss, view.end), [low, high] = extent(loss, curve, view);
  const y = (value) => TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const run = points(loss.tokens, loss.low, loss.high, loss.loss);
  const right = view.width - RIGHT, frame = { x: LEFT, y: TOP, width: right - LEFT, height: HEIGHT - TOP - BOTTOM };
  const parts = [svg("clipPath", { id: "frame" }, svg("rect", frame))];
  const early = Math.min(0.25 * view.force, view.end);
  if (view.planned) parts.push(svg("rect", { ...frame, width: x(early) - x(0), class: "early" }));
  for (const value of ticks(low, high, 5).filter((one) => y(one) < HEIGHT - BOTTOM - 8)) {
    parts.push(svg("line", { x1: LEFT, x2: right, y1: y(value), y2: y(value), class: "grid" }));
    parts.push(svg("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, String(value)));
  }
  for (const share of ticks(0, view.end / view.budget, view.width < 500 ? 4 : 8)) {
    const label = view.planned ? `${Number((share * 100).toPrecision(3))} %` : compact(share * view.budget);
    parts.push(svg("text", { x: x(share * view.budget), y: HEIGHT - 8, "text-anchor": "middle" }, label));
  }
  const shorter = view.force < view.budget, quarter = 0.25 * view.force;
  if (view.planned && quarter < view.end) parts.push(...vertical(x(quarter), `25 % of the budget${shorter ? " in force" : ""}`, "quarter"));
  if (shorter && view.force <= view.end) {
    const side = x(view.force) > view.width - 180 ? "end" : "start";
    parts.push(...vertical(x(view.force), `ends here, at ${percent(view.force / view.budget)}`, "force", 1, side));
  }
  const path = (d, className) => d && parts.push(svg("path", { d, class: className, "clip-path": "url(#frame)" }));
  path(area(curve.map(([t, a, b]) => [t, a, b]), x, y), "band");
  path(line(curve.map(([t, , , v]) => [t, v]), x, y), "curve");
  path(line(points(loss.plan_tokens, loss.plan_curve).slice(-2), x, y), "curve planned");
  path(area(run.map(([t, a, b]) => [t, a, b]), x, y), "range");
  path(line(run.map(([t, , , v]) => [t, v]), x, y), "loss");
  for (const [t, value] of points(loss.eval_tokens, loss.eval_loss)) {
    if (known(value)) parts.push(svg("circle", { cx: x(t), cy: y(value), r: 3, class: "eval", "clip-path": "url(#frame)" }));
  }
  const last = run.filter(([, , , value]) => known(value)).at(-1);
  if (last) parts.push(svg("circle", { cx: x(last[0]), cy: y(last[3]), r: 4.5, class: "now" }));
  node.setAttribute("viewBox", `0 0 ${view.width} ${HEIGHT}`);
  node.replaceChildren(...parts, svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }));
}

/** Point at bucket `n` of the loss: a line in the picture, and its sentence. */
export function point(node, status, view, n) {
  const { loss } = status, tokens = loss.tokens[n], cursor = node.querySelector(".cursor");
  if (!known(tokens) || !cursor) return "";
  for (const end of ["x1", "x2"]) cursor.setAttribute(end, view.x(tokens));
  cursor.setAttribute("visibility", "visible");
  const value = known(loss.loss[n]) ? `${loss.loss[n].toFixed(4)} nats` : "not finite";
  const expected = registered(loss, tokens);
  const band = expected ? `; registered ${expected.loss.toFixed(4)} (${expected.low.toFixed(4)} to ${expected.high.toFixed(4)})` : "";
  return `Step ${whole(loss.steps[n])}, ${compact(tokens)} tokens (${percent(tokens / view.budget)}): loss ${value}${band}.`;
}

/** A node's lane: the whole budget, the window in which the node may fire, 25 %, where the run is, its plans. */
export function lane(window, plans, view) {
  const edge = (share, otherwise) => view.x(Math.min((known(share) ? Math.min(share, 1) : otherwise) * view.force, view.end));
  const start = view.x(0), from = edge(window[0], 0), to = edge(window[1], 1), end = view.x(view.end);
  const parts = [
    svg("rect", { x: start, y: 7, width: end - start, height: 4, rx: 2, class: "track" }),
    svg("rect", { x: from, y: 4, width: Math.max(0, to - from), height: 10, rx: 3, class: "window" }),
  ];
  const mark = (x, className) => parts.push(svg("line", { x1: x, x2: x, y1: 0, y2: 18, class: className }));
  if (view.planned && 0.25 * view.force <= view.end) mark(edge(0.25, 1), "quarter");
  if (known(view.at)) mark(view.x(view.at), "here");
  for (const tokens of plans) {
    if (known(tokens) && tokens <= view.end) parts.push(svg("path", { d: `M${view.x(tokens)} 2l6 7l-6 7l-6 -7Z`, class: "plan" }));
  }
  return svg("svg", { class: "lane", viewBox: `0 0 ${view.width} 18`, "aria-hidden": "true" }, ...parts);
}

/** The newest values of a check, with its limit where that is near enough to be seen. */
export function sparkline(values, limit) {
  const seen = values.filter(known), width = 120, height = 26;
  const node = svg("svg", { class: "sparkline", viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  if (seen.length < 2) return node;
  let low = Math.min(...seen), high = Math.max(...seen);
  const span = high - low || Math.abs(high) || 1, near = known(limit) && limit > low - 3 * span && limit < high + 3 * span;
  if (near) [low, high] = [Math.min(low, limit), Math.max(high, limit)];
  const y = (value) => (high === low ? height / 2 : 3 + ((high - value) / (high - low)) * (height - 6));
  const x = (n) => (n / (values.length - 1)) * (width - 4) + 1;
  if (near) node.append(svg("line", { x1: 0, x2: width, y1: y(limit), y2: y(limit), class: "limit" }));
  node.append(svg("path", { d: line(values.map((value, n) => [n, value]), x, y), class: "values" }));
  const newest = values.findLastIndex(known);
  node.append(svg("circle", { cx: x(newest), cy: y(values[newest]), r: 2.2, class: "newest" }));
  return node;
}

export function describe(status) {
  const newest = status.loss.loss.filter(known).at(-1);
  if (!known(newest)) return "No loss yet";
  return `Training loss over the token budget, now ${number(newest)} nats at step ${whole(status.run.step)}. Arrow keys read it out.`;
}
