"""The dashboards drawn by Grafana's own components from a live Prometheus: the pictures of the README, by `make dashboards`.

It takes minutes (the demo's run trains to its end) and 475 MB of npm packages, so it runs only where RUNWATCH_PICTURES says
where to put the pictures. `npm ci && npm run build` in deploy/grafana/preview has to come first.
"""

import functools
import http.server
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import live
import pytest
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "deploy" / "grafana" / "preview" / "dist"
PICTURES = os.environ.get("RUNWATCH_PICTURES", "")
CHROMIUM = shutil.which("chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
FAULT = "label_shuffle@190:source=code"
PATIENCE = 2400.0
EMPTY = "all => all.filter(one => one.dataset.empty === 'true').map(one => one.dataset.panel + one.dataset.error)"
"""The panels without anything to draw, and why."""
ASKS: dict[str, Any] = {"early_divergence": {"mode": "confirm"}}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PICTURES, reason="takes minutes and 475 MB of npm packages: `make dashboards` runs it"),
]


def beside(root: Path) -> list[live.LiveTrainer]:
    """Runs beside the demo's: a healthy one, and three with something for a person to do."""
    prepared = functools.partial(live.prepared, root, nodes=ASKS, obeys=False, steps_per_second=4)
    dropping = {"moe/drop_rate": 0.1, "moe/load_max_vio": 0.9}
    return [
        prepared("moe-7b-a1b", fault=10**9),
        prepared("moe-34b-a4b", fault=500, shift=0.35),
        prepared("moe-120b-a10b", fault=700, shift=0.0, shifts=dropping),
        prepared("dense-2b", fault=900, shift=0.0, shifts={"throughput/mfu": -0.12}),
    ]


@contextmanager
def serving(handler: Callable[..., Any]) -> Iterator[str]:
    """A server on loopback; its address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and takes every message that is posted."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name is the standard library's
        """Say nothing."""

    def do_POST(self) -> None:
        """Take a message."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture(scope="module")
def observed(
    tmp_path_factory: pytest.TempPathFactory, prometheus_at: Callable[..., Any]
) -> Iterator[tuple[str, float]]:
    """Prometheus over the demo's run, trained to its end, and four others, all watched; and the minutes that it has seen."""
    root, began = tmp_path_factory.mktemp("pictures"), time.time()
    demo = root / "cpu-demo"
    demo.mkdir()
    (demo / "run.yaml").write_text((ROOT / "trainer" / "cards" / "cpu.yaml").read_text())
    trainers = beside(root)
    ports = {path: (live.free_port(), live.free_port()) for path in [demo, *(one.run_dir for one in trainers)]}
    with serving(Quiet) as receiver:
        for run_dir in ports:
            (run_dir / "runwatch.yaml").write_text(json.dumps({"notify": [{"kind": "webhook", "url": receiver}]}))
        with live.watched(ports), live.running(trainers):
            server = prometheus_at(live.scrape(root, list(ports.values())), "--web.cors.origin=.*")
            train(demo)
            time.sleep(10)
            yield server.url, (time.time() - began) / 60


def train(run_dir: Path) -> None:
    """The demo's run to its end."""
    with live.process(run_dir / "trainer.log", "runwatch.trainer.train", str(run_dir), "--fault", FAULT) as training:
        until = time.monotonic() + PATIENCE
        while training.poll() is None:
            assert time.monotonic() < until, (run_dir / "trainer.log").read_text()[-2000:]
            time.sleep(1)


@pytest.fixture(scope="module")
def browser_page() -> Iterator[Page]:
    """A window of a Chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser.new_page(viewport={"width": 1600, "height": 900})
        browser.close()


def test_grafanas_components_draw_every_panel(observed: tuple[str, float], browser_page: Page) -> None:
    prometheus, minutes = observed
    wrong: list[str] = []
    browser_page.on("pageerror", lambda error: wrong.append(str(error)))
    with serving(functools.partial(Quiet, directory=str(PAGE))) as site:
        for board in ("run", "fleet", "daemon"):
            chosen = "&var-run=cpu-demo" if board == "run" else ""
            asked = f"prometheus={prometheus}&scrape=1&minutes={minutes:.1f}{chosen}"
            browser_page.goto(f"{site}/?board={board}&{asked}")
            browser_page.wait_for_function("document.body.dataset.state === 'drawn'", timeout=120_000)
            browser_page.wait_for_timeout(2000)
            empty = browser_page.eval_on_selector_all("section[data-panel]", EMPTY)
            assert set(empty) <= {"Off its curve"}  # the plan has changed the run: its curve holds no more
            browser_page.screenshot(path=str(Path(PICTURES) / f"grafana-{board}.png"), full_page=True)
    assert wrong == []
