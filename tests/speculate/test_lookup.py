"""Prompt lookup against the plain way: every suffix length from long to short, the latest occurrence first."""

import jax
import numpy as np
import pytest

from jaxspec.shapes import GAMMA_MAX
from jaxspec.speculate.drafters.ngram import look_up

LIMIT = 5
SLOTS = 61


def plain_lookup(tokens: list[int], shortest: int, longest: int) -> list[int] | None:
    """What follows the latest of the longest earlier occurrences, going round where it runs past the end."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                source = list(tokens)
                for index in range(GAMMA_MAX):
                    source.append(source[end + index])
                return source[len(tokens) :]
    return None


@pytest.mark.parametrize("letters", [2, 3, 7])
def test_each_row_looks_up_by_its_own_lengths(letters: int) -> None:
    """Rows of all lengths and bounds in one call; a vocabulary of few letters gives long matches and many ties."""
    rng = np.random.default_rng(letters)
    rows = [
        (rng.integers(0, letters, size=int(rng.integers(1, SLOTS + 1))).tolist(), shortest, longest)
        for longest in range(1, LIMIT + 1)
        for shortest in range(1, longest + 1)
        for _ in range(8)
    ]
    # What lies in the slots past the committed tokens must not matter.
    tokens_BS = rng.integers(0, letters, size=(len(rows), SLOTS)).astype(np.int32)
    for row, (tokens, _, _) in enumerate(rows):
        tokens_BS[row, : len(tokens)] = tokens
    lengths = np.array([len(tokens) for tokens, _, _ in rows], np.int32)
    shortest_B, longest_B = (np.array([row[i] for row in rows], np.int32) for i in (1, 2))
    found = jax.jit(look_up, static_argnums=4)(tokens_BS, lengths, shortest_B, longest_B, LIMIT)
    hits = 0
    for row, (tokens, shortest, longest) in enumerate(rows):
        expected = plain_lookup(tokens, shortest, longest)
        assert int(found.found_B[row]) == (0 if expected is None else GAMMA_MAX), (tokens, shortest, longest)
        if expected is not None:
            hits += 1
            assert found.tokens_BJ[row].tolist() == expected, (tokens, shortest, longest)
    assert 10 < hits < len(rows)
