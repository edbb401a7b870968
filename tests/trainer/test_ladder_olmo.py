"""The ladder's form against public numbers: OLMo 2 7B's held-out losses, predicted from the rungs below it."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORDINGS = ROOT.parent / "shared" / "recordings"
pytestmark = pytest.mark.skipif(not RECORDINGS.is_dir(), reason="the recordings are not beside the repository")

MOST = {"c4": 0.020, "pile": 0.016, "wiki": 0.010, "stack": 0.021, "reddit": 0.014}
"""Nats at the end of the run: what was measured, and 0.006 or more of margin."""
MOST_MEAN = 0.03


@pytest.fixture(scope="module")
def olmo() -> Any:
    """The benchmark as a module (it belongs to no package)."""
    spec = importlib.util.spec_from_file_location("ladder_olmo", ROOT / "benchmarks/ladder/olmo.py")
    assert spec
    assert spec.loader
    module = sys.modules["ladder_olmo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.BOOTSTRAPS = 20
    return module


@pytest.mark.parametrize("corpus", MOST)
def test_the_7b_ends_where_its_ladder_says(corpus: str, olmo: Any) -> None:
    found = olmo.predict(RECORDINGS, corpus)
    assert abs(found.end) < MOST[corpus]
    assert abs(found.error).mean() < MOST_MEAN
    assert (found.low < found.predicted).all()
    assert (found.predicted < found.high).all()


def test_the_published_table_has_every_corpus_and_stands_between_its_markers(olmo: Any, tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    results.write_text("before\n<!-- ladder -->\nold\n<!-- /ladder -->\nafter\n", encoding="utf-8")
    olmo.publish(results, olmo.table([olmo.predict(RECORDINGS, corpus) for corpus in ("c4", "wiki")]))
    text = results.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- ladder -->\n| corpus |")
    assert text.endswith("|\n<!-- /ladder -->\nafter\n")
    assert "old" not in text
