"""What a training run keeps of the speed of its bare step: rows, features from disk, optimiser, log and all."""

import gzip
import io
import tempfile
import time
from pathlib import Path
from typing import Any, Final, cast

import jax

from scripts.bench.serving import ROOT
from scripts.bench.timing import interleaved, ratio
from train_heads.config import OPTIONS, DataConfig, Kind, OptimConfig, RunConfig
from train_heads.corpus import Batch
from train_heads.job import make_job
from train_heads.loop import Run
from train_heads.objective import Features, Params
from train_heads.packing import Rows
from train_heads.progress import Progress

ANSWERS: Final = ROOT / "assets" / "smollm2-135m" / "answers.jsonl.gz"
DOCUMENTS: Final = 32
ROWS: Final = 4
STEPS: Final = 4  # of a round


def training_share(target: Path, kind: Kind, dtype: str, rounds: int) -> dict[str, Any]:
    """Tokens per second of a run over those of forward and backward alone, on rows whose features are kept."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "answers.jsonl"
        with gzip.open(ANSWERS, "rt", encoding="utf-8") as file:
            data.write_text("".join(line for line, _ in zip(file, range(DOCUMENTS), strict=False)))
        config = RunConfig(
            kind,
            str(target),
            str(data),
            folder,
            mesh="1",
            dtype=dtype,
            features="disk",
            batches=DataConfig(row=384, rows=ROWS),
            optim=OptimConfig(steps=1000, warmup=1),
            options=OPTIONS[kind](draft_vocab_size=8192),
        )
        run = Run(make_job(config), Path(folder), Progress(io.StringIO()))
        try:
            return _share(run, rounds)
        finally:
            run.close()


def _share(run: Run, rounds: int) -> dict[str, Any]:
    job, objective = run.job, run.job.objective

    def loss(trained: Params, fixed: Params, target: Params, rows: Rows, features: Features) -> jax.Array:
        return objective(trained, fixed, target, rows, features, jax.random.key(0)).loss.total

    bare = jax.jit(jax.grad(loss))
    given = jax.tree.map(lambda parts: parts[0], run.given(cast(Batch, run.batches[0])))

    def pass_(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            jax.block_until_ready(bare(run.state.trained, run.fixed, job.target, *given))
        return time.perf_counter() - start

    def steps(count: int) -> float:
        start = time.perf_counter()
        run.advance(run.step + count)
        return time.perf_counter() - start

    pass_(1)
    steps(2 * len(job.trained_on) // ROWS + 1)  # every row has been looked at, everything is compiled
    return ratio(*interleaved(rounds, lambda: pass_(STEPS), lambda: steps(STEPS)))
