"""A small draft model of the same family, distilled: layers taken evenly from the target, its two ends shared."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxspec.model.llama import ModelDef
from train_heads.objective import Features, Level, Measured, Params, cast, measured_levels, run
from train_heads.packing import Rows
from train_heads.words import WordLogits, Words

ENDS = ("embed", "lm_head")


def even_layers(target_layers: int, layers: int) -> tuple[int, ...]:
    """Which of the target's layers the draft starts from: the first, the last and evenly between.

    >>> even_layers(30, 4)
    (0, 10, 19, 29)
    """
    if layers == 1:
        return (target_layers - 1,)
    return tuple(round(index * (target_layers - 1) / (layers - 1)) for index in range(layers))


@dataclasses.dataclass(frozen=True)
class DraftObjective:
    """KL of the target's law to the draft's where the target spoke (Hinton et al. 2015, at temperature 1)."""

    target: ModelDef
    draft: ModelDef
    words: Words
    taps: tuple[int, ...] = ()

    def init(self, target: Mapping[str, jax.Array], seed: int) -> tuple[Params, Params]:
        """The target's ends are fixed, its layers are where the draft begins."""
        shardings = self.draft.shardings()
        sources = even_layers(self.target.config.num_layers, self.draft.config.num_layers)
        taken = {}
        for name in shardings:
            parts = name.split(".")
            if parts[0] == "layers":
                parts[1] = str(sources[int(parts[1])])
            taken[name] = jax.device_put(target[".".join(parts)], shardings[name])
        trained = {name: value.astype(jnp.float32) for name, value in taken.items() if name not in ENDS}
        return trained, {name: value for name, value in taken.items() if name in ENDS}

    def levels(
        self, trained: Params, fixed: Params, target: Params, rows: Rows, features: Features, key: jax.Array | None
    ) -> list[Level]:
        """One: a draft's later tokens are this one, further on."""
        hidden_BTD = run(self.draft, cast({**trained, **fixed}, self.draft.dtype), rows).hidden_BTD
        return [Level("draft", 1, hidden_BTD, WordLogits.of(self.draft, fixed, self.words))]

    def __call__(
        self, trained: Params, fixed: Params, target: Params, rows: Rows, features: Features, key: jax.Array | None
    ) -> Measured:
        levels = self.levels(trained, fixed, target, rows, features, key)
        teacher = WordLogits.of(self.target, target, self.words)
        return measured_levels(levels, [1.0], "divergence", teacher, self.words, rows, features)
