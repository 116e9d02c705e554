"""The reference deployment on paper: Llama-3 70B + 8B in bfloat16 on four devices, compiled without a single weight.

32 slots of 8192 tokens, gamma 4. Argument bytes and collectives are those of the partitioned program and hold on any
backend; temporaries of the CPU backend say nothing about an accelerator and are not looked at.
"""

import math
import re
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import ModelDef, define
from jaxspec.sharding import Sharding, make_sharding
from jaxspec.speculate.drafters.linear import LinearDrafter
from jaxspec.speculate.programs import Program, Programs, Shapes
from jaxspec.speculate.step import Decoder, Params

SLOTS, WINDOW, GAMMA, VOCAB = 32, 8192, 4, 128_256
GB = 10**9


def llama3(hidden: int, layers: int, heads: int, ffn: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )


class Paper(NamedTuple):
    """A target and a draft that exist on paper only."""

    target: ModelDef
    draft: ModelDef

    @classmethod
    def of(cls, mesh: str, target_layers: int, draft_layers: int) -> "Paper":
        sharding: Sharding = make_sharding(mesh)
        return cls(
            define(llama3(8192, target_layers, 64, 28_672), sharding, jnp.dtype("bfloat16")),
            define(llama3(4096, draft_layers, 32, 14_336), sharding, jnp.dtype("bfloat16")),
        )

    @property
    def programs(self) -> Programs:
        decoder = Decoder(self.target, LinearDrafter(self.draft, VOCAB, VOCAB), VOCAB, "block")
        params: Any = Params(self.target.abstract_params(), self.draft.abstract_params())
        return Programs(decoder, params, Shapes.of(SLOTS, WINDOW, GAMMA))

    def compiled(self, gamma: int) -> Any:
        return self.programs.lower(Program("step", SLOTS, WINDOW, gamma)).compile()


class Collective(NamedTuple):
    """One collective of an executable: its kind, its largest result, and where in our code it comes from."""

    kind: str
    shape: tuple[int, ...]
    scope: str


def collectives(hlo: str) -> list[Collective]:
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast|ragged-all-to-all"
    found = []
    for line in hlo.splitlines():
        match = re.search(rf" = (.*?) ({kinds})(?:-start)?\(", line)
        if match:
            shapes = [
                tuple(map(int, dims.split(","))) if dims else () for dims in re.findall(r"\[([\d,]*)\]", match[1])
            ]
            scope = re.search(r'op_name="([^"]*)"', line)
            found.append(Collective(match[2], max(shapes, key=math.prod), scope[1] if scope else ""))
    return found


def on_one_device(tree: Any) -> int:
    """Bytes of abstract arrays on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def in_total(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def matrix_sizes(programs: Programs) -> set[int]:
    """Elements of every weight matrix and every cache array, whole and as one device holds it."""
    state = programs.abstract_state(SLOTS, WINDOW)
    arrays = [*jax.tree.leaves(programs.params), *jax.tree.leaves((state.target.layers, state.drafter.layers))]
    matrices = [array for array in arrays if len(array.shape) > 1]
    return {math.prod(shape) for x in matrices for shape in (x.shape, x.sharding.shard_shape(x.shape))}


@pytest.fixture(scope="module")
def paper() -> Paper:
    return Paper.of("data=1,model=4", 80, 32)


@pytest.fixture(scope="module")
def step(paper) -> Any:
    """The whole step, all 112 layers."""
    return paper.compiled(GAMMA)


def test_it_fits_on_four_devices_of_80_gb(paper, step) -> None:
    programs = paper.programs
    state = programs.abstract_state(SLOTS, WINDOW)
    promised = on_one_device((programs.params, state))
    arguments = step.memory_analysis().argument_size_in_bytes
    assert 0 <= arguments - promised < 4096  # gamma_B, and nothing that grew a copy
    assert 69.0 * GB < arguments < 69.5 * GB < 80 * GB

    # A draft that every device holds whole would not fit.
    replicated = in_total((programs.params.drafter, state.drafter))
    sharded = on_one_device((programs.params.drafter, state.drafter))
    assert 107.0 * GB < arguments - sharded + replicated < 107.5 * GB


def test_the_state_is_updated_in_place(paper, step) -> None:
    """Every byte of the state is donated; what comes on top is the report."""
    state = on_one_device(paper.programs.abstract_state(SLOTS, WINDOW))
    memory = step.memory_analysis()
    assert memory.alias_size_in_bytes == state
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 2**16


def test_the_draft_is_small_beside_the_target(paper) -> None:
    target, draft = in_total(paper.target.abstract_params()), in_total(paper.draft.abstract_params())
    assert target == 2 * 70_553_706_496  # Llama-3-70B's parameter count
    assert draft == 2 * 8_030_261_248  # Llama-3-8B's
    assert draft < 0.20 * target


def test_two_sums_per_layer_one_for_the_embedding_and_the_logits_are_all_that_travels(step) -> None:
    """Exactly: a pass of L layers over R rows sums [R, D] 2 L + 1 times and gathers its logits once."""
    target_rows, first_rows, loop_rows = SLOTS * (GAMMA + 1), SLOTS * 2, SLOTS
    expected = Counter(
        {
            ("all-reduce", target_rows * 8192, False): 2 * 80 + 1,
            ("all-gather", target_rows * VOCAB, False): 1,
            ("all-reduce", first_rows * 4096, False): 2 * 32 + 1,  # the draft's first pass takes two tokens a row
            ("all-gather", SLOTS * VOCAB, False): 1,
            ("all-reduce", loop_rows * 4096, True): 2 * 32 + 1,  # the body of its loop
            ("all-gather", loop_rows * VOCAB, True): 1,
        }
    )
    found = Counter((c.kind, math.prod(c.shape), "/while/body/" in c.scope) for c in collectives(step.as_text()))
    assert found == expected


def test_no_collective_has_the_size_of_a_weight_or_a_cache(paper, step) -> None:
    sizes = matrix_sizes(paper.programs)
    assert {8192 * 8192, 8192 * 8192 // 4, SLOTS * 2 * WINDOW * 128} <= sizes
    assert not [c for c in collectives(step.as_text()) if math.prod(c.shape) in sizes]


@pytest.mark.parametrize("gamma", [0, GAMMA])
def test_a_data_axis_moves_no_cache_and_no_weight(gamma) -> None:
    """Two by two, real widths, few layers: inside a layer nothing but its two sums: cache writes gather nothing."""
    paper = Paper.of("data=2,model=2", 2, 1)
    found = collectives(paper.compiled(gamma).as_text())
    inside = Counter((c.kind, c.shape, "/while/body/" in c.scope) for c in found if "_run_layer" in c.scope)
    rows = SLOTS // 2
    expected = Counter({("all-reduce", (rows * (gamma + 1), 8192), False): 2 * 2})
    if gamma:
        expected[("all-reduce", (rows * 2, 4096), False)] = 2
        expected[("all-reduce", (rows, 4096), True)] = 2
    assert inside == expected
    sizes = matrix_sizes(paper.programs)
    assert not [c for c in found if math.prod(c.shape) in sizes]
    assert max(math.prod(c.shape) for c in found) == SLOTS * (gamma + 1) * VOCAB  # the logits
