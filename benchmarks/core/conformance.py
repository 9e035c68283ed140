"""Run every scenario in a folder through the engine's scheduler and check the scheduler's decisions.

    python -m benchmarks conformance --suite DIR [--soft] [--own]

A scenario is a .json file with its expected decisions (docs/how-to/simulation.md). The program prints one
line per file: identical, or the first step and field that differ. Exits with 1 when any file differs.
"""

import argparse
import sys
from pathlib import Path

from mmengine.simulation import Driver, first_difference, read_settings
from mmengine.simulation.records import Record, Recorder
from mmengine.simulation.workload_files import load_workload


def difference_of(path: Path, compat: str, soft: bool) -> str:
    """Return the first difference between the engine's decisions and the scenario's, or "" if they agree."""
    work = load_workload(path)
    records: list[Record] = []
    recorder = Recorder(records.append, work.media_names, queues=True)
    Driver(work, read_settings(work.settings, work, compat), recorder=recorder).run()
    return first_difference(work.expect or [], records, soft=soft, open_ends=work.without_grammar)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", type=Path, required=True, help="folder of scenarios")
    parser.add_argument("--soft", action="store_true", help="also compare free blocks and waiting requests")
    parser.add_argument("--own", action="store_true", help="use mmengine's own rules, without --compat vllm")
    options = parser.parse_args()
    paths = sorted(path for path in options.suite.glob("*.json"))
    num_identical = 0
    for path in paths:
        try:
            difference = difference_of(path, "" if options.own else "vllm", options.soft)
        except Exception as error:  # an error in one file must not stop the others
            difference = f"{type(error).__name__}: {error}"
        num_identical += not difference
        print(f"{path.stem}: {difference or 'identical'}")
    print(f"{num_identical} of {len(paths)} identical")
    return 0 if paths and num_identical == len(paths) else 1


if __name__ == "__main__":
    sys.exit(main())
