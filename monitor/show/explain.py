"""The page of a check or node: its docstring, as `runwatch explain`, as a runbook, as Markdown in `docs/runbooks/`."""

import re

from runwatch.checks import all_checks
from runwatch.rules import all_nodes

HEADING = re.compile(r"(?<=\n\n)([A-Z][A-Za-z ]+):\s*(\w?)")


def names() -> list[str]:
    """Everything that has a page: the checks, then the nodes."""
    return [*all_checks(), *all_nodes()]


def explanation(name: str) -> str | None:
    """The docstring of a check or node, or None."""
    found = all_checks().get(name) or all_nodes().get(name)
    return found.docs if found else None


def markdown(name: str) -> str:
    """The runbook page: the docstring's own words, its headings as headings."""
    text = explanation(name) or ""
    kind = "Check" if name in all_checks() else "Risk node"
    body = HEADING.sub(lambda found: f"## {found[1]}\n\n{found[2].upper()}", text)
    source = f"{'checks' if kind == 'Check' else 'rules'}/{name}.py"
    return (
        f"# {kind} `{name}`\n\n{body.rstrip()}\n\nMade from the docstring of `{source}`: `runwatch explain {name}`.\n"
    )
