"""The detection benchmark: how much runwatch finds, how fast, at what price, beside the rules that people use today.

    python -P benchmarks/detection/run.py [--json FILE] [--quick] [--seeds tune|report] [--recordings DIR]

Part a judges labelled recordings of real runs, part b generated runs with and without incidents, part c is speed. The
tables go to the terminal and, unless `--dry` or `--quick`, between the markers of `benchmarks/RESULTS.md`.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE.parent / "RESULTS.md"
sys.path[:0] = [str(HERE), str(ROOT / "tests" / "helpers")]

import recordings  # noqa: E402 - the path above makes the generator of the tests importable
import speed  # noqa: E402 - the same
import synthetic  # noqa: E402 - the same
import tables  # noqa: E402 - the same
from synthetic import REPORT, TUNE, Tally  # noqa: E402 - the same

PARTS = ("recordings", "synthetic", "speed")


def main() -> None:
    """Run the parts that were asked for, print their tables and put them into the results file."""
    arguments = _arguments()
    found: dict[str, Any] = {}
    for part in arguments.parts:
        begin = time.monotonic()
        text, plain = {"recordings": _recordings, "synthetic": _synthetic, "speed": _speed}[part](arguments)
        _told(f"{part}: {time.monotonic() - begin:.0f} s")
        print(text, end="\n\n")
        found[part] = plain
        if text and not arguments.dry and not arguments.quick and not arguments.only_runwatch:
            tables.put(RESULTS, part, text)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


def _recordings(arguments: argparse.Namespace) -> tuple[str, Any]:
    folder: Path = arguments.recordings
    if not (folder / "incidents.csv").exists():
        _told(f"no incidents.csv in {folder}: the recordings are left out (--recordings DIR)")
        return "", None
    rows, files = recordings.judge_folder(folder)
    return tables.recordings(rows, files), {"rows": list(map(asdict, rows)), "files": list(map(asdict, files))}


def _synthetic(arguments: argparse.Namespace) -> tuple[str, Any]:
    first = TUNE if arguments.seeds == "tune" else REPORT
    seeds, records, rounds, cuts = (6, 6_000, 1, 100) if arguments.quick else (24, 12_000, 1, 1000)
    judges = synthetic.judges()[: 1 if arguments.only_runwatch else None]
    tallies = [(judge, Tally(judge.name)) for judge in judges]
    synthetic.with_incidents(tallies, first, seeds, _progress)
    synthetic.without_incidents(tallies, first, records, rounds, _progress)
    synthetic.restarts(tallies, first, cuts, _progress)
    synthetic.requeues(*tallies[0], first, cuts // 10)
    found = [tally for _, tally in tallies]
    return tables.synthetic(found, arguments.seeds, seeds, cuts), [asdict(tally) for tally in found]


def _speed(arguments: argparse.Namespace) -> tuple[str, Any]:
    figures = speed.measure(quick=arguments.quick, progress=_progress)
    return tables.speed(figures), list(map(asdict, figures))


def _progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{what[:80]:80} {done:4}/{total}")
        sys.stderr.flush()


def _told(what: str) -> None:
    sys.stderr.write(f"\r{what:90}\n" if sys.stderr.isatty() else f"{what}\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every row, outcome and figure to this file")
    parser.add_argument("--quick", action="store_true", help="a quarter of the runs; results are printed only")
    parser.add_argument("--seeds", choices=("tune", "report"), default="report", help="which set of seeds")
    parser.add_argument("--recordings", type=Path, default=ROOT.parent / "shared" / "recordings", help="their folder")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="which parts (all by default)")
    parser.add_argument("--only-runwatch", action="store_true", help="leave the rivals out; results are printed only")
    parser.add_argument("--dry", action="store_true", help="do not touch RESULTS.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
