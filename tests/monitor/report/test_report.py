"""The page of a run, made of a real closed loop: a scripted trainer, the daemon's ticks, its database and its files."""

import json
import re
import shutil
import sqlite3
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import scripted
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from scripted import ScriptedTrainer

from runwatch.monitor.act.approvals import declare, switch_plans
from runwatch.monitor.card.run_card import Declaration
from runwatch.monitor.commands.report import ReportError, report, report_command
from runwatch.monitor.daemon.settings import DaemonConfig
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.notify.outbox import Outbox
from runwatch.monitor.report.page import COMMENT_BYTES, Section, Table, Text, Verbatim, html, markdown, plain
from runwatch.monitor.report.recorded_run import approaches, gather
from runwatch.monitor.store.store import open_store, sqlite_url

pytest.importorskip("matplotlib", reason="needs the extra plots")

HOSTILE = (
    "<script>alert(1)</script> @everyone #1 | `x` **bold** <img src=x onerror=alert(1)> https://evil.example \x1b[31m"
)


def card(**run: Any) -> dict[str, Any]:
    document = scripted.card()
    document["run"] |= run
    document["ladder"]["registered"] = "2026-01-01T00:00:00Z"
    document["ladder"]["rungs"] = [{"name": "rung-1", "parameters": 100_000, "tokens": 500_000, "loss": 2.9}]
    return document


