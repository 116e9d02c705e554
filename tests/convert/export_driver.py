"""Exports in child processes that are killed, starved of disk, or measured; prints what it saw as JSON.

``python -m tests.convert.export_driver kill|full|memory SRC DST``; see ``crash_driver``.
"""

import json
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

from checkpoints_convert.cli import main
from checkpoints_convert.engine import make_plan
from checkpoints_convert.readers import open_source
from jaxspec.errors import UserError
from tests.convert.crash_driver import KILLS, finish, peak_memory, siblings, start


def export(src: Path, dst: Path) -> int:
    return main(["to-hf", str(src), str(dst), "--shard-size", "8KB"])


def loads(dst: Path) -> bool:
    """Whether a conversion would take the folder: every tensor of the model is there, and nothing else."""
    try:
        make_plan(open_source(dst, "hf"), "keep")
    except UserError:
        return False
    return True


def kill(src: Path, dst: Path) -> dict:
    """Kills exports spread over the time that one takes from its first file on, then lets one finish."""
    process = start(lambda: export(src, dst))
    while not siblings(dst) and not dst.exists():
        time.sleep(0.0005)
    began = time.monotonic()
    status = finish(process)
    took = time.monotonic() - began
    seen = []
    for number in range(KILLS):
        shutil.rmtree(dst, ignore_errors=True)
        process = start(lambda: export(src, dst))
        before = siblings(dst)  # of the child before, until this one clears them
        while siblings(dst) in ([], before) and not dst.exists():
            time.sleep(0.0005)
        time.sleep(took * number / KILLS)
        os.kill(process, signal.SIGKILL)
        finish(process)
        seen.append({"exists": dst.exists(), "loads": loads(dst), "left": len(siblings(dst))})
    shutil.rmtree(dst, ignore_errors=True)
    rerun = finish(start(lambda: export(src, dst)))
    return {"first": status, "killed": seen, "rerun": rerun, "left": siblings(dst), "ok": loads(dst)}


def full(src: Path, dst: Path) -> dict:
    """A disk that takes files of 1 kB alone: no shard fits."""

    def starved() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, 1 << 10))
        return export(src, dst)

    status = finish(start(starved))
    seen = {"status": status, "exists": dst.exists(), "left": siblings(dst)}
    return seen | {"rerun": finish(start(lambda: export(src, dst))), "ok": loads(dst)}


def memory(src: Path, dst: Path) -> dict:
    """Peak resident memory before and after an export, in bytes. A small export pays for the libraries first."""
    peaks = []
    for name in ("small", "large"):
        if main(["to-hf", str(src / name), str(dst / name)]):
            raise SystemExit(1)
        peaks.append(peak_memory())
    return {"before": peaks[0], "after": peaks[1]}


if __name__ == "__main__":
    # The kernel keeps the exports' own output off stdout, which carries the JSON alone.
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump({"kill": kill, "full": full, "memory": memory}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3])), report)
    report.close()
