"""The right sources that mutants are made of: small, but with everything a real one has."""

import base64
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.convert import makers, meta_makers
from tests.fuzz.trees import Tree
from tests.heads import makers as heads_makers

FORMATS = ("safetensors", "gguf", "meta", "heads")
_SIZES = makers.Sizes(V=269, D=8, F=11, N=4, K=2, H=4, L=2)
_META = meta_makers.META_SIZES._replace(V=269, L=1)
_MERGES = ("t h", "th e", "Ġ a")
_SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")


def bases(format_name: str, shared: Path) -> list[Tree]:
    """Every base of a format, the same bytes each time. ``shared``: the golden data, for files that torch wrote."""
    with tempfile.TemporaryDirectory() as scratch:
        return _MAKERS[format_name](Path(scratch), shared / "fixtures")


def _read(folder: Path, *names: str) -> Tree:
    paths = [folder / name for name in names] or sorted(folder.iterdir())
    return {path.name: path.read_bytes() for path in paths}


def _alphabet() -> list[str]:
    """Byte-level BPE's letter for every byte, spelled out here: printable ones stand for themselves."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte) if byte in own else chr(next(rest)) for byte in range(256)]


def _tokens() -> list[str]:
    return _alphabet() + [merge.replace(" ", "") for merge in _MERGES] + list(_SPECIALS)


def _safetensors(scratch: Path, fixtures: Path) -> list[Tree]:
    config = makers.hf_config(_SIZES, rope_scaling={"rope_type": "linear", "factor": 2.0})
    tensors = makers.hf_tensors(_SIZES)
    single = _read(makers.write_hf(scratch / "single", config, tensors))
    tied = makers.hf_config(
        _SIZES,
        tie_word_embeddings=True,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    shards = makers.split_in_three(makers.hf_tensors(_SIZES, tied=True, dtype=np.float16))
    sharded = _read(makers.write_sharded(scratch / "sharded", tied, shards))
    # A tokenizer folder as for GGUF, in the words of Hugging Face.
    vocab = {token: number for number, token in enumerate(_tokens())}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocab[name], "content": name, **flags} for name in _SPECIALS],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [merge.split(" ") for merge in _MERGES]},
    }
    settings = {"bos_token": _SPECIALS[0], "eos_token": _SPECIALS[1], "chat_template": "{{ messages[0].content }}"}
    texts: dict[str, Any] = {
        "tokenizer.json": document,
        "tokenizer_config.json": settings,
        "generation_config.json": {"eos_token_id": [260, 261], "bos_token_id": 259},
        "special_tokens_map.json": {"eos_token": {"content": _SPECIALS[1]}},
    }
    return [single | {name: json.dumps(value).encode() for name, value in texts.items()}, sharded, sharded]


def _gguf(scratch: Path, fixtures: Path) -> list[Tree]:
    tokens = _tokens()
    tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in _SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": list(_MERGES),
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.eos_token_id": 260,
        "tokenizer.ggml.eot_token_id": 261,
        "tokenizer.ggml.add_bos_token": True,
    }
    tensors = makers.gguf_tensors(makers.hf_tensors(_SIZES), _SIZES)
    scaled = tensors | {"rope_freqs.weight": np.array([1.0, 8.0], np.float32)}
    files = (
        makers.write_gguf(scratch / "model.gguf", makers.gguf_fields(_SIZES) | tokenizer, tensors),
        makers.write_gguf(scratch / "scaled.gguf", makers.gguf_fields(_SIZES), scaled),
    )
    quantised = _read(fixtures / "tiny-llama3" / "gguf", "tiny-llama3-q4_0.gguf")
    return [*(_read(scratch, path.name) for path in files), quantised]


def _meta(scratch: Path, fixtures: Path) -> list[Tree]:
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" a"]
    ranks = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    tensors = meta_makers.meta_tensors(meta_makers.hf_tensors(_META), _META)
    values = meta_makers.params(_META, use_scaled_rope=True)
    one = _read(meta_makers.write_meta(scratch / "one", values, [tensors])) | {"tokenizer.model": ranks}
    shards = meta_makers.split(tensors, 2, embed_axis=1)
    two = _read(meta_makers.write_meta(scratch / "two", meta_makers.params(_META, vocab_size=-1), shards))
    return [one, two, _read(fixtures / "tiny-draft" / "meta-mp2-llama2")]


def _heads(scratch: Path, fixtures: Path) -> list[Tree]:
    sizes = heads_makers.SIZES
    medusa = heads_makers.medusa(sizes, heads=2)
    folders = (
        heads_makers.write(scratch / "medusa", heads_makers.medusa_config(), medusa, "medusa_lm_head.safetensors"),
        heads_makers.write(scratch / "eagle3", heads_makers.eagle3_config(sizes), heads_makers.eagle3(sizes)),
        heads_makers.write(
            scratch / "spec3", heads_makers.speculators_config(sizes), heads_makers.eagle3(sizes, layer="layers.0")
        ),
        heads_makers.write(
            scratch / "spec1",
            heads_makers.speculators_config(heads_makers.SQUARE, "eagle"),
            heads_makers.eagle1(layer="transformer", fc="fusion_fc", bias=False),
        ),
    )
    meta_makers.write_pth(scratch / "medusa_lm_head.pt", medusa)
    own = _read(scratch, "medusa_lm_head.pt") | {"config.json": json.dumps(heads_makers.medusa_config()).encode()}
    eagle1 = _read(fixtures / "eagle1", "config.json", "pytorch_model.bin")
    eagle3 = _read(fixtures / "eagle3", "config.json", "pytorch_model.bin")
    return [own, eagle1, eagle3, *map(_read, folders)]


_MAKERS = {"safetensors": _safetensors, "gguf": _gguf, "meta": _meta, "heads": _heads}
