"""``make test``: every area of the suite in a process of its own, as many at a time as there are cores.

One process for all would not do: XLA's CPU backend maps some 300 pieces of memory per executable, the suite compiles
hundreds, and Linux allows a process 65,530 maps. Arguments go to every pytest (``-k name``); the last line has the sum.
"""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTHING_SELECTED = 5  # pytest's exit status
# Those that take longest start first.
SLOW_FIRST = ("lossless", "drafters", "engine", "serve", "model", "train", "cli", "test_demo_model.py")


def areas() -> list[str]:
    """The folders of tests, and the files beside them one by one."""
    tests = ROOT / "tests"
    names = [path.name for path in tests.iterdir() if path.is_dir() and any(path.glob("test_*.py"))]
    names += [path.name for path in tests.glob("test_*.py")]
    return sorted(names, key=lambda name: (SLOW_FIRST.index(name) if name in SLOW_FIRST else len(SLOW_FIRST), name))


def run(area: str, arguments: list[str]) -> tuple[str, int, str, float]:
    """One area: its name, pytest's exit status and output, and the seconds it took."""
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", f"tests/{area}", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return area, done.returncode, done.stdout, time.monotonic() - start


def main() -> int:
    """Exit status 0 when every area passed and something ran."""
    counts: Counter[str] = Counter()
    failed, ran = [], 0
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        pending = [pool.submit(run, area, sys.argv[1:]) for area in areas()]
        for future in as_completed(pending):
            area, status, output, seconds = future.result()
            print(f"\n==== tests/{area}: {seconds:.0f} s, status {status}\n{output}", flush=True)
            closing = output.rstrip().rsplit("\n", 1)[-1]
            counts.update(
                {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", closing)}
            )
            ran += status != NOTHING_SELECTED
            if status not in (0, NOTHING_SELECTED):
                failed.append(f"tests/{area} (status {status})")
    broken = counts["failed"] + counts["error"] + counts["errors"]
    if failed:
        print(f"failed areas: {', '.join(failed)}")
        broken = max(broken, 1)  # a process that crashed has no closing line
    print(f"{counts['passed']} passed, {broken} failed, {counts['skipped']} skipped")
    return 0 if ran and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
