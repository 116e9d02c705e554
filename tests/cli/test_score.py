"""``jaxspec score``: the reference's logits, log-probabilities and perplexity."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine.load import load
from jaxspec.engine.params import SpeculationConfig
from jaxspec.errors import EngineFault
from jaxspec.score import Score, Scorer, score, totals
from jaxspec.text import Tokenizer

PROMPTS = ("p7", "p1", "p150", "p33")


def write_ids(folder: Path, sequences: object) -> Path:
    path = folder / "ids.json"
    path.write_text(json.dumps(sequences))
    return path


def expected_logprobs(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """What a plain log-softmax makes of the reference's logits, in float64."""
    wide = logits.astype(np.float64)
    lse = np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1)) + wide.max(1)
    return wide[np.arange(len(ids) - 1), ids[1:]] - lse[:-1]


@pytest.mark.parametrize("mesh", ["1", "4", "data=2,model=2"])
def test_logits_and_logprobs_are_the_references(jaxspec, tiny, goldens, tmp_path, mesh) -> None:
    ids = [goldens[f"{name}__input_ids"] for name in PROMPTS]
    path = write_ids(tmp_path, [sequence.tolist() for sequence in ids])
    out = tmp_path / "logits.npz"
    told = jaxspec(
        *("score", "--target", tiny, "--token-ids", path, "--mesh", mesh, "--dtype", "float32"),
        *("--logits", out, "--json"),
    ).json
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ids.json", "logits.npz"]
    expected = [expected_logprobs(s, goldens[f"{name}__logits"]) for name, s in zip(PROMPTS, ids, strict=True)]
    with np.load(out) as written:
        assert list(written) == ["logits_0", "logits_1", "logits_2", "logits_3"]
        for index, name in enumerate(PROMPTS):
            assert written[f"logits_{index}"].dtype == np.float32
            np.testing.assert_allclose(written[f"logits_{index}"], goldens[f"{name}__logits"], rtol=0, atol=2e-4)
    for entry, sequence, right in zip(told["sequences"], ids, expected, strict=True):
        assert list(entry) == ["token_ids", "logprobs", "num_scored", "total_logprob", "perplexity"]
        assert entry["token_ids"] == sequence.tolist()
        assert entry["logprobs"][0] is None
        np.testing.assert_allclose(entry["logprobs"][1:], right, rtol=0, atol=2e-4)
        assert entry["num_scored"] == len(sequence) - 1
        assert math.isclose(entry["total_logprob"], right.sum(), abs_tol=2e-4 * len(sequence))
    everything = np.concatenate(expected)
    assert told["num_scored"] == len(everything)
    assert math.isclose(told["total_logprob"], everything.sum(), abs_tol=0.04)
    assert math.isclose(told["perplexity"], math.exp(-everything.mean()), rel_tol=2e-4)
    assert told["sequences"][1]["perplexity"] is None  # one token: nothing to score


def test_bfloat16_is_near_float32_and_not_it(jaxspec, tiny_models, shared, tmp_path) -> None:
    with np.load(shared / "fixtures" / "tiny-llama3-bf16" / "goldens.npz") as data:
        ids, logits = data["p33__input_ids"], data["p33__logits"]
    path, out = write_ids(tmp_path, [ids.tolist()]), tmp_path / "out.npz"
    flags = ("--token-ids", path, "--mesh", "1", "--dtype", "bfloat16", "--logits", out)
    assert jaxspec("score", "--target", tiny_models("tiny-llama3-bf16"), *flags).status == 0
    with np.load(out) as written:
        error = np.abs(written["logits_0"] - logits)
    assert error.max() > 1e-3
    assert np.sqrt((error**2).mean()) < 0.03 * logits.std()


def test_chunks_join_without_a_seam_and_sequences_share_a_cache(tiny, goldens, compilations) -> None:
    loaded = load(
        tiny,
        draft=None,
        speculation=SpeculationConfig(method="none"),
        mesh="1",
        dtype="float32",
        max_slots=1,
        max_len=512,
    )
    model, params = loaded.programs.decoder.target, loaded.programs.params.target
    with compilations() as seen:
        scorer = Scorer(model, params, longest=150, chunk=17, with_logits=True)
        for name in ("p150", "p7", "p33"):
            parts = list(scorer.parts(goldens[f"{name}__input_ids"].tolist()))
            logits = np.concatenate([part.logits_TV for part in parts if part.logits_TV is not None])
            np.testing.assert_allclose(logits, goldens[f"{name}__logits"], rtol=0, atol=2e-4)
    assert sorted(seen.names) == ["jit(empty)", "jit(score_chunk)"]


def test_a_text_gets_bos_as_a_prompt_would(jaxspec, tiny, tmp_path) -> None:
    text = "The quick brown fox\r\njumps <|eot_id|> over the lazy dog.\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    told = jaxspec("score", "--target", tiny, "--text", tmp_path / "a.txt", "--mesh", "1", "--json").json
    (entry,) = told["sequences"]
    tokenizer = Tokenizer.load(tiny / "tokenizer")
    assert tokenizer.adds_bos
    assert entry["token_ids"] == tokenizer.encode(text, add_bos=True)
    assert tokenizer.decode(entry["token_ids"]) == text
    assert {key: told[key] for key in ("num_scored", "total_logprob", "perplexity")} == {
        key: entry[key] for key in ("num_scored", "total_logprob", "perplexity")
    }


