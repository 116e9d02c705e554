"""jaxspec: exact speculative decoding for Llama-family models in JAX.

``Engine.load(...)`` gives an engine; ``engine.generate(prompt, SamplingParams(...), SpeculationParams(...))`` streams.
"""

from typing import TYPE_CHECKING, Any

from jaxspec.engine.params import Prompt, SamplingParams, SpeculationConfig, SpeculationParams
from jaxspec.engine.records import Chunk, Completion, Summary

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine

__all__ = [
    "Chunk",
    "Completion",
    "Engine",
    "Prompt",
    "SamplingParams",
    "SpeculationConfig",
    "SpeculationParams",
    "Summary",
]


def __getattr__(name: str) -> Any:
    # The engine imports jax; clients and converters that need the records alone do not wait for it.
    if name == "Engine":
        from jaxspec.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
