"""From speculation options to a drafter with its parameters: a draft model or heads must fit their target."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint import Checkpoint, heads_misfits, open_checkpoint, open_heads, restore_params
from jaxspec.engine.draft_vocab import trim_heads, trim_vocab, wanted_size
from jaxspec.engine.params import HEADS_METHODS, SpeculationConfig
from jaxspec.errors import UserError
from jaxspec.model.config import LlamaConfig
from jaxspec.model.heads.config import EagleConfig, HeadsConfig, MedusaConfig, resolved_aux_layers
from jaxspec.model.heads.definition import define_heads
from jaxspec.model.llama import ModelDef, define
from jaxspec.shapes import GAMMA_BUCKETS, GAMMA_MAX
from jaxspec.speculate.drafters import Drafter
from jaxspec.speculate.drafters.chain import Sample
from jaxspec.speculate.drafters.eagle import EagleDrafter
from jaxspec.speculate.drafters.hybrid import HybridDrafter
from jaxspec.speculate.drafters.linear import LinearDrafter
from jaxspec.speculate.drafters.lookahead import LookaheadDrafter
from jaxspec.speculate.drafters.medusa import MedusaDrafter
from jaxspec.speculate.drafters.ngram import NgramDrafter
from jaxspec.speculate.drafters.none import NoDrafter
from jaxspec.speculate.growth import DynamicTree
from jaxspec.speculate.tree import StaticTree, default_tree, parse_tree_choices

# Where drafts cost nothing, three rows take as long as five: a bucket of its own would not pay.
LOOKUP_BUCKETS: Final = (0, 4, 8)
# Levels of a dynamic tree when the user names none; deeper ones are rarely reached.
TREE_DEPTH: Final = 5


class Target(NamedTuple):
    """What drafters are made for."""

    checkpoint: Checkpoint[LlamaConfig]
    model: ModelDef
    valid_vocab: int


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A drafter and how it is run. ``context``: tokens that it can follow. ``gammas``: depths compiled for it.

    ``trim``: from its own parameters and the target's to those it runs on; None: its own as they are.
    """

    drafter: Drafter
    own_params: dict[str, jax.Array]
    context: int
    gammas: tuple[int, ...]
    notes: tuple[str, ...] = ()
    trim: Callable[[Mapping[str, jax.Array], Mapping[str, jax.Array]], dict[str, jax.Array]] | None = None

    def params(self, target: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """What the drafter runs on, beside a target with these parameters."""
        return self.own_params if self.trim is None else self.trim(self.own_params, target)


def make_drafting(
    speculation: SpeculationConfig, target: Target, draft: str | Path | None, heads: str | Path | None, max_len: int
) -> Drafting:
    """The drafter that the method names. Raises UserError for folders that it lacks or that do not fit the target.

    ``draft`` and ``heads`` stand before the folders that ``speculation`` names.
    """
    draft = draft if draft is not None else speculation.model
    heads = heads if heads is not None else speculation.heads
    method = speculation.method
    if method == "hybrid" and draft is not None and heads is not None:
        raise UserError("method hybrid: expected a draft checkpoint or heads, got both")
    if method in HEADS_METHODS and heads is None:
        draft, heads = None, draft
    notes = []
    if draft is not None and method not in ("draft_model", "hybrid"):
        notes.append(f"draft {draft}: ignored by method {method}")
    if heads is not None and method not in (*HEADS_METHODS, "hybrid"):
        notes.append(f"heads {heads}: ignored by method {method}")
    if not (speculation.takes_draft or speculation.takes_heads) and method != "hybrid":
        unused = ("draft_vocab_size", "draft_sample_method")
        notes += [f"{name}: ignored by method {method}" for name in unused if getattr(speculation, name) is not None]
    if method == "draft_model":
        if draft is None:
            raise UserError("draft: method draft_model needs a draft checkpoint, got none")
        made = _draft_model(speculation, target, draft, max_len)
    elif method in HEADS_METHODS:
        if heads is None:
            raise UserError(f"heads: method {method} needs a folder of heads, got none")
        made = _heads(speculation, target, heads, max_len)
    elif method == "hybrid":
        made = _hybrid(speculation, target, draft, heads, max_len)
    else:
        made = _without_model(speculation, target)
    if speculation.tree_choices is not None and not _has_drafter(made.drafter, MedusaDrafter):
        notes.append("tree_choices: ignored without medusa heads")
    return dataclasses.replace(made, notes=(*notes, *made.notes))


def _has_drafter(drafter: Drafter, kind: type) -> bool:
    return isinstance(drafter.model if isinstance(drafter, HybridDrafter) else drafter, kind)


def _hybrid(
    speculation: SpeculationConfig,
    target: Target,
    draft: str | Path | None,
    heads: str | Path | None,
    max_len: int,
) -> Drafting:
    """A model drafter with a lookup before it."""
    if draft is not None:
        made = _draft_model(speculation, target, draft, max_len)
    elif heads is not None:
        made = _heads(speculation, target, heads, max_len)
    else:
        raise UserError("method hybrid: needs a draft checkpoint or a folder of heads, got none")
    drafter = made.drafter
    if isinstance(drafter, LinearDrafter):
        # After a round of copies the model catches up in its own first pass.
        drafter = dataclasses.replace(drafter, recent=GAMMA_MAX + 2)
    # Copies go as deep as is asked, whatever the depth of the model's tree.
    gammas = tuple(sorted({*made.gammas, GAMMA_MAX}))
    return dataclasses.replace(
        made, drafter=HybridDrafter(NgramDrafter(speculation.prompt_lookup_max), drafter), gammas=gammas
    )


def _without_model(speculation: SpeculationConfig, target: Target) -> Drafting:
    context = target.checkpoint.config.max_position_embeddings
    match speculation.method:
        case "none":
            return Drafting(NoDrafter(), {}, context, (0,))
        case "ngram":
            return Drafting(NgramDrafter(speculation.prompt_lookup_max), {}, context, LOOKUP_BUCKETS)
        case "lookahead":
            drafter = LookaheadDrafter(
                speculation.lookahead_window, speculation.lookahead_ngram, speculation.lookahead_candidates
            )
            # The window moves whatever a row drafts: one width, in which shallower rows leave drafts unused.
            return Drafting(drafter, {}, context, (0, drafter.levels))
        case method:
            raise UserError(f"method: cannot make a drafter for {method!r}")


# ---- a smaller model -------------------------------------------------------------------------------------------------


def _draft_model(speculation: SpeculationConfig, target: Target, folder: str | Path, max_len: int) -> Drafting:
    draft = open_checkpoint(folder, beside_target=True)
    check_pair(target.checkpoint, draft)
    model = define(draft.config, target.model.sharding, target.model.dtype, target.model.cache_dtype)
    params = restore_params(draft, model.shardings(), target.model.dtype)
    vocab = target.checkpoint.config.vocab_size
    drafter = LinearDrafter(model, vocab, target.valid_vocab, sample=_sample(speculation, "probabilistic"))
    trim = None
    words = wanted_size(speculation.draft_vocab_size, draft.path, min(draft.config.vocab_size, target.valid_vocab))
    if words is not None:
        drafter, trim = trim_vocab(drafter, draft.path, words)
    limit = draft.config.max_position_embeddings
    notes = _short_context(f"draft {folder}", limit, max_len)
    complete = partial(_with_shared, draft.manifest.shared, trim)
    return Drafting(drafter, params, limit, GAMMA_BUCKETS, notes, complete)


def _with_shared(
    shared: tuple[str, ...],
    trim: Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]] | None,
    own: Mapping[str, jax.Array],
    target: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """A draft's parameters with those that are its target's own: the same arrays, not copies."""
    whole = {**own, **{name: target[name] for name in shared}}
    return whole if trim is None else trim(whole)


