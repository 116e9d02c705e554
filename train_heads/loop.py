"""A training run: from its last checkpoint to its last step, then a folder of heads and what it gives in serving."""

import dataclasses
import io
import json
import time
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import jax
import numpy as np

from jaxspec.errors import EngineFault, UserError
from train_heads import corpus, logs
from train_heads.begun import started
from train_heads.checkpoints import Checkpoints
from train_heads.config import RunConfig
from train_heads.corpus import Batch
from train_heads.export import export
from train_heads.features import FeatureFile, Size, kept
from train_heads.job import HELD_OUT_ROWS, Job, make_job, place
from train_heads.objective import Features
from train_heads.progress import Progress
from train_heads.served import serve
from train_heads.step import Taken, make_look, make_measure, make_step, mean, optimizer, start

CONFIG: Final = "config.json"
HEADS: Final = "heads"
# What may differ between a run and its continuation.
MAY_CHANGE: Final = ("out", "data", "save_every", "evaluate_every", "keep", "features", "serve")


class Result(NamedTuple):
    """What a run came to."""

    heads: Path
    step: int  # whose parameters were exported: the best on what is held out
    loss: float
    tokens_per_s: float  # trained on, over the steps of this process


def run(config: RunConfig, progress: Progress | None = None) -> Result:
    """Trains, or goes on where a killed run of the same config stopped. Raises UserError, EngineFault."""
    folder = Path(config.out)
    if progress is None:
        progress = Progress() if jax.process_index() == 0 else Progress(io.StringIO())
    _same_run(folder, config)
    job = make_job(config)
    run = Run(job, folder, progress)
    try:
        return run.to_the_end()
    finally:
        run.close()
        progress.close()


def _same_run(folder: Path, config: RunConfig) -> None:
    """Keeps the config beside the run. UserError when another run is there."""
    path = folder / CONFIG
    if path.is_file():
        before = json.loads(path.read_text())
        now = json.loads(json.dumps(config.to_json()))
        differing = [key for key in now if key not in MAY_CHANGE and now[key] != before.get(key)]
        if differing:
            raise UserError(f"{folder}: holds a run with another {', '.join(differing)}; give another --out")
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config.to_json(), indent=1) + "\n")


