"""The status page in a real Chromium, served by the daemon's own web application over a scripted run's real document."""

import copy
import itertools
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import scripted
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from pydantic import SecretStr

from runwatch.checks import all_checks
from runwatch.monitor.daemon.settings import DaemonConfig
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.daemon.web import WebServer
from runwatch.monitor.notify.outbox import Outbox
from runwatch.monitor.show.status import Status
from runwatch.monitor.store.store import open_store, sqlite_url
from runwatch.rules import all_nodes

if TYPE_CHECKING:
    from runwatch.monitor.daemon.jobs import Daemon

CHROMIUM = shutil.which("chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
PHONE, DESK = {"width": 360, "height": 740}, {"width": 1440, "height": 900}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH; deploy/install-services installs it"),
]


class Daemonlet:
    """What the web application asks of a daemon, around a document that the test may change."""

    def __init__(self, status: Status) -> None:
        self.watch, self.config = SimpleNamespace(status=status), DaemonConfig()
        self.counts = SimpleNamespace(ready=True)
        self.age, self.healthy = 0.0, True

    def publish(self, **changes: Any) -> None:
        """The next version of the document, judged now unless `changes` say otherwise."""
        status = cast("dict[str, Any]", copy.deepcopy(self.watch.status))
        status["version"] += 1
        status["daemon"]["tick"] = time.time()
        self.watch.status = status | changes


class Site:
    """The page's server, which can go away and come back at the same address."""

    def __init__(self, status: Status) -> None:
        self.daemon = Daemonlet(status)
        self.daemon.publish()
        self.listen = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Serve; the first time at any port."""
        self.server = WebServer(cast("Daemon", self.daemon), self.listen)
        self.listen = f"127.0.0.1:{self.server.port}"
        self.server.start()

    @property
    def url(self) -> str:
        """The page's address."""
        return f"http://{self.listen}/"


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Status:
    """A scripted run whose loss left its curve: `ladder_deviation` is critical, `shorten_budget` waits for a person."""
    run = scripted.ScriptedTrainer(tmp_path_factory.mktemp("status") / "run")
    run.obeys = False
    card = scripted.card({"early_divergence": {"mode": "confirm"}})
    (run.run_dir / "run.yaml").write_text(json.dumps(card))
    store = open_store(sqlite_url(run.run_dir), "scripted")
    watch = Watch(run.run_dir, store, Outbox(store, {}), DaemonConfig(), "test")
    for _ in range(20):
        watch.tick(run.train(10))
    store.close()
    assert watch.status
    assert [plan["state"] for plan in watch.status["plans"]] == ["proposed"]
    return watch.status


@pytest.fixture
def site(document: Status) -> Iterator[Site]:
    """The page of that run."""
    opened = Site(document)
    yield opened
    opened.server.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for the module."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def context(browser: Browser, site: Site) -> Iterator[BrowserContext]:
    """A window of a desk, closed before the site; what goes wrong in a page's scripts or against its security policy fails the test."""
    opened = browser.new_context(viewport=DESK)  # pyright: ignore[reportArgumentType]
    wrong: list[str] = []
    opened.on("weberror", lambda one: wrong.append(str(one.error)))
    opened.on("console", lambda said: wrong.append(said.text) if "Security Policy" in said.text else None)
    yield opened
    opened.close()
    assert not wrong


@pytest.fixture
def page(context: BrowserContext, site: Site) -> Page:
    """The page, open and live."""
    opened = context.new_page()
    opened.goto(site.url)
    expect(opened.locator("#connection")).to_have_text("Live")
    return opened


def test_the_page_shows_the_run_all_checks_and_all_nodes(page: Page, document: Status) -> None:
    expect(page.get_by_role("heading", level=1)).to_have_text("scripted")
    expect(page).to_have_title(re.compile("CRITICAL: scripted"))
    expect(page.locator("#sentence")).to_have_text(document["sentence"])
    expect(page.get_by_role("rowheader")).to_have_count(12)
    assert set(page.get_by_role("rowheader").all_text_contents()) == set(all_checks())
    for name, node in all_nodes().items():
        expect(page.locator("#nodes li").filter(has_text=name)).to_contain_text(node.plan)
    expect(page.locator("#nodes svg .window")).to_have_count(4)
    expect(page.locator("#chart path")).to_have_count(4)  # band, curve, range, loss


def test_a_check_in_alarm_is_first_and_says_value_limit_message_and_since_when(page: Page, document: Status) -> None:
    check = next(one for one in document["checks"] if one["name"] == "ladder_deviation")
    first = page.get_by_role("row").nth(1)
    for text in ("critical", "ladder_deviation", check["message"], f"Since step {check['since_step']}"):
        expect(first).to_contain_text(text)
    expect(first.locator(".sparkline path")).to_have_count(1)
    assert float(first.locator(".number").first.inner_text()) == pytest.approx(check["value"], rel=1e-3)


