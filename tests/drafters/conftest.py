"""The watched engines of ``tests/engine``, for tests of single drafters.

An area of its own, because an area is a process: one process cannot hold the executables of both (scripts/test.py).
"""

from tests.engine.conftest import *  # noqa: F403 - the fixtures