def watched(run_dir: Path, steps: int = 300, fault: int = 120, **run: Any) -> None:
    """Train and watch a run of `steps`, with a declaration, an amended card and the kill switch used at the end."""
    trainer = ScriptedTrainer(run_dir, fault=fault)
    (run_dir / "run.yaml").write_text(json.dumps(card(**run)))
    store = open_store(sqlite_url(run_dir), "scripted")
    watch = Watch(run_dir, store, Outbox(store, {}), DaemonConfig(), "test")
    for _ in range(steps // 20):
        watch.tick(trainer.train(20))
    name, reason = (HOSTILE, HOSTILE) if run else ("ada", "new shard")
    declare(store, Declaration(step=9000, signals=("data/mixture",), reason=reason), name)
    (run_dir / "run.yaml").write_text(json.dumps(card(**run) | {"seed": 1}, indent=1))
    watch.tick(trainer.train(20))
    switch_plans(store, enabled=False, by=name, reason=reason)
    watch.tick(trainer.clock)
    store.close()


@pytest.fixture(scope="module")
def acted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose plan was carried out and verified; do not change it."""
    run_dir = tmp_path_factory.mktemp("acted") / "run"
    watched(run_dir)
    return run_dir


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with markup wherever people and trainers write text."""
    run_dir = tmp_path_factory.mktemp("hostile") / "run"
    watched(
        run_dir,
        steps=160,
        hypothesis=HOSTILE,
        owner=HOSTILE,
        links={HOSTILE: "javascript:alert(1)", "good": "https://a.example/?a=1&b=2"},
    )
    return run_dir


def pages(run_dir: Path, into: Path) -> tuple[str, str]:
    report(run_dir, into / "out" / "report.html", into / "out" / "report.md")
    return (into / "out" / "report.html").read_text(), (into / "out" / "report.md").read_text()


class Tags(HTMLParser):
    """Every element with its attributes; fails on what is closed without having been opened."""

    VOID = frozenset({"meta", "br", "hr", "link", "img", "input"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element begins."""
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element that holds nothing."""
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """The innermost open element ends."""
        assert self.open, tag
        assert self.open.pop() == tag


STORY = {
    "the hypothesis": "A scripted run follows its curve.",
    "how the run stands": "In flight, in phase train, at step 320",
    "the registration": "registered on 2026-01-01 00:00 UTC, before launch",
    "the loss against the band": "inside the band",
    "where the curve ends to apply": "early_divergence-0001 changed the plan at step",
    "an incident": "ladder_deviation-0001",
    "a plan": "early_divergence-0001: shorten_budget",
    "its evidence": "ladder_deviation has been critical for",
    "its effects": "Token budget from 3,072,000 to",
    "its forecast": "Predicted final loss",
    "its outcome": "Verified: the effect was seen in telemetry.",
    "the receipt": "The trainer's receipt: applied at step",
    "a quiet node": "rewind_and_skip",
    "a declaration": "new shard",
    "an amendment": "The run card was amended",
    "what it changed": '"seed": 1',
    "the kill switch": "Plans were disabled by ada",
    "a rung": "rung-1",
    "the audit log": "rows are whole and in order",
}


@pytest.mark.parametrize("part", STORY)
def test_the_page_tells(part: str, acted: Path, acted_pages: tuple[str, str]) -> None:
    page, comment = acted_pages
    assert STORY[part] in re.sub(r"\s+", " ", unescape(page))
    assert STORY[part] in re.sub(r"\\(?=\W|_)", "", comment)


@pytest.fixture(scope="module")
def acted_pages(acted: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """HTML and Markdown of the run that was acted upon."""
    return pages(acted, tmp_path_factory.mktemp("pages"))


def test_the_receipt_shows_every_changed_field_before_and_after(acted_pages: tuple[str, str]) -> None:
    page = re.sub(r"</?td[^>]*>", "|", acted_pages[0])
    budget = scripted.BUDGET // 2 // (100 * scripted.TOKENS) * 100 * scripted.TOKENS
    assert f"|token budget||{scripted.BUDGET:,}||{budget:,}|" in page
    assert "|mixture||code 0.5, prose 0.5||code 0.25, prose 0.75|" in page
    assert "|capacity factor|" not in page


def test_the_page_needs_nothing_else_and_takes_its_colours_from_the_reader(acted_pages: tuple[str, str]) -> None:
    tags = Tags(acted_pages[0]).found
    assert [tag for tag, _ in tags].count("svg") == 2
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in tags}
    addresses = [
        value for _, attributes in tags for name, value in attributes.items() if name in {"src", "href", "xlink:href"}
    ]
    assert all(value and value.startswith("#") for value in addresses)
    assert not re.search(r"@import|url\((?!#)", acted_pages[0])
    svg = acted_pages[0].partition("<svg")[2]
    assert "var(--trend)" in svg
    assert "#000000" not in svg.partition("</svg>")[0]


def test_the_comment_is_short_and_every_table_has_straight_columns(acted_pages: tuple[str, str]) -> None:
    comment = acted_pages[1]
    assert len(comment.encode()) < COMMENT_BYTES
    for table in re.findall(r"(?:^\|.*\n?)+", comment, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
    rendered = MarkdownIt("commonmark").enable("table").render(comment)
    assert rendered.count("<table>") == len(re.findall(r"(?:^\|.*\n?)+", comment, re.MULTILINE))


def test_hostile_text_stays_text(hostile: Path, tmp_path: Path) -> None:
    page, comment = pages(hostile, tmp_path)
    tags = Tags(page).found
    assert not {"script", "img"} & {tag for tag, _ in tags}
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]
    assert {attributes.get("href") for tag, attributes in tags if tag == "a"} >= {"https://a.example/?a=1&b=2"}
    assert "href='javascript" not in page
    assert "&lt;script&gt;alert(1)" in page
    rendered = MarkdownIt("commonmark").enable("table").render(comment)
    assert not re.search(r"<(?!/?(?:h\d|p|table|thead|tbody|tr|th|td|ul|li|a|details|summary|pre|code|em)\b)", rendered)
    assert 'href="javascript' not in rendered
    assert "@everyone" not in re.sub(r"(?s)```.*?```", "", comment)  # GitHub mentions nobody in code


def test_a_tampered_log_is_called_broken(acted: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(acted, tmp_path / "run")
    with sqlite3.connect(run_dir / ".runwatch" / "state.db") as connection:
        connection.execute("DROP TRIGGER audit_never_update")
        connection.execute("UPDATE audit SET payload = '{}' WHERE seq = 3")
    connection.close()
    page, _ = pages(run_dir, tmp_path)
    assert "The audit log is broken: row 3" in page
    assert "rows are whole" not in page


def test_a_tampered_mirror_is_called_broken(acted: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(acted, tmp_path / "run")
    mirror = run_dir / ".runwatch" / "audit.jsonl"
    mirror.write_text(mirror.read_text().replace("ladder_deviation-0001", "ladder_deviation-0002"))
    assert "audit.jsonl is not the row of the database" in pages(run_dir, tmp_path)[0]


def test_without_a_database_the_backtest_finds_what_the_daemon_found(acted: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(acted, tmp_path / "run", ignore=shutil.ignore_patterns(".runwatch"))
    seen, judged = gather(acted), gather(run_dir)
    assert [(one.id, one.severity, one.since) for one in judged.incidents] == [
        (one.id, one.severity, one.since) for one in seen.incidents
    ]
    page, _ = pages(run_dir, tmp_path)
    assert "There is no audit log" in page
    assert "early_divergence-0001: shorten_budget" in page
    assert "its effect has not been verified" in page
    assert not (run_dir / ".runwatch").exists()


def test_a_node_that_came_near_says_how_near_and_when(tmp_path: Path) -> None:
    trainer = ScriptedTrainer(tmp_path / "run", fault=120)
    document = card() | {"nodes": {"early_divergence": {"mode": "auto", "critical_fraction": 0.012}}}
    (trainer.run_dir / "run.yaml").write_text(json.dumps(document))
    trainer.train(190)
    trainer.cured = True
    trainer.train(150)
    recorded = gather(trainer.run_dir)
    near = approaches(recorded)
    verdicts = {verdict.node: verdict.progress for verdict in recorded.nodes}
    assert all(near[name].progress >= progress for name, progress in verdicts.items())
    assert 0.5 < near["early_divergence"].progress < 1
    assert 180 <= near["early_divergence"].step <= 230
    assert verdicts["early_divergence"] == 0
    page, _ = pages(trainer.run_dir, tmp_path)
    assert f"{near['early_divergence'].progress:.0%}" in page


UNFINISHED = {"declared and not begun": 0, "one record": 1, "a few records": 5}


@pytest.mark.parametrize("case", UNFINISHED)
def test_a_run_that_has_hardly_begun_has_a_page(case: str, tmp_path: Path) -> None:
    trainer = ScriptedTrainer(tmp_path / "run")
    (trainer.run_dir / "run.yaml").write_text(json.dumps(card()))
    trainer.train(UNFINISHED[case])
    if not UNFINISHED[case]:
        shutil.rmtree(trainer.run_dir / "telemetry")
    page, comment = pages(trainer.run_dir, tmp_path)
    assert ("No telemetry yet." in page) == (UNFINISHED[case] == 0)
    assert "No check has fired." in comment


def test_a_run_without_a_card_has_a_page_that_says_so(tmp_path: Path) -> None:
    trainer = ScriptedTrainer(tmp_path / "run")
    trainer.train(30)
    page, _ = pages(trainer.run_dir, tmp_path)
    assert "No run card" in page
    assert "Risk nodes were not walked" in page


def test_a_curve_that_was_registered_late_is_no_preregistration(tmp_path: Path) -> None:
    trainer = ScriptedTrainer(tmp_path / "run")
    document = card()
    document["ladder"]["registered"] = "2026-12-02T08:00:00Z"
    (trainer.run_dir / "run.yaml").write_text(json.dumps(document))
    trainer.train(30)
    assert "hours after the run had begun: it is no pre-registration" in pages(trainer.run_dir, tmp_path)[0]


def test_without_matplotlib_the_page_is_refused_and_the_comment_is_made(
    acted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "runwatch.monitor.report.run_charts"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "runwatch.monitor.report.figures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ReportError, match=r"runwatch\[plots\]"):
        report(acted, tmp_path / "report.html", None)
    report(acted, None, tmp_path / "report.md")
    assert "shorten" in (tmp_path / "report.md").read_text()


def test_the_command_writes_both_where_it_is_called_or_only_what_was_named(
    acted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = shutil.copytree(acted, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(report_command, [str(run_dir)]).exit_code == 0
    assert {path.name for path in tmp_path.glob("run.*")} == {"run.html", "run.md"}
    only = CliRunner().invoke(report_command, [str(run_dir), "--markdown", str(tmp_path / "only.md")])
    assert only.output == f"Wrote {tmp_path / 'only.md'}\n"


WRONG_USE = {"no directory": ("missing", 64), "nothing in it": ("", 65)}


@pytest.mark.parametrize("case", WRONG_USE)
def test_the_command_says_what_is_wrong(case: str, tmp_path: Path) -> None:
    folder, code = WRONG_USE[case]
    result = CliRunner().invoke(report_command, [str(tmp_path / folder)])
    assert result.exit_code in {1, code}  # standalone click exits with 1; `runwatch` with the error's own code
    assert str(tmp_path) in result.output


def test_a_long_page_is_cut_at_a_whole_block_and_says_so() -> None:
    many = [Section(f"Part {number}", [Table(("a", "b"), [("x" * 300, "y")] * 100)]) for number in range(30)]
    comment = markdown("Long", [*many, Section("Code", [Verbatim("big", "z" * 10**6), Text("w" * 10**6)])])
    assert 40_000 < len(comment.encode()) <= COMMENT_BYTES
    assert comment.endswith("the HTML page has the rest._\n")
    assert "… and 60 more in the HTML page." in comment


RENDER = MarkdownIt("commonmark").enable("table")
AWKWARD = st.text(st.sampled_from(list("ab1 _*`<>&|[](){}#@!~$\\-+=.:/\n\t\"'")), max_size=60)


@given(st.one_of(st.text(max_size=200), AWKWARD))
def test_text_in_markdown_is_shown_as_it_is(text: str) -> None:
    rendered = RENDER.render(plain(text)).strip()
    shown = Tags(rendered)
    assert [tag for tag, _ in shown.found] in (["p"], [])
    inside = (
        re.sub(r"^<p>|</p>$", "", rendered)
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&quot;", '"')
        .replace("&amp;", "&")
    )
    wanted = re.sub(r"\s+", " ", "".join(letter if letter.isprintable() else " " for letter in text)).strip()
    assert inside.replace("\u200b", "") == wanted.replace("\u200b", "")


@given(AWKWARD)
def test_text_in_html_is_shown_as_it_is_and_opens_no_element(text: str) -> None:
    page = html(text, [Section(text, [Text(text), Table((text,), [(text,)]), Verbatim(text, text)])])
    without = html("", [Section("", [Text(""), Table(("",), [("",)]), Verbatim("", "")])])
    assert [tag for tag, _ in Tags(page).found] == [tag for tag, _ in Tags(without).found]
