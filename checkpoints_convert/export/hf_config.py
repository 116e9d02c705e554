"""Our config as config.json and generation_config.json of Hugging Face.

The dialect is that of the published Llama 3: ``rope_theta``, ``rope_scaling``, ``torch_dtype``. transformers 4 knows no
other; transformers 5 turns it into its own ``rope_parameters`` and ``dtype`` while it reads.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from jaxspec.errors import UserError
from jaxspec.model.config import LlamaConfig, RopeScaling
from jaxspec.model.rope import inverse_frequencies

# What divisors of the frequencies may stand for, the likeliest first: Llama 3.1 (8) and 3.2 (32), both over 8192.
_FACTORS: Final = (8.0, 32.0, 16.0, 4.0, 2.0, 64.0)
_ORIGINALS: Final = (8192, *(2**power for power in range(6, 18) if 2**power != 8192))
_LOW, _HIGH = 1.0, 4.0
# A few roundings of float32: the divisors were rounded once, the frequencies that they divide, too.
_RTOL: Final = 1e-6


def hf_config(config: LlamaConfig, torch_dtype: str) -> dict[str, Any]:
    """config.json. Raises UserError when the rope scaling cannot be said in it."""
    scaling, tokens = rope_scaling(config), _special_tokens(config)
    more = {"attention_dropout": 0.0, "rope_scaling": scaling, "use_cache": True, **tokens}
    return dict(sorted((architecture(config, torch_dtype) | more).items()))


def architecture(config: LlamaConfig, torch_dtype: str) -> dict[str, Any]:
    """What config.json says of a decoder's shape; of one without rope scaling, all of it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": float(config.rope_theta),
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": torch_dtype,
        "vocab_size": config.vocab_size,
    }


def generation_config(config: LlamaConfig, carried: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json: the one that came with the checkpoint, with the begin and end tokens of its config."""
    return {**carried, **_special_tokens(config)}


def _special_tokens(config: LlamaConfig) -> dict[str, Any]:
    """null where there is none: transformers would take a missing key for ids 1 and 2."""
    ends = config.eos_token_ids
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(ends) if len(ends) > 1 else ends[0] if ends else None,
    }


def rope_scaling(config: LlamaConfig) -> dict[str, Any] | None:
    """The scaling under its own name, or None. Raises UserError as :func:`named_scaling` does."""
    scaling = named_scaling(config)
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": float(scaling.factor)}
    return {
        "factor": float(scaling.factor),
        "high_freq_factor": float(scaling.high_freq_factor),
        "low_freq_factor": float(scaling.low_freq_factor),
        "original_max_position_embeddings": scaling.original_max_position,
        "rope_type": "llama3",
    }


def named_scaling(config: LlamaConfig) -> RopeScaling | None:
    """The scaling in a form that has a name: ``llama3``, ``linear`` or none at all.

    ``divisors``, the only thing that a GGUF file keeps, are recognised by the frequencies that they give: it is another
    kind's numbers if those give the same to float32 accuracy. Raises UserError when no known numbers do.
    """
    scaling = config.rope_scaling
    if scaling is None or scaling.kind != "divisors":
        return scaling
    wanted = inverse_frequencies(config)
    for candidate in _candidates(scaling.divisors):
        found = inverse_frequencies(dataclasses.replace(config, rope_scaling=candidate))
        if np.allclose(found, wanted, rtol=_RTOL, atol=0):
            return candidate
    low, high = min(scaling.divisors), max(scaling.divisors)
    raise UserError(
        f"rope scaling: config.json has no name for these {len(scaling.divisors)} divisors of the frequencies "
        f"({low:.6g} to {high:.6g}): expected none, linear, or llama3 with low 1, high 4 and an original context of "
        f"{min(_ORIGINALS)} to {max(_ORIGINALS)}"
    )


def _candidates(divisors: tuple[float, ...]) -> Iterator[RopeScaling | None]:
    yield None
    yield RopeScaling("linear", factor=divisors[-1])
    # The slowest pair is divided by the whole factor wherever its wavelength is beyond the original context.
    for factor, original in itertools.product((*_FACTORS, max(divisors)), _ORIGINALS):
        yield RopeScaling("llama3", factor, _LOW, _HIGH, original)