def test_a_name_or_a_message_is_text_wherever_it_is_shown(context: BrowserContext, site: Site) -> None:
    site.daemon.publish(**_poisoned(site.daemon.watch.status))
    page = context.new_page()
    page.goto(site.url)
    expect(page.get_by_role("heading", level=1)).to_contain_text(HOSTILE)
    for place in ("#sentence", "#about", "#conditions", "#checks", "#nodes", "#proposed", "#incidents", "#audit"):
        expect(page.locator(place)).to_contain_text(HOSTILE)
    page.get_by_role("button", name="Approve").click()
    expect(page.locator("#dialog-effects")).to_contain_text(HOSTILE)
    expect(page.locator("img, body script, [onerror]")).to_have_count(0)
    expect(page.get_by_role("link", name="trap")).to_have_count(0)  # its address is javascript:
    assert "owned" not in page.title().replace(HOSTILE, "")


def _poisoned(value: Any, key: str = "") -> Any:
    """The document with markup in every free text."""
    if isinstance(value, dict):
        return {name: _poisoned(one, name) for name, one in value.items()} | (
            {"links": {"trap": "javascript:document.title='owned'"}, "owner": HOSTILE} if "links" in value else {}
        )
    if isinstance(value, list):
        some = value or ([{"kind": "disk", "message": "", "since": 1.0}] if key == "conditions" else value)
        return [_poisoned(one) for one in some]
    kept = {"health", "level", "alert", "severity", "state", "phase", "mode", "id"}
    return HOSTILE + value if isinstance(value, str) and key not in kept else value


def test_a_new_document_changes_the_page_without_a_reload_and_keeps_the_focus(page: Page, site: Site) -> None:
    page.evaluate("window.same = true")
    page.get_by_role("link", name="loss_spike").focus()
    checks = copy.deepcopy(site.daemon.watch.status["checks"])
    next(one for one in checks if one["name"] == "loss_spike").update(value=7.125, level="warning", alert="pending")
    site.daemon.publish(checks=checks, sentence="Something else.")
    expect(page.locator("#sentence")).to_have_text("Something else.")
    expect(page.get_by_role("row").filter(has_text="loss_spike")).to_contain_text("7.125")
    expect(page.get_by_role("row").filter(has_text="loss_spike")).to_contain_text("warning pending")
    expect(page.get_by_role("link", name="loss_spike")).to_be_focused()
    assert page.evaluate("window.same")


def test_screen_readers_hear_changes_of_alarms_but_not_every_step(page: Page, site: Site, document: Status) -> None:
    region = page.get_by_role("status").filter(has_text=document["sentence"])
    expect(region).to_have_attribute("aria-live", "polite")
    site.daemon.publish(sentence="One step on.")
    expect(page.locator("#sentence")).to_have_text("One step on.")
    expect(page.locator("#announcement")).to_have_text(document["sentence"])
    site.daemon.publish(sentence="Well again.", health="healthy")
    expect(page.locator("#announcement")).to_have_text("Well again.")


def test_a_lost_connection_is_said_plainly_and_heals_by_itself(page: Page, site: Site) -> None:
    site.server.close()
    expect(page.get_by_role("alert")).to_contain_text("Connection to the daemon lost", timeout=20_000)
    expect(page.locator("#connection")).to_have_text("Connection lost")
    site.daemon.publish(sentence="Back again.")
    site.start()
    expect(page.locator("#sentence")).to_have_text("Back again.", timeout=20_000)
    expect(page.locator("#connection")).to_have_text("Live")
    expect(page.locator("#stale")).to_be_hidden()


def test_a_daemon_that_no_longer_judges_is_told_from_one_that_is_gone(page: Page, site: Site) -> None:
    site.daemon.publish(daemon=site.daemon.watch.status["daemon"] | {"tick": time.time() - 300})
    expect(page.get_by_role("alert")).to_contain_text("no longer judges the run. What you see is 5 min old")
    expect(page.locator("#connection")).to_have_text("Old data")


def test_without_the_stream_the_page_asks_every_few_seconds(context: BrowserContext, site: Site) -> None:
    context.route("**/api/events", lambda route: route.abort())
    page = context.new_page()
    page.goto(site.url)
    expect(page.locator("#connection")).to_have_text("Live")
    site.daemon.publish(sentence="Asked for.")
    expect(page.locator("#sentence")).to_have_text("Asked for.", timeout=20_000)


def test_a_plan_is_approved_by_keyboard_alone_after_a_second_confirmation(
    page: Page, site: Site, document: Status
) -> None:
    """The daemon's own route: first without a token in its settings, then with it."""
    store = open_store(sqlite_url(Path(document["run"]["directory"])), "scripted")
    site.daemon.watch.store = store
    page.get_by_role("button", name="Approve…").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Approve shorten_budget?")
    expect(dialog).to_contain_text("Token budget from")
    for text in ("kim", "the data is broken", "open sesame, please"):
        page.keyboard.type(text)
        page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Yes, approve shorten_budget")).to_be_focused()
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("alert")).to_contain_text("decisions over HTTP are disabled")
    site.daemon.config = DaemonConfig(approval_token=SecretStr("open sesame, please"))
    page.get_by_role("button", name="Yes, approve shorten_budget").press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.locator("#announcement")).to_contain_text("your decision is stored")
    with store.transaction() as tx:
        decision = tx.load().decisions["early_divergence-0001"]
    store.close()
    assert (decision.approved, decision.by, decision.reason) == (True, "kim", "the data is broken")


