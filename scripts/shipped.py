"""What the repository ships for the demo model, for the scripts that draft with it."""

from pathlib import Path
from typing import Final

from jaxspec.checkpoint import heads_misfits, open_checkpoint, open_heads
from jaxspec.engine.params import HEADS_METHODS

ASSETS: Final = Path(__file__).resolve().parent.parent / "assets" / "smollm2-135m"
# A small tree: on a CPU every drafted level and every node costs.
TREE: Final = {"tree_nodes": 8, "tree_topk": 4, "tree_depth": 4}


def shipped_heads(target: Path) -> dict[str, Path]:
    """The shipped heads that fit this target, by method."""
    checkpoint = open_checkpoint(target)
    opened = [open_heads(ASSETS / method) for method in HEADS_METHODS if (ASSETS / method).is_dir()]
    fitting = [heads for heads in opened if not heads_misfits(heads.config, heads.manifest, checkpoint)]
    return {heads.config.method: heads.path for heads in fitting}
