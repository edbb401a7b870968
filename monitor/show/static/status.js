// The status page: one document, drawn again whenever a new one comes, and a plain word when none does.

import { axis, chart, describe, lane, point, sparkline } from "./chart.js";
import { byId, clock, compact, duration, el, known, link, list, number, percent, setText, state, whole } from "./dom.js";

const OLD_SECONDS = 10, POLL_SECONDS = 5;
const HINT = "Point at the picture, or use its arrow keys, to read it.";
let shown = null; // the newest document
let soFar = false, cursor = null; // of the chart: its range, and the bucket that is read out
let heard = 0, lost = null, asked = 0, skew = 0; // local Unix seconds; `skew` is the daemon's clock less ours
let source = null, asking = null; // the stream; the decision in the dialog

const now = () => Date.now() / 1000;

function show(status) {
  shown = status;
  const { run, plans } = status;
  document.title = `${status.health === "healthy" ? "" : `${status.health.toUpperCase()}: `}${run.name} – runwatch`;
  setText(byId("name"), run.name);
  byId("health").replaceWith(Object.assign(state(status.health), { id: "health" }));
  setText(byId("sentence"), status.sentence);
  announce(status);
  list(byId("facts"), facts(status), ([label]) => label, fact);
  list(byId("about"), [[run.hypothesis, run.owner, run.links]], () => "about", about);
  list(byId("conditions"), status.conditions, (one) => one.kind, condition);
  list(byId("checks").tBodies[0], sorted(status.checks, urgency), (one) => one.name, checkRow);
  const waiting = plans.filter((plan) => plan.state === "proposed");
  byId("decisions").hidden = !waiting.length;
  byId("plans-off").hidden = status.plans_enabled;
  list(byId("proposed"), waiting, (plan) => plan.id, planCard);
  list(byId("plans"), plans.filter((plan) => plan.state !== "proposed"), (plan) => plan.id, planCard);
  nothing(byId("plans"), waiting.length ? "No other plan has been proposed." : "No plan has been proposed.");
  list(byId("incidents"), sorted(status.incidents, (one) => Number(one.state === "firing")), (one) => one.id, incident);
  nothing(byId("incidents"), "No incident so far.", "li");
  list(byId("audit"), status.audit, (row) => row.seq, auditRow);
  const { version, pid, started } = status.daemon;
  list(byId("daemon"), [{ version, pid, started }], () => "daemon", daemonLine);
  draw();
}

const sorted = (items, rank) => [...items].sort((a, b) => rank(b) - rank(a));

const condition = ({ message, since }) => el("li", { class: "notice warning" }, message, " (since ", clock(since), ")");

const auditRow = ({ time, kind, sentence }) =>
  el("li", {}, clock(time), " ", el("span", { class: "kind" }, kind.replaceAll("_", " ")), " ", el("span", {}, sentence));

const daemonLine = ({ version, pid, started }) =>
  el("span", {}, `runwatch ${version}`, pid ? `, process ${pid}` : "", ...(started ? [", up since ", clock(started)] : []));

function nothing(parent, text, tag = "p") {
  if (!parent.children.length) parent.append(el(tag, { class: "muted", "data-key": "nothing" }, text));
}

/** Screen readers hear the sentence when what it says of alarms and plans has changed, not at each step. */
function announce(status) {
  const alarms = status.checks.filter((check) => check.alert === "firing").map((check) => check.name + check.severity);
  const plans = status.plans.filter((plan) => plan.open).map((plan) => plan.id + plan.state);
  const told = JSON.stringify([status.health, alarms, plans]);
  const node = byId("announcement");
  if (node.dataset.told !== told) setText(node, status.sentence);
  node.dataset.told = told;
}

function facts({ run }) {
  const { latest } = run, budget = run.token_budget;
  const declared = run.declared_budget !== budget && budget !== null ? `, ${compact(run.declared_budget)} declared` : "";
  const loss = latest["train/loss"] === null ? "not finite" : number(latest["train/loss"]);
  const heldOut = known(latest["eval/loss"]) ? `nats; held out ${number(latest["eval/loss"])}` : "nats";
  const mfu = known(latest["throughput/mfu"]) ? `MFU ${percent(latest["throughput/mfu"])}` : "sustained";
  return [
    ["Step", whole(run.step), `${run.phase}, attempt ${run.attempt || "–"}`],
    ["Tokens", compact(run.tokens), budget ? `${percent(run.fraction)} of ${compact(budget)}${declared}` : "no budget known"],
    ["Loss", loss, heldOut],
    ["Tokens per second", compact(run.tokens_per_second), mfu],
    ["Ends", run.eta, run.eta],
    ["Newest record", run.time, run.time],
  ];
}

