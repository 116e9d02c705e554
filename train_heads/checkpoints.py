"""A run's state on disk: saved beside the work, the best and the last ones kept, and taken up again to the last bit."""

from pathlib import Path
from typing import Any, Final

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from train_heads.step import TrainState

FOLDER: Final = "checkpoints"
METRIC: Final = "loss"  # held out; the training loss where nothing is held out


class Checkpoints:
    """Orbax's manager over ``run/checkpoints``. A half-written checkpoint is none: it is renamed when it is whole."""

    def __init__(self, run: Path, keep: int) -> None:
        self._manager = ocp.CheckpointManager(
            (run / FOLDER).absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(
                    [
                        policies.LatestN(n=keep),
                        policies.BestN(
                            get_metric_fn=lambda metrics: metrics[METRIC],
                            n=1,
                            reverse=True,
                            keep_checkpoints_without_metrics=False,
                        ),
                    ]
                ),
                best_fn=lambda metrics: metrics[METRIC],
                best_mode="min",
                cleanup_tmp_directories=True,
                enable_async_checkpointing=True,
            ),
        )

    @property
    def steps(self) -> list[int]:
        """What is there, ascending."""
        return sorted(self._manager.all_steps())

    @property
    def latest(self) -> int | None:
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        return self._manager.best_step()

    def save(self, step: int, state: TrainState, metric: float) -> None:
        """Copies the state off the devices and writes it in the background; a step that is there already stays."""
        if step not in self.steps:
            self._manager.save(step, args=ocp.args.StandardSave(_tree(state)), metrics={METRIC: metric}, force=True)

    def restore(self, step: int, like: TrainState) -> TrainState:
        """A state laid out as ``like``."""
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _tree(like))
        tree = self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        return TrainState(
            tree["step"], tree["trained"], jax.tree.unflatten(jax.tree.structure(like.moments), tree["moments"])
        )

    def wait(self) -> None:
        """What was begun is whole on disk afterwards."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and lets go of the threads."""
        self._manager.wait_until_finished()
        self._manager.close()


def _tree(state: TrainState) -> dict[str, Any]:
    """Optimiser states nest records without arrays in them; a plain list of leaves keeps every format out of it."""
    return {"step": state.step, "trained": state.trained, "moments": jax.tree.leaves(state.moments)}