class Run:
    """The state of a run between its steps."""

    def __init__(self, job: Job, folder: Path, progress: Progress) -> None:
        self.job, self.folder, self.progress = job, folder, progress
        config, objective = job.config, job.objective
        sharding = objective.target.sharding
        trained, self.fixed = started(config, objective, job.target)
        self.state = start(optimizer(config.optim), trained, sharding)
        self.checkpoints = Checkpoints(folder, config.keep)
        latest = self.checkpoints.latest
        if latest is not None:
            self.state = self.checkpoints.restore(latest, self.state)
        self.step = latest or 0
        self.log = logs.Log(folder, self.step) if jax.process_index() == 0 else None
        self._take = make_step(objective, config.optim, sharding, config.seed, self.state)
        self._measure, self._look = make_measure(objective), make_look(objective)
        self.batches = corpus.batches(job.trained_on, config.batches.rows, config.batches.seed)
        self._files = _feature_files(job, folder)
        self._tokens, self._seconds = 0, 0.0

    # ---- steps ---------------------------------------------------------------------------------------------------

    def to_the_end(self) -> Result:
        """All steps that are left, with evaluations and checkpoints between them, and the export."""
        config = self.job.config
        if self.step == 0:
            self._serve_first()
        while self.step < config.optim.steps:
            stops = [self.step + every - self.step % every for every in (config.evaluate_every, config.save_every)]
            self.advance(min(*stops, config.optim.steps))
            self._keep(self.step == config.optim.steps)
        return self._finish()

    def advance(self, until: int) -> None:
        """Takes the steps up to ``until``. EngineFault names one that gave no number."""
        began = time.monotonic()
        behind: list[tuple[int, Batch, Taken]] = []
        while self.step < until:
            batch = cast(Batch, self.batches[self.step])
            self.state, taken = self._take(self.state, self.fixed, self.job.target, *self.given(batch))
            self.step += 1
            # Looked at one step late, so that the devices never wait for the host.
            for each in behind:
                self._report(*each)
            behind = [(self.step, batch, taken)]
        for each in behind:
            self._report(*each)
        self._seconds += time.monotonic() - began

    def given(self, batch: Batch) -> tuple[Any, ...]:
        """What a step is given: rows [A, B, T] on the mesh, and features where they are kept."""
        config = self.job.config
        parts = config.optim.accumulate
        rows = place(self.job, _cut(batch.rows, parts), True)
        if self._files is None:
            return (rows,)
        features = self._features("train", batch, config.batches.rows)
        return rows, place(self.job, _cut(features, parts), True)

    def _features(self, part: str, batch: Batch, rows: int) -> Features:
        """Of rows [B, T], from disk."""
        assert self._files is not None
        return self._files[part].get(
            batch, rows, lambda: self._look(self.job.target, place(self.job, batch.rows, False))
        )

    def _report(self, step: int, batch: Batch, taken: Taken) -> None:
        """Logs a step. EngineFault names one that gave no number; the state is as before it."""
        taken = jax.device_get(taken)
        if not bool(taken.finite):
            documents = [self.job.trained_on.plans[number] for number in batch.numbers]
            raise EngineFault(
                f"step {step}: loss {float(taken.loss)}, gradient norm {float(taken.norm)}: expected finite numbers; "
                f"rows {list(batch.numbers)} with documents {documents}; checkpoint {self.checkpoints.latest} stays"
            )
        self._tokens += int((batch.rows.segments_BT > 0).sum())
        values = {"loss": float(taken.loss), "norm": float(taken.norm), "rate": float(taken.rate)}
        values |= {name: float(value) for name, value in taken.shown.items()}
        if self.log is not None:
            self.log.add("train", step, values)
        tops = [f"{value:.3f}" for name, value in values.items() if name.endswith("/top1")]
        self.progress.show(
            f"step {step} of {self.job.config.optim.steps}, loss {values['loss']:.4f}, top-1 {' '.join(tops)}",
            last=step == self.job.config.optim.steps,
        )

    # ---- between steps -------------------------------------------------------------------------------------------

    def _keep(self, last: bool) -> None:
        """Evaluates and saves where the config says so, in optimiser steps."""
        config = self.job.config
        values = self.evaluate()
        if self.log is not None and (last or self.step % config.evaluate_every == 0):
            self.log.add("held_out", self.step, values)
        if last or self.step % config.save_every == 0:
            self.checkpoints.save(self.step, self.state, values["loss"])

    def evaluate(self) -> dict[str, float]:
        """The loss and hits on rows that are held out; on the first trained rows where none are."""
        job, rows = self.job, self.job.config.batches.rows
        part, source = ("held_out", job.held_out) if len(job.held_out) else ("train", job.trained_on)
        found = []
        for numbers in corpus.in_order(source, rows, HELD_OUT_ROWS):
            batch = corpus.padded(source, numbers, rows)
            placed = place(job, batch.rows, False)
            if self._files is None:
                features = self._look(job.target, placed)
            else:
                features = place(job, self._features(part, batch, rows), False)
            found.append(self._measure(self.state.trained, self.fixed, job.target, placed, features))
        return mean(found)

    def _serve_first(self) -> None:
        """What untrained heads give: the figure that all others are to be read against."""
        values = self.evaluate()
        if self.log is not None:
            self.log.add("held_out", 0, values)
        self._serve(export(self.job, self.state.trained, self.fixed, self.folder / "untrained", "float32"), 0)

    def _serve(self, heads: Path, step: int) -> None:
        if not self.job.config.serve or not self.job.held_out_documents or jax.process_count() > 1:
            return
        served = serve(self.job, heads, self.state.trained, self.fixed)
        if served is None:
            self.progress.show("nothing served: no held-out prompt leaves room for an answer", last=True)
            return
        if self.log is not None:
            self.log.add("served", step, served.as_dict())
        self.progress.show(
            f"served at step {step}: {served.tokens_per_target_pass:.2f} tokens per target pass greedy, "
            f"{served.tokens_per_target_pass_sampled:.2f} at temperature 1; accepted {served.accepted} drafts, "
            f"training foresaw {served.foreseen}",
            last=True,
        )
        if not served.agrees:
            raise EngineFault(
                f"serving accepted {served.accepted} drafts where training foresaw {served.foreseen}: the two do not "
                "compute the same"
            )

    def _finish(self) -> Result:
        """Exports the best checkpoint's parameters and measures them in serving."""
        self.checkpoints.wait()
        best = self.checkpoints.best or self.step
        if best != self.step:
            self.state = self.checkpoints.restore(best, self.state)
        loss = self.evaluate()["loss"]
        heads = export(self.job, self.state.trained, self.fixed, self.folder / HEADS, "float32")
        self._serve(heads, best)
        if jax.process_index() == 0:
            logs.draw(self.folder)
        return Result(heads, best, loss, self._tokens / self._seconds if self._seconds else 0.0)

    def close(self) -> None:
        self.checkpoints.close()
        if self.log is not None:
            self.log.close()


def _cut(tree: Any, parts: int) -> Any:
    """[B, ..] to [A, B / A, ..]."""
    return jax.tree.map(lambda x: np.reshape(x, (parts, x.shape[0] // parts, *x.shape[1:])), tree)


def _feature_files(job: Job, folder: Path) -> dict[str, FeatureFile] | None:
    """One file for what is trained on and one for what is held out; None where features are computed anew."""
    config, model = job.config, job.objective.target
    if jax.process_count() > 1:
        if config.features == "disk":
            raise UserError("features: expected recompute with several processes, got disk")
        return None
    hidden = model.config.hidden_size
    size = Size(len(job.trained_on), config.batches.row, hidden * (1 + len(job.objective.taps)), np.dtype(model.dtype))
    if not kept(config.features, size, job.epochs, folder):
        return None
    held_out = dataclasses.replace(size, rows=len(job.held_out))
    return {
        "train": FeatureFile(folder / "features", "train", size, hidden),
        "held_out": FeatureFile(folder / "features", "held_out", held_out, hidden),
    }