function fact([label]) {
  const value = el("dd", {}), more = el("dd", { class: "muted" }), item = el("div", {}, el("dt", {}, label), value, more);
  item.update = ([, first, second]) => {
    item.time = typeof first === "number" ? first : null;
    value.replaceChildren(item.time ? clock(item.time) : first ?? "–");
    setText(more, item.time ? ago(item.time) : second ?? "");
  };
  return item;
}

const ago = (time) => {
  const seconds = now() + skew - time;
  return seconds < -3 ? `in ${duration(-seconds)}` : `${duration(seconds)} ago`;
};

function about([hypothesis, owner, links]) {
  const parts = Object.entries(links).filter(([, url]) => url).flatMap(([name, url]) => [" ", link(name, url)]);
  return el("span", {}, hypothesis, owner ? ` Owner: ${owner}.` : "", ...parts);
}

function urgency({ error, alert, severity }) {
  if (alert === "firing") return severity === "critical" ? 4 : 3;
  return error ? 2 : Number(alert === "pending");
}

function checkState(check) {
  if (check.error) return state("critical", "the check itself failed");
  if (check.alert === "inactive") return state(check.level);
  if (check.alert === "pending") return state(check.level, "pending", "pending");
  return state(check.severity, check.level === check.severity ? "" : `now ${check.level}`);
}

const runbook = (name, summary) =>
  el("a", { href: `runbooks/${encodeURIComponent(name)}`, title: `Runbook. Alarm when: ${summary}` }, name);

function since({ since_step: step, since_tokens: tokens }) {
  return known(step) ? ` Since step ${whole(step)}${known(tokens) ? `, ${compact(tokens)} tokens` : ""}.` : "";
}

function checkRow({ name, summary }) {
  const cells = ["state-cell", "number", "number", "spark-cell", "detail"].map((kind) => el("td", { class: kind }));
  const row = el("tr", {}, cells[0], el("th", { scope: "row", role: "rowheader" }, runbook(name, summary)), ...cells.slice(1));
  row.update = (check) => {
    const alive = check.alert !== "inactive" || check.error;
    cells[0].replaceChildren(checkState(check));
    setText(cells[4], check.error ?? (alive ? check.message + since(check) : ""));
    for (const [cell, value, word] of [[cells[1], check.value, "value "], [cells[2], check.limit, "limit "]]) {
      cell.replaceChildren(el("span", { class: "narrow" }, word), number(value));
    }
    cells[3].replaceChildren(sparkline(check.sparkline, check.limit));
  };
  return row;
}

function nodeItem({ name, plan, node: { summary } }) {
  const status = el("p", { class: "stand" }), reason = el("p", { class: "detail" }), picture = el("div");
  const head = el("div", { class: "head" }, el("p", {}, runbook(name, summary), " → ", plan), status);
  const item = el("li", {}, head, picture, reason);
  item.update = ({ node, plans, view }) => {
    const [from, to] = node.window.map((edge, n) => Math.round(Math.min(known(edge) ? edge : n, 1) * 100));
    const near = node.progress > 0 && node.state !== "firing" ? `${Math.round(node.progress * 100)} %` : "";
    status.replaceChildren(state(node.state, near), ` ${node.mode}, ${from} to ${to} %`);
    picture.replaceChildren(lane(node.window, plans, view));
    setText(reason, node.reason);
  };
  return item;
}

