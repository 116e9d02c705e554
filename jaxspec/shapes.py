"""The one alphabet of dimensions, and the constants that fix compiled shapes.

Names of arrays end in their dimensions (``q_BTNH``, ``accept_BJ``) wherever ranks mix.

====  =========================================  ====  =====================================
B     batch rows (slots)                         T     query tokens of one pass
S     cache slots of a row                       N     query heads
K     key/value heads                            G     query heads per kv head, N / K
H     head dimension                             D     model dimension
F     feed-forward dimension                     V     vocabulary
L     layers                                     J     drafted tokens
E     stop-token ids of a row                    M     Medusa heads
====  =========================================  ====  =====================================
"""

from typing import Any, Final

# The largest depth of the drafts of one step, the largest number of nodes fed to the target (the pending token and all
# drafts, of which a tree has more than levels), and the static depths that a step is compiled for.
GAMMA_MAX: Final = 8
NODES_MAX: Final = 64
# The largest number of guesses in the window that lookahead decoding feeds beside its drafts.
WINDOW_MAX: Final = 128
GAMMA_BUCKETS: Final = (0, 2, 4, 8)


def sizes(**arrays: Any) -> dict[str, int]:
    """Checks shape-suffixed names against each other and returns the size of every letter.

    ``sizes(p_BJV=p, draft_BJ=draft)`` binds B, J and V; a rank that differs from the suffix, or a letter with two
    sizes, raises ValueError naming the array. A suffix digit is a literal size (``seed_B2``).
    """
    found: dict[str, int] = {}
    for name, array in arrays.items():
        letters = name.rsplit("_", 1)[1]
        shape = array.shape
        if len(shape) != len(letters):
            raise ValueError(f"{name}: expected rank {len(letters)}, got shape {shape}")
        for letter, size in zip(letters, shape, strict=True):
            expected = int(letter) if letter.isdigit() else found.setdefault(letter, size)
            if size != expected:
                raise ValueError(f"{name}: expected {letter}={expected}, got shape {shape}")
    return found
