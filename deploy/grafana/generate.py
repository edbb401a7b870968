"""Writes `dashboards/*.json` and the alert rules for Grafana: `python deploy/grafana/generate.py` (`--check` only compares).

Needs the `dashboards` dependency group. What it writes is committed, so that nobody needs this to use it.
"""

import json
import sys
from pathlib import Path
from typing import Any

from alerting import alert_rules
from daemon import daemon
from fleet import fleet
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from run import MARKS, run

HERE = Path(__file__).parent


def written() -> dict[Path, str]:
    """Every generated file and its text."""
    made = {name: build() for name, build in {"run": run, "fleet": fleet, "daemon": daemon}.items()}
    boards = {HERE / "dashboards" / f"{name}.json": as_json(one) for name, one in made.items()}
    return {**boards, HERE / "provisioning" / "alerting" / "runwatch.yaml": alert_rules()}


def as_json(made: dashboard.Dashboard) -> str:
    """The dashboard's JSON, with a number for each panel and what the SDK has no field for."""
    board: dict[str, Any] = json.loads(json.dumps(made.build(), cls=JSONEncoder))
    panels = [panel for outer in board["panels"] for panel in (outer, *outer.get("panels", ()))]
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    for annotation in board.get("annotations", {}).get("list", ()):
        annotation.update(MARKS[annotation["name"]])
    _leave_out(board, panels)
    return json.dumps(board, indent=1, ensure_ascii=False) + "\n"


def _leave_out(board: dict[str, Any], panels: list[dict[str, Any]]) -> None:
    """What the SDK writes unasked and Grafana does not know there (the preview's type check finds such keys)."""
    for one in board["templating"]["list"]:
        for key in ("auto", "auto_min", "auto_count"):
            del one[key]
    for panel in panels:
        if panel["type"] == "table":
            del panel["options"]["footer"]


def main() -> int:
    """Write all files; with `--check` write nothing, and exit with 1 if one differs."""
    files = written()
    if "--check" in sys.argv[1:]:
        stale = [path.name for path, text in files.items() if not path.exists() or path.read_text() != text]
        print(f"not as generated: {', '.join(stale)}" if stale else "all as generated")
        return 1 if stale else 0
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