def test_words_for_people(jaxspec, tiny, tmp_path) -> None:
    path = write_ids(tmp_path, [[496, 7, 11], [5]])
    done = jaxspec("score", "--target", tiny, "--token-ids", path, "--mesh", "1")
    assert done.status == 0
    first, second, whole = done.out.splitlines()
    assert first.startswith("sequence 0: 2 tokens scored, log-probability -")
    assert second == "sequence 1: 0 tokens scored, log-probability 0, perplexity undefined"
    assert whole.startswith("all: 2 tokens scored, log-probability -")


def test_totals_at_the_edges() -> None:
    assert totals([Score((5,), (None,))]) == {"num_scored": 0, "total_logprob": 0.0, "perplexity": None}
    assert totals([Score((5, 7), (None, -1000.0))])["perplexity"] is None  # beyond float64
    both = [Score((5, 7), (None, -1.0)), Score((5, 7, 11), (None, -2.0, -3.0))]
    assert totals(both) == {"num_scored": 3, "total_logprob": -6.0, "perplexity": math.exp(2.0)}


def test_broken_weights_are_a_fault_and_leave_no_file(tiny, tmp_path) -> None:
    loaded = load(
        tiny, draft=None, speculation=SpeculationConfig(method="none"), mesh="1", dtype=None, max_slots=1, max_len=64
    )
    params = dict(loaded.programs.params.target)
    params["final_norm"] = params["final_norm"] * jnp.nan
    with pytest.raises(EngineFault, match="sequence 0: the target's logits are not finite"):
        score(loaded.programs.decoder.target, params, [[5, 7]], tmp_path / "out.npz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [512, 513, 5000])
def test_sequences_around_the_context(jaxspec, tiny, tmp_path, length) -> None:
    path = write_ids(tmp_path, [[5, 7], [11] * length])
    done = jaxspec("score", "--target", tiny, "--token-ids", path, "--mesh", "1", "--json")
    if length == 512:
        assert done.json["sequences"][1]["num_scored"] == 511
    else:
        expected = f"token-ids[1]: expected at most 512 tokens (max_len), got '{length} tokens'"
        assert (done.status, done.err) == (2, f"jaxspec score: error: {expected}\n")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "expected at least 1 character, got an empty file"),
        (b"caf\xc3(", "expected UTF-8, got byte 0xc3 at 3"),
        (b"a" * 10**6, "text: expected at most 512 tokens (max_len), got "),
        (b"12 34 56 " * 100, "text: expected at most 512 tokens (max_len), got "),
    ],
    ids=["empty", "not UTF-8", "enormous", "long"],
)
def test_texts_that_cannot_be_scored(jaxspec, tiny, tmp_path, content, words) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    done = jaxspec("score", "--target", tiny, "--text", tmp_path / "a.txt")
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert words in done.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[[1, 2]", "expected JSON"),
        ('{"ids": [1]}', "token-ids: expected a JSON list of lists of token ids"),
        ("[]", "token-ids: expected at least 1 list of token ids"),
        ("[1, 2]", "token-ids[0]: expected a list of at least 1 token id, got 1"),
        ('["ab"]', "token-ids[0]: expected a list of at least 1 token id, got 'ab'"),
        ("[[3], []]", "token-ids[1]: expected a list of at least 1 token id, got []"),
        ("[[3, 512]]", "token-ids[0][1]: expected a token id in [0, 511], got 512"),
        ("[[3], [-1]]", "token-ids[1][0]: expected a token id in [0, 511], got -1"),
        ("[[3.0]]", "token-ids[0][0]: expected a token id in [0, 511], got 3.0"),
        ("[[true]]", "token-ids[0][0]: expected a token id in [0, 511], got True"),
    ],
)
def test_id_lists_that_cannot_be_scored(jaxspec, tiny, tmp_path, content, words) -> None:
    (tmp_path / "ids.json").write_text(content)
    done = jaxspec("score", "--target", tiny, "--token-ids", tmp_path / "ids.json")
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert words in done.err


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return write_ids(tmp_path, [[5, 7]])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "one of the arguments --text --token-ids is required"),
        (["--token-ids", "IDS", "--text", "IDS"], "not allowed with argument"),
        (["--text", "nowhere.txt"], "nowhere.txt: expected a file that can be read (No such file or directory)"),
        (["--token-ids", "IDS", "--logits", "nowhere/out.npz"], "logits: expected a file that can be written"),
        (["--token-ids", "IDS", "--logits", "."], "logits: expected a file that can be written"),
        (["--token-ids", "IDS", "--max-len", "1"], "max_len"),
        (["--token-ids", "IDS", "--mesh", "x"], "mesh: expected auto, N or data=D,model=M"),
        (["--token-ids", "IDS", "--target", "nowhere"], "nowhere: expected the folder of a converted checkpoint"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(jaxspec, tiny, one, flags, words) -> None:
    done = jaxspec("score", "--target", tiny, *(one if flag == "IDS" else flag for flag in flags))
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert words in done.err


def test_without_a_tokenizer_only_ids_are_scored(
    jaxspec: Callable, without_tokenizer: Path, one: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("Hello")
    refused = jaxspec("score", "--target", without_tokenizer, "--text", tmp_path / "a.txt")
    expected = "text: expected --token-ids, because this checkpoint has no tokenizer"
    assert (refused.status, refused.err) == (2, f"jaxspec score: error: {expected}\n")
    assert jaxspec("score", "--target", without_tokenizer, "--token-ids", one, "--mesh", "1").status == 0