def _short_context(what: str, limit: int, max_len: int) -> tuple[str, ...]:
    if limit >= max_len:
        return ()
    return (f"{what}: trained for {limit} positions, past them rows decode without it",)


def check_pair(target: Checkpoint[Any], draft: Checkpoint[Any]) -> None:
    """A draft must speak the target's very tokens. Raises UserError with both sides."""
    ours, theirs = target.manifest, draft.manifest
    if ours.tokenizer_fingerprint != theirs.tokenizer_fingerprint:
        raise UserError(
            f"draft {draft.path}: its tokenizer differs from the target's: expected fingerprint "
            f"{ours.tokenizer_fingerprint}, got {theirs.tokenizer_fingerprint}"
        )
    if (ours.family, ours.model_version) != (theirs.family, theirs.model_version):
        raise UserError(
            f"draft {draft.path}: expected family {ours.family} {ours.model_version} as the target, "
            f"got {theirs.family} {theirs.model_version}"
        )
    for name in theirs.shared:
        wanted, given = draft.specs[name].shape, target.specs[name].shape if name in target.specs else None
        if wanted != given:
            raise UserError(
                f"draft {draft.path}: takes {name} from its target: expected shape {list(wanted)}, "
                f"got {'none' if given is None else list(given)}"
            )
    if ours.tokenizer_fingerprint is None and target.config.vocab_size != draft.config.vocab_size:
        raise UserError(
            f"draft {draft.path}: without tokenizers the vocabularies must agree: expected "
            f"{target.config.vocab_size} ids, got {draft.config.vocab_size}"
        )


