"""How tokens are drafted: one file per drafter, one protocol of pure functions over an opaque state."""

from typing import Any, NamedTuple, Protocol

import jax

from jaxspec.speculate.state import Context


class Proposal(NamedTuple):
    """Drafted tokens of one round. ``q_BJV`` holds the final laws they were drawn from; None: not drawn at all."""

    tokens_BJ: jax.Array
    q_BJV: jax.Array | None


class Drafter(Protocol):
    """Pure functions; ``params`` is the drafter's flat parameter dict (empty for lookups)."""

    @property
    def has_cache(self) -> bool:
        """Whether committed tokens must be fed to it (``prefill``) before it can draft."""
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

    def propose(
        self, params: Any, state: Any, context: Context, gamma: int, draft_uniforms_BJ: jax.Array
    ) -> tuple[Proposal, Any]:
        """Drafts ``gamma`` (static, at least 1) tokens after the committed ones."""
        ...

    def commit(self, state: Any, before: Context, after: Context, n_accepted_B: jax.Array, gamma: int) -> Any:
        """Follows what the law decided; ``gamma`` (static) drafts were proposed in this step, or 0 for none."""
        ...

    def ready(self, state: Any, context: Context) -> jax.Array:
        """int32 [B]: how many tokens could be drafted next, 0..GAMMA_MAX."""
        ...

    def lag(self, state: Any, context: Context) -> jax.Array:
        """int32 [B]: committed tokens, the pending one aside, that it has not taken in; 0 without a cache."""
        ...

    def grow(self, state: Any, slots: int) -> Any:
        """The same state for rows of ``slots`` slots."""
        ...
