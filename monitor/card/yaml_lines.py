"""YAML read into plain values together with the line of every key, and with every mistake told at once.

Stricter than YAML: keys are words, no key twice, no merge keys; and bounded, so that no document, however hostile,
costs more than a moment (size, depth, and the number of values that aliases expand to). `5e10` is a number, as in YAML
1.2; YAML 1.1 wants `5.0e+10`.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_VALUES = 100_000

_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")

Place = tuple[str | int, ...]
"""Where a value stands: keys and list positions from the root."""


@dataclass
class Lines:
    """The values of a document, and the line (from 1) of each place. `mistakes` are (line, place, sentence)."""

    values: Any = None
    at: dict[Place, int] = field(default_factory=dict[Place, int])
    mistakes: list[tuple[int, Place, str]] = field(default_factory=list[tuple[int, Place, str]])

    def line(self, place: Place) -> int:
        """The line of `place`, or of the nearest thing around it."""
        while place and place not in self.at:
            place = place[:-1]
        return self.at.get(place, 1)


def read_lines(path: Path) -> Lines:
    """Read a YAML file. What cannot be read at all is a mistake like any other (line 0: the file itself)."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return _failed(0, f"cannot be read: {error.strerror}.")
    if len(content) > MAX_BYTES:
        return _failed(0, f"has {len(content):,} bytes; a card has at most {MAX_BYTES:,}.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return _failed(content.count(b"\n", 0, error.start) + 1, "is not UTF-8 text; save it as UTF-8.")
    return _parse(text)


def _failed(line: int, sentence: str) -> Lines:
    return Lines(mistakes=[(line, (), sentence)])


def _parse(text: str) -> Lines:
    try:
        deepest = _too_deep(text)
        if deepest:
            return _failed(deepest, f"is nested more than {MAX_DEPTH} deep.")
        loader = yaml.SafeLoader(text)
        return _Reading(loader).document(loader.get_single_node())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        return _failed(mark.line + 1 if mark else 1, f"is not YAML here: {error.problem or error.context}.")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        return _failed(line, f"holds the character {error.character!r}, which YAML does not allow.")


def _too_deep(text: str) -> int:
    """The first line at which the nesting passes the limit, 0 if none: the composer would recurse into it."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            return 1 if event.start_mark is None else event.start_mark.line + 1
    return 0


class _TooManyError(Exception):
    """Aliases expand to more values than a card holds."""


class _Reading:
    """One walk over a composed document."""

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self.loader, self.found, self.left = loader, Lines(), MAX_VALUES

    def document(self, root: yaml.Node | None) -> Lines:
        if root is None:
            return _failed(1, "is empty.")
        try:
            self.found.values = self.value(root, ())
        except _TooManyError:
            return _failed(1, f"expands to more than {MAX_VALUES:,} values; write out its aliases.")
        return self.found

    def value(self, node: yaml.Node, place: Place) -> Any:
        self.left -= 1
        if self.left < 0 or len(place) > MAX_DEPTH:
            raise _TooManyError
        self.found.at.setdefault(place, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*place, position)) for position, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)  # noqa: S101 - the three kinds of nodes
        return self.scalar(node, place)

    def mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                self.mistake(line, place, f"a key must be a word, not {_shown(key)}; put it in quotes if it is one.")
                continue
            if key in values:
                first = self.found.at[(*place, key)]
                self.mistake(line, (*place, key), f"is given twice; the first is in line {first}.")
                continue
            self.found.at[(*place, key)] = line
            values[key] = self.value(value_node, (*place, key))
        return values

    def scalar(self, node: yaml.ScalarNode, place: Place) -> Any:
        if node.style is None and _SCIENTIFIC.fullmatch(str(node.value)):
            return float(node.value)
        try:
            return self.loader.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            problem = getattr(error, "problem", None) or error
            self.mistake(node.start_mark.line + 1, place, f"cannot be read as a value: {problem}.")
            return None

    def mistake(self, line: int, place: Place, sentence: str) -> None:
        self.found.mistakes.append((line, place, sentence))


def _shown(key: object) -> str:
    return repr(key) if isinstance(key, str) else "a list or mapping"
