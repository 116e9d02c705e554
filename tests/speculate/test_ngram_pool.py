"""Pools of n-grams as pictures, the trees that are made of them, and the window that fills them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.shapes import GAMMA_MAX
from jaxspec.speculate.drafters.lookahead import window_shape
from jaxspec.speculate.drafters.ngram_pool import EMPTY, continuations, empty_pool, first, insert, merge
from jaxspec.speculate.topology import ancestors, chain
from jaxspec.speculate.window import Window

PLACES, SIZE, SLOTS = 5, 3, 23
jitted_insert, jitted_merge = jax.jit(insert), jax.jit(merge)
jitted_continuations = jax.jit(continuations, static_argnums=3)
OTHER = "zzy zyx"  # a second row, which must not matter


def grams(text: str) -> list[list[int]]:
    """Words of equal length as n-grams, letters as tokens."""
    return [[ord(letter) for letter in word] for word in text.split()]


def pool(text: str) -> np.ndarray:
    rows = grams(text)
    return np.array(rows + [[EMPTY] * SIZE] * (PLACES - len(rows)), np.int32)


def words(array_PN) -> str:
    return " ".join("".join(chr(token) for token in row) for row in np.asarray(array_PN) if row[0] != EMPTY)


@pytest.mark.parametrize(
    ("before", "new", "after"),
    [
        ("", "abc", "abc"),
        ("abc", "abd bcd", "abd bcd abc"),  # the first new one is the newest
        ("abc abd bcd", "bcd", "bcd abc abd"),  # seen again: to the front, once
        ("abc", "abc abc xyz", "abc xyz"),
        ("abc abd bcd bce", "xyz xyw", "xyz xyw abc abd bcd"),  # the oldest is forgotten
        ("abc abd bcd bce cde", "bce", "bce abc abd bcd cde"),
        ("abc abd", "", "abc abd"),
    ],
)
def test_the_newest_come_first_and_each_is_there_once(before, new, after):
    if new:
        new_BXN = jnp.asarray([grams(new), [[9] * SIZE] * len(new.split())], jnp.int32)
    else:
        new_BXN = jnp.full((2, 1, SIZE), 7, jnp.int32)
    got = jitted_insert(jnp.asarray([pool(before), pool(OTHER)]), new_BXN, jnp.array([bool(new), False]))
    assert words(got[0]) == after
    assert words(got[1]) == OTHER
    assert (np.asarray(got)[np.asarray(got)[:, :, 0] == EMPTY] == EMPTY).all()


def test_a_pool_agrees_with_a_list_on_random_n_grams():
    rng = np.random.default_rng(3)
    device, lists = empty_pool(2, PLACES, SIZE), [[], []]
    for _ in range(60):
        new_BXN = rng.integers(0, 3, size=(2, 4, SIZE))
        valid_B = rng.random(2) < 0.8
        device = jitted_insert(device, jnp.asarray(new_BXN, jnp.int32), jnp.asarray(valid_B))
        for row in np.flatnonzero(valid_B):
            lists[row] = list(dict.fromkeys([*map(tuple, new_BXN[row].tolist()), *lists[row]]))[:PLACES]
        for row, expected in zip(np.asarray(device), lists, strict=True):
            assert [tuple(gram) for gram in row.tolist() if gram[0] != EMPTY] == expected


@pytest.mark.parametrize(
    ("known", "text", "expected"),
    [
        ("", "abcdefga", "bc"),
        ("", "abcadea", "de bc"),  # the latest first
        ("axy abc", "qrsta", "xy bc"),
        ("axy abc", "auvqrsta", "xy uv bc"),  # in turn
        ("axy auv", "auvqrsta", "xy uv"),  # each once
        ("axy auv axz", "abcadeafga", "xy fg uv de"),  # as many as are asked for
        ("axy bcd", "aabb", "cd"),  # what follows the earlier b is too short
        ("axy", "qrst", ""),
        ("", "a", ""),
        ("", "aaaa", "aa"),
    ],
)
def test_what_followed_the_last_token_is_found_in_pool_and_text(known, text, expected):
    tokens_BS = jnp.array([[ord(letter) for letter in row.ljust(SLOTS, "a")] for row in (text, OTHER)])
    pools = jnp.asarray([pool(known), pool("")])
    runs_BGD, found_BG = jitted_continuations(pools, tokens_BS, jnp.array([len(text), 3]), 4)
    runs = [run for run, found in zip(np.asarray(runs_BGD)[0], np.asarray(found_BG)[0], strict=True) if found]
    assert words(runs) == expected
    assert np.asarray(found_BG)[0, : len(runs)].all()


def test_runs_share_their_beginnings():
    """One tree, not four chains; the place of a token that an earlier run has is nobody's."""
    runs = np.array([grams("abc abd axd xbc"), grams("abc abc qqq abq")], np.int32)
    tokens_BJ, topology = jitted_merge(jnp.asarray(runs), jnp.array([[True] * 4, [True, True, False, True]]))
    nowhere = GAMMA_MAX + 1
    #                a  b  c  |        d  |     x  d  |  x  b   c
    parents = [0, 1, 2, 0, 0, 2, 0, 1, 8, 0, 10, 11]
    depths = [1, 2, 3, nowhere, nowhere, 3, nowhere, 2, 3, 1, 2, 3]
    assert np.asarray(topology.parent_BJ)[0].tolist() == parents
    assert np.asarray(topology.depth_BJ)[0].tolist() == depths
    assert "".join(chr(token) for token in np.asarray(tokens_BJ)[0]) == "abcabdaxdxbc"
    #          a  b  c  |        |        |        q
    parents = [0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    depths = [1, 2, 3, *[nowhere] * 8, 3]
    assert np.asarray(topology.parent_BJ)[1].tolist() == parents
    assert np.asarray(topology.depth_BJ)[1].tolist() == depths


def test_trees_of_random_runs_hold_every_run_and_no_sibling_twice():
    rng = np.random.default_rng(4)
    runs_BGD, found_BG = rng.integers(0, 3, size=(97, 6, 4)), rng.random((97, 6)) < 0.7
    tokens_BJ, topology = jitted_merge(jnp.asarray(runs_BGD, jnp.int32), jnp.asarray(found_BG))
    for row in range(97):
        tokens, parents, depths = (np.asarray(x_BJ)[row] for x_BJ in (tokens_BJ, *topology))
        live = depths <= GAMMA_MAX
        paths = {0: ()}
        for j in np.flatnonzero(live):
            paths[j + 1] = (*paths[parents[j]], int(tokens[j]))
            assert depths[j] == len(paths[j + 1])
        wanted = {tuple(run[: d + 1].tolist()) for run in runs_BGD[row][found_BG[row]] for d in range(4)}
        assert len(paths) == 1 + len(wanted)
        assert set(paths.values()) == {(), *wanted}


def test_the_first_true_places():
    is_BX = jnp.array([[0, 1, 1, 0, 1], [0, 0, 0, 1, 0], [0] * 5], bool)
    index_BC, found_BC = first(is_BX, 2)
    assert np.asarray(found_BC).tolist() == [[True, True], [True, False], [False, False]]
    assert np.asarray(index_BC)[:2].tolist() == [[1, 2], [3, 0]]


def test_the_window_is_that_of_the_paper():
    """W = 5, N = 4, as figure 2 of Fu et al. draws it: levels of 4 (the pending token is apart), 5 and 5 guesses."""
    offsets_X, above_XX, read_W = window_shape(5, 3)
    assert offsets_X.tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6]
    picture = """
        1000 00000 00000
        1100 00000 00000
        1110 00000 00000
        1111 00000 00000
        0000 10000 00000
        1000 01000 00000
        1100 00100 00000
        1110 00010 00000
        1111 00001 00000
        0000 10000 10000
        1000 01000 01000
        1100 00100 00100
        1110 00010 00010
        1111 00001 00001
    """
    expected = [[int(cell) for cell in line.replace(" ", "")] for line in picture.split("\n") if line.strip()]
    assert above_XX.astype(int).tolist() == expected
    assert read_W.tolist() == [9, 10, 11, 12, 13]