function planCard(plan) {
  const decide = (approved, word) => {
    const button = el("button", { type: "button", class: approved ? "primary" : null }, `${word}…`);
    button.addEventListener("click", () => ask(plan, approved));
    return button;
  };
  const proposed = plan.state === "proposed", buttons = [];
  if (proposed) buttons.push(decide(true, "Approve"));
  if (proposed || plan.state === "approved") buttons.push(decide(false, "Reject"));
  const loss = ({ loss: value, low, high }) => `${number(value)} (${number(low)} to ${number(high)})`;
  const { forecast } = plan, command = `runwatch plan approve ${shown.run.directory} ${plan.id} --by NAME --reason TEXT`;
  const what = [
    el("p", {}, plan.evidence),
    el("ul", {}, ...plan.effects.map((effect) => el("li", {}, effect))),
    plan.reason && plan.reason !== plan.evidence ? el("p", {}, [plan.by, plan.reason].filter(Boolean).join(": ")) : null,
  ];
  const then = [
    forecast ? el("p", {}, `Predicted final loss of a healthy run: ${loss(forecast.old)} as planned, ${loss(forecast.new)} with this plan.`) : null,
    proposed && plan.expires ? el("p", {}, "Expires at ", clock(plan.expires), " if nobody decides.") : null,
    buttons.length ? el("div", { class: "buttons" }, ...buttons) : null,
    proposed ? el("p", { class: "muted" }, "Or in a terminal: ", el("code", {}, command)) : null,
  ];
  return el("article", { class: "card" },
    el("div", { class: "head" }, el("h3", {}, plan.plan, " ", el("small", {}, plan.id)), state(plan.state)),
    el("div", { class: "columns" }, el("div", {}, ...what), el("div", {}, ...then)),
    el("ol", { class: "history", "aria-label": "History" }, ...plan.history.map(happened)),
    el("details", {}, el("summary", {}, "Actions as the trainer gets them"), el("pre", {}, JSON.stringify(plan.actions, null, 1))));
}

function happened({ event, time, step, tokens }) {
  const place = [known(step) ? `, step ${whole(step)}` : "", known(tokens) ? `, ${compact(tokens)} tokens` : ""];
  return el("li", {}, el("b", {}, event.replaceAll("_", " ")), " ", clock(time), ...place);
}

function incident(one) {
  const firing = one.state === "firing", resolved = one.resolved ? [", resolved ", clock(one.resolved)] : [];
  const head = [state(firing ? one.severity : "resolved"), " ", el("b", {}, one.check), firing ? "" : ` (was ${one.severity})`];
  const when = ["Opened ", clock(one.opened), ` at step ${whole(one.since_step)}`, ...resolved, ` (${one.id})`];
  return el("li", {}, el("p", {}, ...head), el("p", {}, one.resolution ? `${one.resolution} At its worst: ${one.what}` : one.what), el("p", { class: "muted" }, ...when));
}

// The chart

function view() {
  return axis(shown, Math.max(280, byId("chart").clientWidth), soFar);
}

function draw() {
  if (!shown) return;
  const node = byId("chart"), seen = view();
  chart(node, shown, seen);
  byId("plan-key").hidden = !(shown.loss.plan_tokens ?? []).length;
  node.setAttribute("aria-label", describe(shown));
  const begun = ({ history }) => (history.find(({ event }) => event === "acknowledged") ?? history[0])?.tokens;
  const marks = (name) => shown.plans.filter((plan) => plan.node === name).map(begun);
  const items = shown.nodes.map((one) => ({ name: one.name, plan: one.plan, node: one, plans: marks(one.name), view: seen }));
  list(byId("nodes"), items, (one) => one.name, nodeItem);
  setText(byId("readout"), cursor === null ? HINT : point(node, shown, seen, cursor));
}

function move(to) {
  cursor = to === null ? null : Math.min(Math.max(to, 0), shown.loss.steps.length - 1);
  draw();
}

function listenToChart() {
  const node = byId("chart");
  node.addEventListener("pointermove", (event) => {
    if (!shown?.loss.steps.length) return;
    const seen = view(), at = event.clientX - node.getBoundingClientRect().left;
    const far = shown.loss.tokens.map((tokens) => (known(tokens) ? Math.abs(seen.x(tokens) - at) : Infinity));
    move(far.indexOf(Math.min(...far)));
  });
  node.addEventListener("pointerleave", () => shown && move(null));
  node.addEventListener("blur", () => shown && move(null));
  node.addEventListener("keydown", (event) => {
    const count = shown?.loss.steps.length ?? 0, at = cursor ?? count - 1;
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 20, PageDown: at + 20, Home: 0, End: count - 1 };
    const to = { ...moves, Escape: null }[event.key];
    if (to === undefined || !count) return;
    event.preventDefault();
    move(to);
  });
  for (const [id, value] of [["whole", false], ["so-far", true]]) {
    byId(id).addEventListener("click", () => {
      soFar = value;
      for (const button of ["whole", "so-far"]) byId(button).setAttribute("aria-pressed", String(button === id));
      draw();
    });
  }
  new ResizeObserver(draw).observe(node);
}

