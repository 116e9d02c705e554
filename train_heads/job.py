"""From a config and folders to everything that a run works with; what does not fit is refused here."""

import dataclasses
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint import Checkpoint, open_checkpoint, restore_params
from jaxspec.errors import UserError
from jaxspec.model.config import LlamaConfig
from jaxspec.model.heads.config import EagleConfig, HeadsConfig, MedusaConfig, resolved_aux_layers
from jaxspec.model.heads.definition import define_heads
from jaxspec.model.llama import ModelDef, define
from jaxspec.sharding import make_sharding
from jaxspec.text import Tokenizer
from train_heads.begun import words_of
from train_heads.config import DraftOptions, Eagle3Options, EagleOptions, MedusaOptions, RunConfig
from train_heads.corpus import Corpus, RowSource, row_source, split
from train_heads.draft import DraftObjective
from train_heads.eagle import Eagle3Objective, EagleObjective
from train_heads.medusa import MedusaObjective
from train_heads.objective import Objective, Params
from train_heads.words import Words

T = TypeVar("T")
HELD_OUT_ROWS = 32  # looked at in an evaluation, at most


class Job(NamedTuple):
    """The frozen target, what is trained on it, and on which rows."""

    config: RunConfig
    checkpoint: Checkpoint[LlamaConfig]
    tokenizer: Tokenizer | None
    target: Params
    objective: Objective
    trained_on: RowSource
    held_out: RowSource
    held_out_documents: list[int]
    corpus: Corpus

    @property
    def epochs(self) -> float:
        """How often a run sees each row."""
        return self.config.optim.steps * self.config.batches.rows / len(self.trained_on)


def make_job(config: RunConfig) -> Job:
    """Opens the target, builds the corpus, makes the objective. Raises UserError for whatever does not fit."""
    checkpoint = open_checkpoint(config.target)
    tokenizer = None if checkpoint.tokenizer_dir is None else Tokenizer.load(checkpoint.tokenizer_dir)
    vocab, row = checkpoint.config.vocab_size, config.batches.row
    if row > checkpoint.config.max_position_embeddings:
        limit = checkpoint.config.max_position_embeddings
        raise UserError(f"batches.row: expected at most {limit}, the target's positions, got {row}")
    corpus = _corpus(config, tokenizer, vocab)
    train, out = split(corpus, config.batches.held_out, config.batches.seed)
    trained_on, held_out = row_source(corpus, train, row), row_source(corpus, out, row)
    if not len(trained_on):
        raise UserError(f"{config.data}: expected documents to train on, got {len(corpus)}, all held out")
    dtype, sharding = jnp.dtype(config.dtype), make_sharding(config.mesh)
    parts = config.batches.rows // config.optim.accumulate
    if parts % sharding.mesh.shape["data"]:
        devices = sharding.mesh.shape["data"]
        raise UserError(f"batches.rows: expected parts of a multiple of {devices} rows (mesh axis data), got {parts}")
    # The target's pass is serving's own, to the dtype of its cache; what is trained has caches of the computation's.
    cache_dtype = jnp.dtype("float32") if jax.default_backend() == "cpu" else dtype
    model = define(checkpoint.config, sharding, dtype, cache_dtype)
    eos = set(checkpoint.config.eos_token_ids) | set(() if tokenizer is None else tokenizer.eos_ids)
    if config.start_from is None:
        words = Words.most_frequent(corpus.counts_V, config.options.draft_vocab_size, eos)
    else:
        words = words_of(config, vocab)
    objective = _objective(config, model, words)
    target = restore_params(checkpoint, model.shardings(), dtype)
    return Job(config, checkpoint, tokenizer, target, objective, trained_on, held_out, out, corpus)


def _corpus(config: RunConfig, tokenizer: Tokenizer | None, vocab: int) -> Corpus:
    """Built by the first process; the others open what it built."""
    folder = Path(config.out) / "corpus"
    if jax.process_count() == 1:
        return Corpus.open(folder, config.data, tokenizer, vocab, config.batches.row)
    from jax.experimental import multihost_utils

    if jax.process_index() == 0:
        Corpus.open(folder, config.data, tokenizer, vocab, config.batches.row)
    multihost_utils.sync_global_devices("corpus")
    return Corpus.open(folder, config.data, tokenizer, vocab, config.batches.row)


def _objective(config: RunConfig, model: ModelDef, words: Words) -> Objective:
    options = config.options
    match options:
        case MedusaOptions():
            if options.own_lm_head and not words.whole:
                raise UserError("options.draft_vocab_size: expected none with own_lm_head, whose rows are all ids")
            heads = define_heads(_heads_config(config, model, words), model.sharding, model.dtype)
            return MedusaObjective(model, heads, words, options.decay, "law" if options.learn_law else "token")
        case EagleOptions():
            heads = define_heads(_heads_config(config, model, words), model.sharding, model.dtype)
            return EagleObjective(model, heads, words, options.token_weight, options.noise)
        case Eagle3Options():
            heads = define_heads(_heads_config(config, model, words), model.sharding, model.dtype)
            return Eagle3Objective(model, heads, words, options.unroll, options.decay)
        case DraftOptions():
            layers = model.config.num_layers
            if not 1 <= options.layers <= layers:
                raise UserError(f"options.layers: expected 1 to {layers}, the target's layers, got {options.layers}")
            small = dataclasses.replace(model.config, num_layers=options.layers)
            return DraftObjective(model, define(small, model.sharding, model.dtype), words)


def _heads_config(config: RunConfig, model: ModelDef, words: Words) -> HeadsConfig:
    """The heads that the options ask for, as wide as the target. UserError for a target that is too shallow."""
    target, options = model.config, config.options
    if isinstance(options, MedusaOptions):
        return MedusaConfig(
            target.hidden_size, target.vocab_size, options.heads, options.layers, own_lm_head=options.own_lm_head
        )
    made = EagleConfig(
        method="eagle" if isinstance(options, EagleOptions) else "eagle3",
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_position_embeddings=target.max_position_embeddings,
        vocab_size=target.vocab_size,
        draft_vocab_size=words.size if isinstance(options, Eagle3Options) else target.vocab_size,
        fc_bias=isinstance(options, EagleOptions),
        own_embed=False,
        rope_scaling=target.rope_scaling if isinstance(options, Eagle3Options) else None,
    )
    if made.method == "eagle3":
        resolved_aux_layers(made, target.num_layers)  # a shallow target is refused now, not at the first step
    return made


def place(job: Job, tree: T, parts: bool) -> T:
    """Host arrays of a batch on the mesh, rows over its data axis; ``parts``: [A, B, ..] instead of [B, ..]."""
    sharding = job.objective.target.sharding

    def put(x: np.ndarray) -> jax.Array:
        axes = (*((None,) * parts), "batch", *((None,) * (x.ndim - parts - 1)))
        return jax.make_array_from_callback(x.shape, sharding.named(axes, x.shape), lambda index: x[index])

    return jax.tree.map(put, tree)