# ---- heads -----------------------------------------------------------------------------------------------------------


def _heads(speculation: SpeculationConfig, target: Target, folder: str | Path, max_len: int) -> Drafting:
    heads = open_heads(folder)
    # A hybrid takes heads of any method.
    method = heads.config.method if speculation.method == "hybrid" else speculation.method
    check_heads(target.checkpoint, heads, method)
    config, model = heads.config, target.model
    definition = define_heads(config, model.sharding, model.dtype, model.cache_dtype)
    # Ids of a reduced vocabulary stay integers.
    params = restore_params(heads, definition.shardings(), jnp.dtype(model.dtype))
    trim = None
    own_ids = np.asarray(params["target_ids"]).tolist() if "target_ids" in params else None
    words = speculation.draft_vocab_size
    if own_ids is None:
        words = wanted_size(words, heads.path, target.valid_vocab)
    if words is not None:
        trimmed = trim_heads(config, own_ids, heads.path, words, target.valid_vocab)
        if trimmed is not None:
            config, trim = trimmed.config, partial(trimmed.params, model=model)
            definition = define_heads(config, model.sharding, model.dtype, model.cache_dtype)
    if isinstance(config, MedusaConfig):
        tree, sample = _medusa_tree(speculation, config), _sample(speculation, "probabilistic")
        drafter, gammas = MedusaDrafter(definition, tree, target.valid_vocab, sample), (0, tree.depth)
        context, notes = target.checkpoint.config.max_position_embeddings, ()
    else:
        tree = _eagle_tree(speculation, config)
        levels = resolved_aux_layers(config, model.config.num_layers) if config.method == "eagle3" else ()
        sample = _sample(speculation, "probabilistic" if tree is None else "greedy")
        if tree is not None and sample != "greedy":
            raise UserError(
                "draft_sample_method: expected greedy, because EAGLE's tree keeps its likeliest nodes and drawn ones "
                "would bias the law (tree_topk=1 is a chain, which can be drawn), got probabilistic"
            )
        drafter = EagleDrafter(definition, tree, levels, target.valid_vocab, sample)
        # A tree has one size: a row that drafts fewer levels leaves the lower ones unused.
        gammas = GAMMA_BUCKETS if tree is None else (0, tree.depth)
        context = config.max_position_embeddings
        notes = _short_context(f"heads {folder}", context, max_len)
    if heads.manifest.tokenizer_fingerprint is None and target.checkpoint.manifest.tokenizer_fingerprint is not None:
        notes = (*notes, f"heads {folder}: converted without a target: whether they know its tokenizer is not known")
    return Drafting(drafter, params, context, gammas, notes, trim)


def _sample(speculation: SpeculationConfig, default: Sample) -> Sample:
    return default if speculation.draft_sample_method is None else cast(Sample, speculation.draft_sample_method)


def check_heads(target: Checkpoint[LlamaConfig], heads: Checkpoint[HeadsConfig], method: str) -> None:
    """Heads must be those of the method and sit on the target. Raises UserError with both sides of all that differs."""
    if heads.config.method != method:
        raise UserError(f"heads {heads.path}: expected heads for method {method}, got heads for {heads.config.method}")
    lines = heads_misfits(heads.config, heads.manifest, target)
    if lines:
        raise UserError(f"heads {heads.path}: {'; '.join(lines)}")


def _medusa_tree(speculation: SpeculationConfig, config: MedusaConfig) -> StaticTree:
    if speculation.tree_choices is None:
        return default_tree(min(config.num_heads, speculation.num_speculative_tokens or GAMMA_MAX))
    tree = parse_tree_choices(speculation.tree_choices)
    if tree.depth > config.num_heads:
        raise UserError(f"tree_choices: expected at most {config.num_heads} levels, one per head, got {tree.depth}")
    widest = max(tree.ranks) + 1
    if widest > config.vocab_size:
        raise UserError(f"tree_choices: expected ranks below the vocabulary, {config.vocab_size}, got {widest - 1}")
    return tree


def _eagle_tree(speculation: SpeculationConfig, config: EagleConfig) -> DynamicTree | None:
    """None for a chain."""
    if speculation.tree_topk == 1:
        return None
    if speculation.tree_topk > config.draft_vocab_size:
        limit = config.draft_vocab_size
        raise UserError(f"tree_topk: expected at most {limit}, the draft's vocabulary, got {speculation.tree_topk}")
    depth = speculation.tree_depth or min(speculation.num_speculative_tokens or GAMMA_MAX, TREE_DEPTH)
    return DynamicTree(speculation.tree_topk, depth, speculation.tree_nodes)
