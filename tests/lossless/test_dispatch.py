"""One dispatch and one host transfer per decode step, whatever drafts."""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from jaxspec.speculate.state import StepReport
from tests.lossless.cases import Case, SmallRig
from tests.lossless.test_rounds import every_drafter
from tests.lossless.texts import sampled_jobs

STEP = "decode step of the test"
DISPATCH = "ExecuteHelper"  # in the name that XLA's profile gives to a call of an executable


class Counted:
    """An array of a report that counts how often it is read."""

    def __init__(self, array: jax.Array, reads: list[int]) -> None:
        self._array, self._reads = array, reads

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self._reads.append(1)
        return np.asarray(self._array)


def spans(folder: Path) -> Iterator[tuple[str, float, float]]:
    """Name, start and end of everything in a profile."""
    (file,) = folder.rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                yield event.name, event.start_ns, event.start_ns + event.duration_ns


@every_drafter
def test_a_step_is_one_dispatch_and_one_transfer(case: Case, rig: SmallRig, tmp_path: Path, monkeypatch):
    """Dispatches are counted in XLA's own profile, reads at the report: its other arrays cannot be read at all."""
    reads: list[int] = []
    programs, batch = rig.engine.programs, rig.engine._loop.batch
    step, whole = programs.step, batch.step

    def reported(*arguments):
        state, report = step(*arguments)
        return state, StepReport(Counted(report.packed, reads), None)  # pyright: ignore

    def annotated(*arguments):
        with jax.profiler.TraceAnnotation(STEP):
            return whole(*arguments)

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with monkeypatch.context() as patch:
        patch.setattr(programs, "step", reported)
        patch.setattr(batch, "step", annotated)
        with jax.profiler.trace(str(tmp_path), profiler_options=options):
            rig.run_all(sampled_jobs("t1")[:9])
            rig.run(*sampled_jobs("t1")[0])
    found = list(spans(tmp_path))
    steps = [(start, end) for name, start, end in found if name == STEP]
    dispatches = [start for name, start, _ in found if DISPATCH in name]
    assert len(steps) > 30
    assert [sum(start <= at <= end for at in dispatches) for start, end in steps] == [1] * len(steps)
    assert len(reads) == len(steps)