// Decisions: the card's button opens the dialog, the dialog's button is the second confirmation

function ask(plan, approved) {
  asking = { id: plan.id, approved };
  const word = approved ? "Approve" : "Reject", name = plan.plan;
  setText(byId("dialog-title"), `${word} ${name}?`);
  setText(byId("dialog-evidence"), plan.evidence);
  byId("dialog-effects").replaceChildren(...plan.effects.map((effect) => el("li", {}, effect)));
  setText(byId("confirm"), approved ? `Yes, approve ${name}` : `Yes, reject ${name}`);
  byId("refusal").hidden = true;
  byId("dialog").showModal();
}

async function decide(event) {
  event.preventDefault();
  const body = JSON.stringify({ approved: asking.approved, by: byId("by").value.trim(), reason: byId("why").value.trim() });
  const headers = { "Content-Type": "application/json", Authorization: `Bearer ${byId("token").value}` };
  byId("confirm").disabled = true;
  const refusal = await post(`api/plans/${encodeURIComponent(asking.id)}/decision`, { method: "POST", headers, body });
  byId("confirm").disabled = false;
  byId("refusal").hidden = refusal === null;
  setText(byId("refusal"), refusal ?? "");
  if (refusal === null) {
    byId("dialog").close();
    setText(byId("announcement"), `${asking.id}: your decision is stored and takes effect with the next tick.`);
  }
}

const REFUSED = {
  401: "The token is not the daemon's.",
  403: "Decisions on this page are off, or not yours: use the command in the card.",
};

/** Null when it went well, else why not. */
async function post(url, request) {
  try {
    const answer = await fetch(url, request);
    if (answer.ok) return null;
    const { error, detail } = await answer.json().catch(() => ({})), why = error ?? detail;
    const said = [REFUSED[answer.status], typeof why === "string" ? why : null].filter(Boolean).join(" ");
    return said || `The daemon answered ${answer.status}.`;
  } catch {
    return "The daemon cannot be reached; nothing was decided.";
  }
}

// Hearing from the daemon: a stream, a question every few seconds while the stream says nothing, and the truth about both

function hear(status) {
  if (!source) listen();
  heard = now();
  lost = null;
  if (status.version !== shown?.version || status.daemon.pid !== shown?.daemon.pid) show(status);
  tell();
}

function listen() {
  source?.close();
  source = new EventSource("api/events");
  source.addEventListener("status", (event) => hear(JSON.parse(event.data)));
  source.addEventListener("error", () => question());
}

async function question() {
  if (now() - asked < 1) return;
  asked = now();
  try {
    const answer = await fetch("api/status", { cache: "no-store", signal: AbortSignal.timeout(4000) });
    const date = Date.parse(answer.headers.get("date"));
    skew = Math.abs(date / 1000 - now()) > 2 ? date / 1000 - now() : 0; // the header has whole seconds
    if (answer.ok) hear(await answer.json());
    else if (!shown) setText(byId("connection"), "The daemon has started; its first tick has not ended yet.");
    if (source?.readyState === EventSource.CLOSED) listen();
  } catch {
    lost ??= now();
  }
  tell();
}

/** Say how fresh the picture is. */
function tell() {
  for (const item of byId("facts").children) if (item.time) setText(item.lastChild, ago(item.time));
  if (!shown) return lost && setText(byId("connection"), "The daemon cannot be reached; trying again.");
  const age = now() + skew - shown.daemon.tick, old = known(age) && age > OLD_SECONDS;
  const gone = lost !== null && now() - heard > 2;
  document.body.classList.toggle("stale", gone || old);
  byId("stale").hidden = !(gone || old);
  setText(byId("connection"), gone ? "Connection lost" : old ? "Old data" : "Live");
  const word = gone ? "Connection to the daemon lost; trying again" : "The daemon answers, but no longer judges the run";
  if (gone || old) setText(byId("stale"), `${word}. What you see is ${duration(age)} old.`);
}

listenToChart();
byId("decision").addEventListener("submit", decide);
byId("cancel").addEventListener("click", () => byId("dialog").close());
question();
setInterval(() => {
  tell();
  if (now() - heard > POLL_SECONDS && now() - asked > POLL_SECONDS) question();
}, 1000);
