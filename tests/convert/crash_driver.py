"""Runs conversions in child processes that are killed, starved of disk, or measured; prints what it saw as JSON.

``python -m tests.convert.crash_driver kill|full|memory SRC DST``. Children are forked from one process that has done
the slow imports, so that a dozen of them cost seconds.
"""

import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from checkpoints_convert import convert
from checkpoints_convert.cli import main
from jaxspec.checkpoint import open_checkpoint
from jaxspec.errors import UserError

KILLS = 10


def start(action: Callable[[], int]) -> int:
    """Forks a child that does ``action`` and exits with its value; gives its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax warns of forks; nothing has used it yet
        process = os.fork()
    if process == 0:
        status = 99
        try:
            status = action()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return process


def finish(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def siblings(dst: Path) -> list[str]:
    return sorted(path.name for path in dst.parent.glob(f".{dst.name}.*"))


def loads(dst: Path) -> bool:
    try:
        open_checkpoint(dst)
    except UserError:
        return False
    return True


def digest(dst: Path) -> str:
    """Of every file of a checkpoint but Orbax's own bookkeeping, which has times and places in it."""
    digest = hashlib.sha256()
    bookkeeping = ("_CHECKPOINT_METADATA", "commit_success.txt")
    for path in sorted(path for path in dst.rglob("*") if path.is_file() and path.name not in bookkeeping):
        digest.update(str(path.relative_to(dst)).encode() + path.read_bytes())
    return digest.hexdigest()


def kill(src: Path, dst: Path) -> dict:
    """Kills conversions spread over the time that one takes from its first file on; each is then run again."""
    said = dst.with_name("resumed")

    def once() -> int:
        said.write_text(str(len(convert(src, dst).resumed)))
        return 0

    def clear() -> None:
        shutil.rmtree(dst, ignore_errors=True)
        for name in siblings(dst):
            shutil.rmtree(dst.parent / name)

    def wait_for_stage() -> None:
        while not siblings(dst) and not dst.exists():
            time.sleep(0.0005)

    process = start(once)
    wait_for_stage()
    began = time.monotonic()
    status = finish(process)
    took = time.monotonic() - began
    whole = digest(dst)
    seen = []
    for number in range(KILLS):
        clear()
        process = start(once)
        wait_for_stage()
        time.sleep(took * number / KILLS)
        os.kill(process, signal.SIGKILL)
        finish(process)
        killed = {"exists": dst.exists(), "loads": loads(dst), "left": len(siblings(dst))}
        if not dst.exists():
            killed["rerun"] = finish(start(once))
            killed["resumed"] = int(said.read_text())
        seen.append(killed | {"same": digest(dst) == whole, "left_at_last": siblings(dst)})
    return {"first": status, "killed": seen}


def full(src: Path, dst: Path) -> dict:
    """A disk that takes files of 1 kB (no tensor fits) and of 8 kB (every tensor does, the manifest does not)."""
    seen = []
    for limit in (1 << 10, 8 << 10):

        def convert(limit: int = limit) -> int:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            return main(["to-orbax", str(src), str(dst)])

        status = finish(start(convert))
        seen.append({"status": status, "exists": dst.exists(), "left": siblings(dst)})
    return {"starved": seen, "rerun": finish(start(lambda: main(["to-orbax", str(src), str(dst)]))), "ok": loads(dst)}


def peak_memory() -> int:
    """The kernel's mark for this program; getrusage's also counts what the process was before it became this."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) << 10


def memory(src: Path, dst: Path) -> dict:
    """Peak resident memory before and after a conversion, in bytes. A small conversion pays for the libraries first."""
    small, large = src / "small", src / "large"
    peaks = []
    for source in (small, large):
        if main(["to-orbax", str(source), str(dst / source.name)]):
            raise SystemExit(1)
        peaks.append(peak_memory())
    return {"before": peaks[0], "after": peaks[1]}


if __name__ == "__main__":
    # The kernel keeps the conversions' own output off stdout, which carries the JSON alone.
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump({"kill": kill, "full": full, "memory": memory}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3])), report)
    report.close()
