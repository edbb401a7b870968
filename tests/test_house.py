"""The house rules that no other tool holds: one identity per module, one file per check, docs where they belong."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from runwatch.checks import all_checks
from runwatch.rules import all_nodes

ROOT = Path(__file__).parents[1]
FOLDERS = ("checks", "rules", "monitor", "trainer")
SOURCES = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts
)
HEADINGS = (
    "What it does:",
    "Why it matters:",
    "Warns and turns critical when:",
    "Defaults:",
    "Does not see:",
    "What to do:",
)
CHECK_INFRASTRUCTURE = {"__init__", "check", "planned", "signals", "windows"}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_bare_folder_name_cannot_be_imported(name: str) -> None:
    found = subprocess.run(
        [sys.executable, "-P", "-c", f"import importlib.util as u; print(u.find_spec({name!r}))"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert found.stdout.strip() == "None"


def test_every_module_in_checks_is_a_check_or_named_infrastructure() -> None:
    modules = {path.stem for path in (ROOT / "checks").glob("*.py")} - CHECK_INFRASTRUCTURE
    assert modules == set(all_checks())


@pytest.mark.parametrize("name", sorted(all_checks()))
def test_a_check_has_its_headings_in_order_and_a_scenario_table(name: str) -> None:
    docs = all_checks()[name].docs
    places = [docs.find(heading) for heading in HEADINGS]
    assert -1 not in places, f"{name} lacks {HEADINGS[places.index(-1)]}"
    assert places == sorted(places)
    assert re.match(r"^[A-Z].*\.\n\n", docs), "the first line is one full sentence"
    actions = re.findall(r"^- (\w+):", docs.partition("What to do:")[2], re.MULTILINE)
    assert actions == ["Meaning", "Impact", "Diagnosis", "Mitigation"]
    assert (ROOT / "tests" / "checks" / f"test_{name}.py").exists()


@pytest.mark.parametrize("name", sorted(all_checks()))
def test_the_table_of_a_check_has_every_setting_with_its_default_and_a_source(name: str) -> None:
    check = all_checks()[name]
    assert _table_of_defaults(check.docs) == _defaults(check.settings, set(check.settings.model_fields))


@pytest.mark.parametrize("name", sorted(all_nodes()))
def test_the_table_of_a_node_has_every_setting_of_its_own_with_its_default_and_a_source(name: str) -> None:
    node = all_nodes()[name]
    assert _table_of_defaults(node.docs) == _defaults(node.settings, set(vars(node.settings)["__annotations__"]))


def _table_of_defaults(docs: str) -> dict[str, str]:
    """The first word of each default by setting; what is no setting stands without backticks and is left out."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in docs.splitlines() if line[:1] == "|"]
    assert [row for row in rows if len(row) != 3 or not all(row)] == [], "setting, default and source"
    return {setting.strip("`"): default.split()[0] for setting, default, _ in rows if setting.startswith("`")}


def _defaults(settings: type[BaseModel], names: set[str]) -> dict[str, str]:
    return {name: _as_written(settings.model_fields[name].default) for name in names}


def _as_written(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, int | float) else "none" if default in (None, ()) else str(default)


def test_every_package_of_the_tree_is_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    folders = {".".join(("runwatch", *path.parent.relative_to(ROOT).parts)) for path in SOURCES}
    assert folders == listed


@pytest.mark.parametrize("name", sorted({f"runwatch.{path.relative_to(ROOT).parts[0]}" for path in SOURCES}))
def test_each_folder_is_importable_under_runwatch(name: str) -> None:
    assert importlib.util.find_spec(name) is not None


def _functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_functions_stay_short() -> None:
    lengths = sorted(
        ((node.end_lineno or 0) - node.lineno + 1, f"{path.relative_to(ROOT)}:{node.name}")
        for path in SOURCES
        for node in _functions(path)
    )
    assert [name for length, name in lengths if length > 60] == []
    assert lengths[len(lengths) * 9 // 10][0] <= 35


def test_checks_and_rules_handle_no_exception() -> None:
    guilty = [
        f"{path.name}:{node.lineno}"
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] in {"checks", "rules"}
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Try)
    ]
    assert guilty == []


def test_the_trainer_package_imports_nothing() -> None:
    assert (ROOT / "trainer" / "__init__.py").read_text() == ""
