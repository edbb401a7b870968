"""A page as a list of sections, written out as one self-contained HTML file or as Markdown fit for an issue comment.

All text is text: nothing of it becomes markup, a mention or a reference, whoever wrote it. Every page of the product is one of
these, but for the status page, which is a program.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import ClassVar, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

COMMENT_BYTES = 60_000
"""What a Markdown page may be at most: GitHub takes 65,536 characters in a comment."""
COMMENT_ROWS = 40
"""Rows of a table in Markdown; the HTML page has all."""
COMMENT_CELL = 400
"""Characters of a cell or paragraph in Markdown; telemetry can say anything."""

Tone = Literal["", "good", "warning", "critical", "quiet"]


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar = "text"
    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Items:
    """A list of sentences."""

    kind: ClassVar = "items"
    items: Sequence[str]


@dataclass(frozen=True)
class Links:
    """Named addresses; those that are no web addresses are shown as text."""

    kind: ClassVar = "links"
    links: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """Rows of cells. A cell that is a level or a state is coloured; columns in `numbers` stand to the right."""

    kind: ClassVar = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()
    folded: str = ""
    """The line that unfolds the table, or nothing when it is shown at once."""
    tones: Mapping[tuple[int, int], Tone] = field(default_factory=dict[tuple[int, int], Tone])
    """By row and column, where the text of a cell does not say it."""

    def tone(self, row: int, column: int, text: str) -> Tone:
        """How a cell is coloured."""
        return self.tones.get((row, column)) or TONES.get(text, "")


@dataclass(frozen=True)
class Picture:
    """An SVG picture and the sentence that says what it shows. `text` stands for it in Markdown."""

    kind: ClassVar = "picture"
    svg: str
    alt: str
    text: str = ""


@dataclass(frozen=True)
class Verbatim:
    """Text as it is, folded away under a line unless `unfolded`."""

    kind: ClassVar = "verbatim"
    title: str
    text: str
    unfolded: bool = False


Block = Text | Items | Links | Table | Picture | Verbatim


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it; `level` 2 or 3."""

    title: str
    blocks: Sequence[Block]
    level: int = 2

    @property
    def anchor(self) -> str:
        """Its place within the page."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


TONES: dict[str, Tone] = {
    **dict.fromkeys(("critical", "rejected", "unverified", "unacknowledged", "expired", "above", "broken"), "critical"),
    **dict.fromkeys(("warning", "proposed", "requested", "acknowledged", "observed", "blocked", "armed"), "warning"),
    **dict.fromkeys(("resolved", "verified", "approved", "inside"), "good"),
}
"""How words in table cells are coloured."""


def html(title: str, sections: Sequence[Section]) -> str:
    """The whole page: one file that needs nothing else, in the light or dark of its reader."""
    return _PAGES.get_template("page.html").render(title=title, sections=sections, is_web=is_web)


def is_web(url: str) -> bool:
    """Whether an address may become a link: anything but http and https could be a script."""
    return re.match(r"https?://[^\s]+$", url) is not None


_PAGES = Environment(
    loader=PackageLoader("runwatch.monitor.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def markdown(title: str, sections: Sequence[Section]) -> str:
    """The page as GitHub's Markdown, cut at `COMMENT_BYTES`; pictures become their text."""
    parts = [f"# {plain(title)}"]
    for section in sections:
        parts.append(f"{'#' * section.level} {plain(section.title)}")
        parts += [text for block in section.blocks if (text := _MARKDOWN[type(block)](block))]
    return _cut(parts)


def _cut(parts: Sequence[str]) -> str:
    """As many whole blocks as fit, and a note about the rest."""
    note = "_This is not all of it: the HTML page has the rest._\n"
    kept: list[str] = []
    size = len(note.encode())
    for part in parts:
        size += len(part.encode()) + 2
        if size > COMMENT_BYTES:
            return "\n\n".join([*kept, note])
        kept.append(part)
    return "\n\n".join(kept) + "\n"


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line: no markup, no HTML, no mention of a person, no issue reference."""
    one_line = re.sub(r"\s+", " ", "".join(letter if letter.isprintable() else " " for letter in text)).strip()
    if len(one_line) > COMMENT_CELL:
        one_line = f"{one_line[:COMMENT_CELL]}…"
    escaped = re.sub(r"([\\`*_\[\]<>#|~$])", r"\\\1", one_line)
    escaped = re.sub(r"(?<!\d)([@#])(?=\w)", "\\1\u200b", escaped)
    escaped = re.sub(
        r"(?i)\b(https?|ftp)://|\bwww\.",
        lambda found: found[0].replace(":", ":\u200b").replace(".", ".\u200b"),
        escaped,
    )
    return re.sub(r"^([-+=]|\d+(?=[.)](?:\s|$)))", r"\1\\" if escaped[:1].isdigit() else r"\\\1", escaped)


def _links_markdown(block: Links) -> str:
    def link(name: str, url: str) -> str:
        return f"[{plain(name)}](<{re.sub(r'[<>]', '', url)}>)" if is_web(url) else f"{plain(name)}: {plain(url)}"

    return " · ".join(link(name, url) for name, url in block.links)


def _table_markdown(block: Table) -> str:
    rule = " | ".join("---:" if column in block.numbers else "---" for column in range(len(block.head)))
    lines = [f"| {' | '.join(map(plain, block.head))} |", f"| {rule} |"]
    lines += [f"| {' | '.join(map(plain, row))} |" for row in block.rows[:COMMENT_ROWS]]
    table = "\n".join(lines)
    more = len(block.rows) - COMMENT_ROWS
    table += f"\n\n… and {more:,} more in the HTML page." if more > 0 else ""
    return f"<details><summary>{escape(block.folded)}</summary>\n\n{table}\n\n</details>" if block.folded else table


def _verbatim_markdown(block: Verbatim) -> str:
    """Fenced by more backticks than the text has in a row."""
    text = block.text[:2000]
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"<details><summary>{escape(block.title)}</summary>\n\n{fence}text\n{text}\n{fence}\n\n</details>"


_MARKDOWN: dict[type, Callable[..., str]] = {
    Text: lambda block: plain(block.text),
    Items: lambda block: "\n".join(f"- {plain(item)}" for item in block.items),
    Links: _links_markdown,
    Table: _table_markdown,
    Picture: lambda block: f"{plain(block.alt)} {block.text}".strip() if block.text else "",
    Verbatim: _verbatim_markdown,
}
