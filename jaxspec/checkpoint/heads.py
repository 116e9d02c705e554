"""Opening a folder of speculative heads: a checkpoint folder whose config names a ``method``."""

from pathlib import Path

from jaxspec.checkpoint.folder import Checkpoint, agreed, read_head
from jaxspec.errors import UserError
from jaxspec.model.heads.config import HeadsConfig, heads_config_from_json
from jaxspec.model.heads.params import heads_param_specs


def open_heads(path: str | Path) -> Checkpoint[HeadsConfig]:
    """Opens converted heads and checks that their parts agree. No weight is read.

    The manifest's tokenizer fingerprint is the target's; None where they were converted without one. Raises UserError
    naming everything that is missing, unknown or contradictory.
    """
    path, data, manifest = read_head(path)
    if "method" not in data:
        raise UserError(f"{path}: expected heads (a method in config.json), found a model")
    config = heads_config_from_json(data)
    return agreed(path, config, heads_param_specs(config), manifest)
