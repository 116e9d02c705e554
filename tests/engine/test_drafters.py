"""Lookups as pictures, and when a row rests from speculation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.shapes import GAMMA_MAX
from jaxspec.speculate.drafters.ngram import look_up
from jaxspec.speculate.gamma import FIRST_REST, LONGEST_REST, PAYS, GammaState, choose, update
from tests.engine.laws import follow_lookup

SLOTS = 23
jitted = jax.jit(look_up, static_argnums=4)


def drafts(text: str, shortest: int = 2, longest: int = 4, rubbish: str = "") -> str | None:
    """Letters as tokens; ``rubbish`` lies in the slots behind the committed ones."""
    tokens = [ord(c) for c in (text + rubbish).ljust(SLOTS, "\0")]
    # A second row of another length must not matter.
    other = [ord(c) for c in "xyxyxyxyxyx".ljust(SLOTS, "\0")]
    found = jitted(
        jnp.array([tokens, other]), jnp.array([len(text), 11]), jnp.array([shortest] * 2), jnp.array([longest] * 2), 4
    )
    return "".join(chr(t) for t in np.asarray(found.tokens_BJ)[0]) if found.found_B[0] else None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        #  earlier    now
        ("abcdefghijkl ab", "cdefghij"),
        ("ab1234567-ab8901234 ab", "8901234 "),  # of equally long ones the latest
        ("xab1234567 ab890 xab", "1234567 "),  # a longer suffix beats a later one
        ("abc abd ab", "d abd ab"),  # runs into itself: the text goes round
        ("ababab", "abababab"),
        ("aaa", "aaaaaaaa"),
        ("abcabc", "abcabcab"),
        ("abcdef", None),
        ("abcdefa", None),  # one token is too little
        ("ab", None),
        ("a", None),
        ("", None),
    ],
)
def test_what_followed_the_longest_latest_match_is_drafted(text, expected):
    assert drafts(text) == expected


def test_shortest_and_longest_bound_the_match():
    assert drafts("ab1 cb2 ab", shortest=1) == "1 cb2 ab"
    assert drafts("ab1 cb2 ab", shortest=1, longest=1) == "2 ab2 ab"  # judged by its last token alone: the latest b
    assert drafts("ab1 ab", shortest=3) is None
    assert drafts("abc1 abc", shortest=3) == "1 abc1 a"


def test_slots_behind_the_committed_tokens_are_not_read():
    assert drafts("abcdef", rubbish="efzzzef") is None
    assert drafts("abc ab", rubbish="c ab!!") == "c abc ab"


def test_drafts_agree_with_the_plain_search_on_random_text():
    rng = np.random.default_rng(5)
    rows, lengths = rng.integers(0, 3, size=(211, SLOTS)), rng.integers(1, SLOTS + 1, size=211)
    for shortest, longest in ((1, 1), (1, 3), (2, 4), (3, 16)):
        asked = (jnp.full(211, size) for size in (shortest, longest))
        found = jitted(jnp.array(rows), jnp.array(lengths), *asked, 16)
        for row, length, drafted, hit in zip(rows, lengths, found.tokens_BJ, found.found_B, strict=True):
            expected = follow_lookup(row[:length].tolist(), shortest, longest)
            assert int(hit) == (0 if expected is None else GAMMA_MAX)
            assert expected is None or int(drafted[0]) == expected


def history(*rounds: tuple[int, int]) -> GammaState:
    state = GammaState()
    for drafted, accepted in rounds:
        state = update(state, drafted, accepted)
    return state


def test_a_row_drafts_all_it_may_until_a_round_fails():
    """F06: the state is the row's own value; a new row starts afresh."""
    assert [choose(GammaState(), limit) for limit in range(9)] == list(range(9))
    assert choose(history((8, PAYS)), 8) == 8
    assert choose(history((8, PAYS - 1)), 8) == 0


def test_failures_in_a_row_cost_longer_rests_and_one_success_forgives_them():
    """F02: text that repeats nothing costs a few wide passes and no more."""
    state, rests = GammaState(), []
    for _ in range(7):
        state, rest = update(state, 8, 0), 0
        while choose(state, 8) == 0:
            state, rest = update(state, 0, 0), rest + 1
        rests.append(rest)
    assert rests == [min(FIRST_REST * 2**i, LONGEST_REST) for i in range(7)]
    assert update(state, 8, 8) == GammaState()


def test_rounds_too_short_to_pay_say_nothing():
    state = history((8, 0))
    assert update(GammaState(), PAYS - 1, 0) == GammaState()
    assert update(state, PAYS - 1, 0) == state
