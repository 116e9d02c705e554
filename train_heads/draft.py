"""A small draft model of the same family, distilled: layers taken evenly from the target, its two ends shared."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxspec.model.llama import ModelDef
from train_heads.losses import Summed, divergence, hits, summed
from train_heads.objective import RANKS, Measured, Params, cast, look, over_chunks, run
from train_heads.packing import Rows, ahead

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

    def __call__(self, trained: Params, fixed: Params, target: Params, rows: Rows, key: jax.Array) -> Measured:
        model, output = look(self.target, target, rows)
        draft = self.draft.merge(cast({**trained, **fixed}, self.draft.dtype))
        hidden_BTD = run(draft, self.draft, rows).hidden_BTD
        segments_BT = jnp.asarray(rows.segments_BT)
        same_BT = (segments_BT > 0) & (ahead(segments_BT, 1) == segments_BT)
        weights_BT = same_BT & ahead(jnp.asarray(rows.answer_BT), 1, False)

        def judge(hidden_BCD: jax.Array, teacher_BCD: jax.Array, weights_BC: jax.Array) -> dict[str, Summed]:
            logits_BCV, teacher_BCV = draft.logits(hidden_BCD), model.logits(teacher_BCD)
            ids_BC = jnp.argmax(teacher_BCV, axis=-1)
            return {
                "loss": summed(divergence(logits_BCV, teacher_BCV), weights_BC),
                **{f"top{rank}": summed(hits(logits_BCV, ids_BC, rank), weights_BC) for rank in RANKS},
            }

        found = over_chunks(judge, hidden_BTD, output.hidden_BTD, weights_BT)
        return Measured(found["loss"], {f"draft/{name}": value for name, value in found.items()})
