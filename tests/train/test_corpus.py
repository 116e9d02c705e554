"""Documents on disk, rows of them, their order, and features that are kept."""

import json

import numpy as np
import pytest

from jaxspec.errors import UserError
from train_heads import corpus as corpora
from train_heads.corpus import Corpus, row_source, split
from train_heads.features import FeatureFile, Size, kept
from train_heads.objective import Features
from train_heads.words import Words

ROW = 32
LENGTHS = (5, 40, 20, 11, 32, 3, 17, 9, 25, 14)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [{"prompt_ids": [i], "answer_ids": list(range(1, length))} for i, length in enumerate(LENGTHS)]
    lines[3:3] = [{"line": 4, "skipped": "too long"}, {"prompt_ids": [1, 2, 3], "answer_ids": []}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def corpus(data, tmp_path):
    return Corpus.open(tmp_path / "run" / "corpus", data, None, 64, ROW)


def test_documents_are_those_of_the_file(corpus, data, tmp_path):
    assert len(corpus) == len(LENGTHS)
    for index, length in enumerate(LENGTHS):
        document = corpus[index]
        expected = [index, *range(1, length)][:ROW]
        assert document.ids_T.tolist() == expected
        assert document.answer_T.tolist() == [False] + [True] * (len(expected) - 1)
    built = corpus.built
    assert (built.documents, built.cut, built.without_answer) == (len(LENGTHS), 1, 1)
    assert built.tokens == sum(min(length, ROW) for length in LENGTHS)
    expected = np.bincount([i for length in LENGTHS for i in range(1, min(length, ROW))], minlength=64)
    np.testing.assert_array_equal(corpus.counts_V, expected)
    # The same data opens what was built; a folder belongs to its data, for its features and checkpoints do.
    before = (corpus.folder / corpora.META).stat().st_mtime_ns
    assert Corpus.open(corpus.folder, data, None, 64, ROW).built == built
    assert (corpus.folder / corpora.META).stat().st_mtime_ns == before
    with data.open("a") as file:
        file.write('{"prompt_ids": [1], "answer_ids": [2]}\n')
    with pytest.raises(UserError, match="was built from another data_sha256; give another --out"):
        Corpus.open(corpus.folder, data, None, 64, ROW)
    assert len(Corpus.open(tmp_path / "more", data, None, 64, ROW)) == len(LENGTHS) + 1
    data.write_text('{"prompt_ids": [1], "answer_ids": []}\n')
    with pytest.raises(UserError, match="at least one document with an answer"):
        Corpus.open(tmp_path / "other", data, None, 64, ROW)
    assert not list(tmp_path.glob("other*")), "nothing half-built stays"


def test_an_order_that_resumes(corpus):
    """Any step's batch follows from the seed alone; every epoch sees every document once, in another order."""
    train, out = split(corpus, 0.2, 3)
    assert sorted(train + out) == list(range(len(corpus)))
    assert out
    source = row_source(corpus, train, ROW)
    batches = corpora.batches(source, 2, 7)
    numbers = [n for step in range(len(source)) for n in batches[step].numbers]
    first, second = numbers[: len(source)], numbers[len(source) :]
    assert sorted(first) == sorted(second) == list(range(len(source)))
    assert first != second
    again = corpora.batches(row_source(corpus, train, ROW), 2, 7)[len(source) - 1]
    assert again.numbers == batches[len(source) - 1].numbers
    np.testing.assert_array_equal(again.rows.tokens_BT, batches[len(source) - 1].rows.tokens_BT)
    seen = sorted(document for number in first for document in source.plans[number])
    assert seen == train
    # One more document moves no other between what is trained on and what is held out.
    assert set(split(corpus, 0.2, 3)[1]) == set(out)


def test_padding_rows_have_no_document(corpus):
    source = row_source(corpus, list(range(len(corpus))), ROW)
    batch = corpora.padded(source, [1], 3)
    assert batch.numbers == (1,)
    assert batch.rows.tokens_BT.shape == (3, ROW)
    assert not batch.rows.segments_BT[1:].any()
    assert (batch.rows.positions_BT[1:] == ROW).all()
    assert corpora.in_order(source, 4, 6) == [range(4), range(4, 6)]


def test_features_come_from_disk_once_they_were_computed(corpus, tmp_path):
    source = row_source(corpus, list(range(len(corpus))), ROW)
    size = Size(len(source), ROW, 6, np.dtype(np.float32))
    file = FeatureFile(tmp_path / "features", "train", size, 2)
    calls = []

    def compute(numbers):
        def now():
            calls.append(tuple(numbers))
            values = np.array([[[n + 0.5] * 6] * ROW for n in numbers], np.float32)
            return Features(values[..., :2], values[..., 2:])

        return now

    batch = corpora.padded(source, [2, 0], 2)
    for _ in range(2):
        found = file.get(batch, 2, compute([2, 0]))
        assert found.hidden_BTD.shape == (2, ROW, 2)
        assert found.taps_BTX.shape == (2, ROW, 4)
        assert found.hidden_BTD[:, 0, 0].tolist() == [2.5, 0.5]
    assert calls == [(2, 0)]
    # Another process finds them; a row that is not there makes its batch anew.
    other = FeatureFile(tmp_path / "features", "train", size, 2)
    assert other.get(corpora.padded(source, [0], 2), 2, compute([0])).taps_BTX[:, 3, 1].tolist() == [0.5, 0.0]
    other.get(corpora.padded(source, [0, 1], 2), 2, compute([0, 1]))
    assert calls == [(2, 0), (0, 1)]


def test_features_are_kept_where_they_are_used_again(tmp_path):
    small, huge = (Size(rows, 512, 2304, np.dtype(np.float32)) for rows in (10, 10**9))
    assert kept("auto", small, 3.0, tmp_path)
    assert not kept("auto", small, 1.0, tmp_path)
    assert not kept("auto", huge, 3.0, tmp_path)
    assert kept("disk", huge, 1.0, tmp_path)
    assert not kept("recompute", small, 3.0, tmp_path)


def test_words():
    counts = np.array([0, 5, 1, 5, 9, 0, 2, 0])
    words = Words.most_frequent(counts, 4, {7})
    assert words.ids == (1, 3, 4, 7)  # the end of a text is always among them
    np.testing.assert_array_equal(words.place(np.array([1, 2, 7])), [0, 4, 3])
    np.testing.assert_array_equal(words.target_ids(np.array([0, 3])), [1, 7])
    assert Words.most_frequent(counts, None).whole
    with pytest.raises(UserError, match="draft_vocab_size: expected 1 to 8"):
        Words.most_frequent(counts, 9)
