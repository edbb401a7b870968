"""The detection benchmark: `python benchmarks/detection/run.py [--json FILE] [--quick] [--seeds tune|report]`.

Judges labelled recordings and generated runs with runwatch's twelve checks and with the rules that people use today,
and writes the tables into `benchmarks/RESULTS.md`.
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
sys.path[:0] = [str(HERE), str(ROOT / "tests")]

import synthetic  # noqa: E402 - the path above makes the generator of the tests importable
import tables  # noqa: E402 - the same
from synthetic import REPORT, TUNE, Tally  # noqa: E402 - the same


def main() -> None:
    """Run the parts that were asked for and write the tables."""
    arguments = _arguments()
    first = TUNE if arguments.seeds == "tune" else REPORT
    seeds, records, rounds, cuts = (6, 6_000, 1, 100) if arguments.quick else (24, 12_000, 1, 1000)
    judges = synthetic.judges()[: 1 if arguments.only_runwatch else None]
    tallies = [(judge, Tally(judge.name)) for judge in judges]
    begin = time.monotonic()
    synthetic.with_incidents(tallies, first, seeds, _progress)
    synthetic.without_incidents(tallies, first, records, rounds, _progress)
    synthetic.restarts(tallies, first, cuts, _progress)
    found = [tally for _, tally in tallies]
    sys.stderr.write(f"\r{'':100}\rdone in {time.monotonic() - begin:.0f} s\n")
    text = tables.synthetic(found, arguments.seeds, seeds)
    print(text)
    if arguments.results:
        tables.put(arguments.results, "detection", text)
    if arguments.json:
        arguments.json.write_text(json.dumps([_plain(tally) for tally in found], indent=1))


def _plain(tally: Tally) -> dict[str, Any]:
    return asdict(tally)


def _progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{what[:80]:80} {done:4}/{total}")
        sys.stderr.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    parser.add_argument("--quick", action="store_true", help="a quarter of the runs")
    parser.add_argument("--seeds", choices=("tune", "report"), default="report", help="which set of seeds")
    parser.add_argument("--only-runwatch", action="store_true", help="leave the rivals out")
    parser.add_argument("--results", type=Path, help="put the tables between the markers of this Markdown file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