def test_going_back_decides_nothing(page: Page) -> None:
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    page.get_by_role("button", name="Reject…").click()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Reject…").click()
    page.get_by_role("button", name="Go back").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Reject…")).to_be_focused()
    assert not sent


def test_everything_that_can_be_used_is_reached_by_tab_and_shows_its_focus(page: Page) -> None:
    reached: list[str] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        word, outline = page.evaluate(
            "[document.activeElement.innerText || document.activeElement.id, getComputedStyle(document.activeElement).outlineStyle]"
        )
        if page.evaluate("document.activeElement === document.body"):
            break
        assert outline != "none", word
        reached.append(word)
    wanted = {"Approve…", "Reject…", "Whole budget", "So far", "chart", "ladder_deviation", "early_divergence", "JSON"}
    assert wanted <= set(reached)


def test_the_arrow_keys_read_the_chart_out(page: Page, document: Status) -> None:
    page.locator("#chart").focus()
    page.keyboard.press("End")
    expect(page.locator("#readout")).to_contain_text(f"Step {document['loss']['steps'][-1]},")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#readout")).to_contain_text(f"Step {document['loss']['steps'][-2]},")
    expect(page.locator("#readout")).to_contain_text("registered")


def test_the_axis_can_end_with_the_run_so_far(page: Page) -> None:
    def end() -> float:
        return float(page.locator("#chart .now").get_attribute("cx") or 0)

    whole = end()
    page.get_by_role("button", name="So far").click()
    expect(page.get_by_role("button", name="So far")).to_have_attribute("aria-pressed", "true")
    assert end() > 2 * whole


@pytest.mark.parametrize(("size", "scheme"), [*itertools.product((PHONE, DESK), ("light", "dark"))])
def test_text_is_readable_and_nothing_runs_out_of_the_window(
    browser: Browser, site: Site, size: dict[str, int], scheme: str
) -> None:
    context = browser.new_context(viewport=size, color_scheme=scheme)  # pyright: ignore[reportArgumentType]
    page = context.new_page()
    page.goto(site.url)
    expect(page.get_by_role("rowheader")).to_have_count(12)
    assert page.evaluate(TOO_WIDE) == []
    page.get_by_role("button", name="Approve…").click()
    assert page.evaluate(CONTRAST) == []
    context.close()


TOO_WIDE = """() => [...document.querySelectorAll("body *")]
  .filter((node) => node.getBoundingClientRect().right > innerWidth + 0.5 && !node.closest(".unseen, .skip, thead"))
  .map((node) => `${node.tagName} ${node.id} ${node.getAttribute("class")} ${node.textContent.slice(0, 40)}`)"""
"""Elements that run out of the window to the right."""

CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const [r, g, b, a] = rgba(getComputedStyle(at).backgroundColor);
      if (a > 250) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const bad = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.checkVisibility()) continue;
    const style = getComputedStyle(node), ink = node.closest("svg") ? style.fill : style.color;
    const [one, two] = [light(rgba(ink).slice(0, 3)), light(behind(node))].sort((a, b) => b - a);
    if ((one + 0.05) / (two + 0.05) < 4.5) bad.push([node.textContent, ink, behind(node).join()]);
  }
  return bad;
}"""
"""Texts with less contrast than WCAG 2.2 AA asks (4.5 to 1), with their colours."""


def test_the_page_asks_nobody_but_the_daemon(context: BrowserContext, site: Site) -> None:
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    page = context.new_page()
    page.goto(site.url)
    expect(page.locator("#connection")).to_have_text("Live")
    assert {"api/status", "api/events", "static/status.js"} <= {url.removeprefix(site.url) for url in asked}
    assert all(url.startswith(site.url) for url in asked)


def test_a_run_without_card_or_telemetry_is_shown_as_such(context: BrowserContext, tmp_path: Path) -> None:
    (tmp_path / "telemetry").mkdir()
    store = open_store(sqlite_url(tmp_path), "empty")
    watch = Watch(tmp_path, store, Outbox(store, {}), DaemonConfig(), "test")
    watch.tick(time.time())
    store.close()
    assert watch.status
    site = Site(watch.status)
    page = context.new_page()
    page.goto(site.url)
    expect(page.locator("#sentence")).to_have_text("No telemetry yet.")
    expect(page.locator("#chart")).to_have_attribute("aria-label", "No loss yet")
    expect(page.locator("#incidents")).to_have_text("No incident so far.")
    expect(page.get_by_role("row").filter(has_text="unknown")).to_have_count(12)
    site.server.close()
