"""How tokens are drafted: one file per drafter, one protocol of pure functions over an opaque state."""

from typing import Any, Literal, NamedTuple, Protocol

import jax

from jaxspec.model.llama import Llama
from jaxspec.speculate.noise import Draws
from jaxspec.speculate.state import Context
from jaxspec.speculate.topology import Topology
from jaxspec.speculate.window import Shown, Window

Features = Literal["hidden"] | tuple[int, ...] | None


class Proposal(NamedTuple):
    """Drafted tokens of one round.

    ``q_BJV``: the final laws that they were drawn from; None: not drawn at all. ``topology``: None for a chain.
    ``levels_B``: int32, how deep each row's drafts go; None: as deep as was asked. ``law_BJ``: int32, which of
    ``q_BJV`` draft j was drawn from, where drafts share laws; None: one law per draft. ``window``: nodes to be fed
    beside a tree, in the rows that draft.
    """

    tokens_BJ: jax.Array
    q_BJV: jax.Array | None = None
    topology: Topology | None = None
    levels_B: jax.Array | None = None
    law_BJ: jax.Array | None = None
    window: Window | None = None


class Seen(NamedTuple):
    """What the target showed of a round, to a drafter that wants features or has a window.

    ``features_BTX`` [B, D + 1, X]: row i is that of the accepted node at depth i, the root first; rows past
    ``n_accepted_B`` mean nothing. None for a drafter without features. ``window``: None where none was proposed.
    """

    n_accepted_B: jax.Array
    features_BTX: jax.Array | None
    window: Shown | None = None


class Drafter(Protocol):
    """Pure functions; ``params`` is the drafter's flat parameter dict (empty for lookups), ``target`` the model."""

    @property
    def has_cache(self) -> bool:
        """Whether committed tokens must be fed to it (``prefill``) before it can draft."""
        ...

    @property
    def is_lookup(self) -> bool:
        """Whether drafts cost nothing but the wider pass; then a row whose drafts keep failing rests."""
        ...

    @property
    def features(self) -> Features:
        """What it wants to see of the target's passes.

        ``hidden``: the hidden state after the final norm, X = D. Layer numbers: the residual stream entering those
        layers, side by side. None: nothing; then ``observe`` is never called.
        """
        ...

    def drafts(self, gamma: int) -> int:
        """J, nodes that ``propose`` gives when asked for ``gamma`` levels; 0 for 0."""
        ...

    def window(self, gamma: int) -> int:
        """X, nodes that such a proposal has fed beside the drafts; 0 for 0."""
        ...

    def init(self, rows: int, slots: int) -> Any:
        """The state of empty rows, every array led by the row axis."""
        ...

    def axes(self, state: Any) -> Any:
        """Logical axis names of every array of ``init``'s result, in the same structure."""
        ...

    def prefill(self, params: Any, state: Any, context: Context, start: jax.Array, chunk: int) -> Any:
        """Takes in committed tokens start..start+chunk-1."""
        ...

    def observe(
        self,
        params: Any,
        target: Llama,
        state: Any,
        context: Context,
        features_BTX: jax.Array,
        start: jax.Array,
        chunk: int,
    ) -> Any:
        """Sees the features of committed tokens start..start+chunk-1; rows from ``length_B`` on are padding."""
        ...

    def propose(
        self, params: Any, target: Llama, state: Any, context: Context, gamma: int, draws: Draws
    ) -> tuple[Proposal, Any]:
        """Drafts ``gamma`` (static, at least 1) levels after the committed tokens."""
        ...

    def commit(
        self, params: Any, target: Llama, state: Any, before: Context, after: Context, seen: Seen, gamma: int
    ) -> Any:
        """Follows what the law decided; ``gamma`` (static) levels were proposed in this step, or 0 for none.

        A row that committed nothing has the same length before and after.
        """
        ...

    def ready(self, state: Any, context: Context) -> jax.Array:
        """int32 [B]: how many levels could be drafted next, 0..GAMMA_MAX."""
        ...

    def lag(self, state: Any, context: Context) -> jax.Array:
        """int32 [B]: committed tokens, the pending one aside, that it has not taken in; 0 without a cache."""
        ...

    def grow(self, state: Any, slots: int) -> Any:
        """The same state for rows of ``slots`` slots."""
        ...


class Blind:
    """What a drafter without a cache and without features need not say."""

    has_cache = False
    is_lookup = False

    @property
    def features(self) -> Features:
        return None

    def drafts(self, gamma: int) -> int:
        return gamma

    def window(self, gamma: int) -> int:
        return 0

    def prefill(self, params: Any, state: Any, context: Context, start: jax.Array, chunk: int) -> Any:
        return state

    def observe(
        self,
        params: Any,
        target: Llama,
        state: Any,
        context: Context,
        features_BTX: jax.Array,
        start: jax.Array,
        chunk: int,
    ) -> Any:
        return state

    def lag(self, state: Any, context: Context) -> jax.Array:
        return jax.numpy.zeros_like(context.length_B)

    def grow(self, state: Any, slots: int) -> Any:
        return state
