"""How everything is timed and shown: things measured in turn within one run, as medians with their range."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxspec.engine.engine import Engine


def interleaved(repeats: int, *functions: Callable[[], float]) -> list[list[float]]:
    """Runs the functions in turn, ``repeats`` times; one list of results per function."""
    rounds = [[function() for function in functions] for _ in range(repeats)]
    return [list(results) for results in zip(*rounds, strict=True)]


def ratio(upper: list[float], lower: list[float]) -> dict[str, float]:
    """Median of the pairwise ratios, and their range."""
    ratios = sorted(u / v for u, v in zip(upper, lower, strict=True))
    return {"median": round(statistics.median(ratios), 3), "min": round(ratios[0], 3), "max": round(ratios[-1], 3)}


def seconds(function: Callable[[], Any]) -> float:
    """Wall time of one call that waits for its result."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def provenance(engine: Engine) -> dict[str, Any]:
    """Where the figures came from."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    packages = ("jaxspec", "jax", "jaxlib", "flax", "numpy")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "dtype": engine.model_info().dtype,
        "mesh": dict(engine.server_info().mesh),
    }


def table(console: Console, title: str, rows: dict[str, Any], goal: str) -> None:
    """One block of figures."""
    shown = Table(title=f"{title}   (goal: {goal})", title_justify="left")
    names = list(dict.fromkeys(name for figures in rows.values() for name in figures))
    for name in ("", *names):
        shown.add_column(name)
    for row, figures in rows.items():
        cells = [figures.get(name, "") for name in names]
        shown.add_row(row, *(_shown(cell) for cell in cells))
    console.print(shown)


def _shown(cell: Any) -> str:
    if not isinstance(cell, dict):
        return str(cell)
    # Where there are many columns: the median alone, beside what it took.
    return f"{cell['median']}, {cell['ms']} ms" if "ms" in cell else f"{cell['median']} ({cell['min']}..{cell['max']})"
