"""What a run leaves behind besides parameters: JSON lines, TensorBoard events, and curves as a picture."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

LOG: Final = "log.jsonl"
CURVES: Final = "curves.png"


class Log:
    """One line per step and per evaluation. A resumed run cuts off what lies after the step it goes on from."""

    def __init__(self, folder: Path, step: int) -> None:
        from tensorboardX import SummaryWriter

        self._path = folder / LOG
        kept = [line for line in read(self._path) if line["step"] <= step]
        part = self._path.with_suffix(".partial")
        part.write_text("".join(json.dumps(line) + "\n" for line in kept))
        part.replace(self._path)  # a kill leaves the old log or the new one
        self._file = self._path.open("a")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1, max_queue=1000, flush_secs=30)

    def add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """``kind``: train, held_out or served."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        self._board.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; a last one that a kill left half-written is passed over."""
    if not path.is_file():
        return []
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def draw(folder: Path) -> Path:
    """The curves of a run's log, one panel each for the loss, the hits and what was served."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.use("Agg")
    lines = read(folder / LOG)
    figure = Figure(figsize=(13, 4), layout="constrained")
    loss, tops, served = figure.subplots(1, 3)
    for kind in ("train", "held_out"):
        own = [line for line in lines if line["kind"] == kind]
        loss.plot([line["step"] for line in own], [line["loss"] for line in own], label=kind)
    own = [line for line in lines if line["kind"] == "held_out"]
    for name in (name for name in (own[0] if own else {}) if name.endswith("/top1")):
        tops.plot([line["step"] for line in own], [line[name] for line in own], label=name)
    own = [line for line in lines if line["kind"] == "served"]
    for name in (name for name in (own[0] if own else {}) if name.startswith("tokens_per_target_pass")):
        served.plot([line["step"] for line in own], [line[name] for line in own], "o-", label=name)
    for panel, title in ((loss, "loss"), (tops, "held out: top-1"), (served, "served: tokens per target pass")):
        panel.set(title=title, xlabel="step")
        if panel.lines:
            panel.legend(fontsize="small")
    figure.savefig(folder / CURVES)
    return folder / CURVES
