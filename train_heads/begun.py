"""Heads of an earlier run that another goes on from: more data, other steps, the same shapes and the same words."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint import open_any, read_stored, restore_params
from jaxspec.checkpoint.manifest import DRAFT_VOCAB
from jaxspec.engine.draft_vocab import read_list
from jaxspec.errors import UserError
from train_heads.config import Eagle3Options, RunConfig
from train_heads.draft import DraftObjective
from train_heads.objective import Objective, Params
from train_heads.words import Words


def words_of(config: RunConfig, vocab: int) -> Words:
    """The words that the heads of ``config.start_from`` learnt. UserError where the config asks for another number."""
    assert config.start_from is not None
    folder, size = Path(config.start_from), config.options.draft_vocab_size
    checkpoint = open_any(folder)
    ids: list[int] = []
    if isinstance(config.options, Eagle3Options):
        group = next((group for group, names in checkpoint.groups().items() if "target_ids" in names), None)
        if group is not None:
            ids = np.asarray(read_stored(checkpoint, group)["target_ids"]).tolist()
    else:
        ids = read_list(folder / DRAFT_VOCAB, None, vocab) or []
    if len(ids) != (0 if size in (None, vocab) else size):
        raise UserError(f"options.draft_vocab_size: expected {len(ids) or 'none'}, as {folder} has it, got {size}")
    return Words(vocab, tuple(sorted(ids)))


def started(config: RunConfig, objective: Objective, target: Params) -> tuple[Params, Params]:
    """(trained, fixed) parameters at the start of a run: the objective's own, or those of ``config.start_from``."""
    trained, fixed = objective.init(target, config.seed)
    if config.start_from is None:
        return trained, fixed
    checkpoint = open_any(config.start_from)
    definition = objective.draft if isinstance(objective, DraftObjective) else objective.heads  # pyright: ignore[reportAttributeAccessIssue]
    if checkpoint.config != definition.config:
        raise UserError(f"start_from: {config.start_from}: expected {definition.config}, found {checkpoint.config}")
    stored = restore_params(checkpoint, definition.shardings(), jnp.dtype("float32"))
    return {name: jax.device_put(stored[name], value.sharding) for name, value in trained.items()}, fixed
