"""How many tokens a row drafts next, from the row's own history alone.

A minimal rule: a drafter that keeps failing rests for a while, twice as long after each failure in a row, so that text
which repeats nothing costs a few wide passes and no more. It never looks at the batch: under the token law the text of
a seeded request depends on its gammas, and must not feel its neighbours.
"""

from typing import Final, NamedTuple

PAYS: Final = 2  # accepted drafts that make a round worth its wider pass (8 rows cost about two passes of one row)
FIRST_REST: Final = 4  # plain steps after a failure
LONGEST_REST: Final = 64


class GammaState(NamedTuple):
    """``rest``: plain steps still to go; ``next_rest``: how many the next failure costs."""

    rest: int = 0
    next_rest: int = FIRST_REST


def choose(state: GammaState, limit: int) -> int:
    """The number of tokens to draft now, at most ``limit``."""
    return 0 if state.rest > 0 else limit


def update(state: GammaState, drafted: int, accepted: int) -> GammaState:
    """Follows one report. A round that drafted fewer tokens than would pay says nothing either way."""
    if drafted == 0:
        return state._replace(rest=max(0, state.rest - 1))
    if accepted >= PAYS:
        return GammaState()
    if drafted < PAYS:
        return state
    return GammaState(rest=state.next_rest, next_rest=min(2 * state.next_rest, LONGEST_REST))