def test_the_smallest_window_reads_the_root():
    offsets_X, above_XX, read_W = window_shape(3, 1)
    assert (offsets_X.tolist(), above_XX.tolist(), read_W.tolist()) == (
        [1, 2],
        [[True, False], [True, True]],
        [-1, 0, 1],
    )
    offsets_X, above_XX, read_W = window_shape(1, 1)
    assert (offsets_X.size, above_XX.shape, read_W.tolist()) == (0, (0, 0), [-1])


def test_window_and_drafts_share_the_root_alone():
    """A chain of two drafts beside a window of three."""
    above_XX = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1]], bool)
    window = Window(jnp.array([[7, 8, 9]] * 2), np.array([1, 2, 1], np.int32), above_XX, np.array([-1, 2], np.int32))
    picture = """
        1 00 000
        1 10 000
        1 11 000
        1 00 100
        1 00 110
        1 00 001
    """
    expected = [[int(cell) for cell in line.replace(" ", "")] for line in picture.split("\n") if line.strip()]
    above_BUU = np.asarray(window.beside(ancestors(chain(2, 2))))
    assert above_BUU.astype(int).tolist() == [expected, expected]

    tokens_BT, positions_BT = jnp.array([[1, 2, 3]] * 2), jnp.array([[4, 5, 6], [5, 50, 50]])
    fed = window.feed(tokens_BT, positions_BT, jnp.array([4, 5]), jnp.array([True, False]), 50)
    assert np.asarray(fed[0]).tolist() == [[1, 2, 3, 7, 8, 9]] * 2
    assert np.asarray(fed[1]).tolist() == [[4, 5, 6, 5, 6, 5], [5, 50, 50, 50, 50, 50]]

    hidden_BUD = jnp.arange(6, dtype=jnp.float32)[None, :, None]
    assert np.asarray(window.keep(hidden_BUD, 3))[0, :, 0].tolist() == [0, 1, 2, 0, 5]
