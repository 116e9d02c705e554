"""How a request ends: exactly at its stop, for every place of the stop in an accepted run, in every view."""

import pytest

from jaxspec import SamplingParams
from jaxspec.engine.load import EOS_IDS_MAX
from jaxspec.errors import UserError
from jaxspec.text import Detokenizer, Tokenizer
from tests.engine.conftest import MAX_LEN, SMALL_MAX_LEN, SMALL_SLOTS, Job, Rig, greedy

GAMMAS = range(1, 9)


@pytest.fixture(scope="module")
def tokenizer(checkpoints) -> Tokenizer:
    return Tokenizer.load(checkpoints("tiny-llama3") / "tokenizer")


def first_seen(ids: list[int]) -> list[int]:
    """Indices of tokens that did not occur before."""
    return [index for index, token in enumerate(ids) if token not in ids[:index]]


@pytest.mark.parametrize("gamma", GAMMAS)
def test_a_stop_token_ends_the_text_wherever_it_falls_in_an_accepted_run(gamma, self_draft, goldens):
    """C01, C02, C08: every offset of the stop within a round; nothing after it is told, counted or cached."""
    golden = goldens["p7"]
    stops = [index for index in first_seen(golden.greedy) if 0 < index < 19]
    jobs = [Job(golden.ids, greedy(40, stop_token_ids=(golden.greedy[index],)), gamma) for index in stops]
    with self_draft.watch.recording() as steps:
        finished = self_draft.run_all(jobs)
    for index, done in zip(stops, finished, strict=True):
        assert list(done.token_ids) == golden.greedy[: index + 1]
        assert done.finish_reason == "stop"
        assert done.summary.usage.completion_tokens == index + 1
        assert done.origins.count("draft") == done.summary.speculation.num_accepted_draft_tokens
        passes = sum(row.request_id == done.request_id for rows in steps for row in rows)
        assert done.summary.speculation.tokens_per_target_pass == pytest.approx(index / passes)
    cut = {row.accepted + 1 - len(row.tokens) for rows in steps for row in rows}
    assert cut >= set(range(gamma)), "some offset of the stop was not met"


def test_end_of_sequence_stops_unless_ignored(loop, self_draft, goldens):
    """The model's own end tokens, as the checkpoint lists them: p150 says 497 as its 48th token."""
    golden = goldens["p150"]
    assert golden.greedy[47] == 497
    for gamma in (0, 3, 8):
        done = self_draft.run(golden.ids, greedy(64, ignore_eos=False), gamma)
        assert (list(done.token_ids), done.finish_reason) == (golden.greedy[:48], "stop")
        assert self_draft.run(golden.ids, greedy(64), gamma).finish_reason == "length"


@pytest.mark.parametrize("gamma", [0, 4, 8])
def test_stop_and_budget_are_judged_token_by_token(gamma, self_draft, goldens):
    """C03: a stop inside the budget is a stop, one beyond it is not seen, one on its last token is a stop."""
    golden = goldens["p7"]
    for index in (i for i in first_seen(golden.greedy) if 0 < i < 12):
        for budget in (index, index + 1, index + 2):
            done = self_draft.run(golden.ids, greedy(budget, stop_token_ids=(golden.greedy[index],)), gamma)
            assert list(done.token_ids) == golden.greedy[: min(budget, index + 1)]
            assert done.finish_reason == ("stop" if index < budget else "length")


@pytest.mark.parametrize("drafter", ["self_draft", "loop"])
def test_exactly_max_tokens_are_delivered_and_reported(drafter, goldens, request):
    """C06: budgets of 8 to 24, one by one."""
    rig: Rig = request.getfixturevalue(drafter)
    whole = rig.run(goldens["p7"].ids, greedy(24), 0).token_ids
    jobs = [Job(goldens["p7"].ids, greedy(count), 4) for count in range(1, 25)]
    for job, done in zip(jobs, rig.run_all(jobs), strict=True):
        assert done.token_ids == whole[: job.sampling.max_tokens]
        assert done.summary.usage.completion_tokens == job.sampling.max_tokens
        assert (done.finish_reason, len(done.origins)) == ("length", job.sampling.max_tokens)


def shown_after(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """What a stream shows once each token is in: an unfinished character waits."""
    detokenizer, shown = Detokenizer(tokenizer), [""]
    for token in ids:
        shown.append(shown[-1] + detokenizer.push((token,)))
    return shown[1:]


def straddling(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[int, str]]:
    """(index, stop string): the last character before token ``index`` and all of its text, first met there."""
    shown = shown_after(tokenizer, ids)
    found = []
    for index in range(2, len(ids)):
        start = len(shown[index - 1]) - 1
        stop = shown[index][start:]
        if len(stop) > 1 and "\ufffd" not in stop and shown[-1].find(stop) == start:
            found.append((index, stop))
    return found


@pytest.mark.parametrize("name", ["p1", "p33"])
def test_stop_strings_end_all_views_at_the_same_token(name, self_draft, goldens, tokenizer):
    """C05, C09: strings that begin in one token and end in another, at every place of a round; metrics agree."""
    golden = goldens[name]
    stops = straddling(tokenizer, golden.greedy[:30])
    assert len(stops) > 8
    for number, (index, stop) in enumerate(stops):
        gamma = (8, 0, 3)[number % 3]
        before = self_draft.engine.loads().counters
        chunks = list(self_draft.start(Job(golden.ids, greedy(40, stop=("never", stop), logprobs=2), gamma)))
        shown, ids = "".join(chunk.text for chunk in chunks), [t for chunk in chunks for t in chunk.token_ids]
        assert shown == shown_after(tokenizer, golden.greedy)[index - 1][:-1]
        assert ids == golden.greedy[: index + 1]
        assert len(ids) == sum(len(chunk.logprobs or ()) for chunk in chunks) == sum(len(c.origins) for c in chunks)
        last = chunks[-1]
        assert last.finish_reason == "stop"
        assert last.summary is not None
        assert last.summary.usage.completion_tokens == len(ids)
        counters = self_draft.engine.loads().counters
        assert counters.num_committed_tokens - before.num_committed_tokens == len(ids)
        drafts = [origin for chunk in chunks for origin in chunk.origins].count("draft")
        assert counters.num_accepted_tokens - before.num_accepted_tokens == drafts
        assert last.summary.speculation.num_accepted_draft_tokens == drafts


def test_a_stop_string_on_the_last_token_of_the_budget_is_a_stop(self_draft, goldens, tokenizer):
    """C03 for strings: told as stop, and counted as stop."""
    golden = goldens["p33"]
    before = self_draft.engine.loads().counters.num_requests_finished
    stops = straddling(tokenizer, golden.greedy[:20])[:4]
    for index, stop in stops:
        done = self_draft.run(golden.ids, greedy(index + 1, stop=(stop,)), 8)
        assert (list(done.token_ids), done.finish_reason) == (golden.greedy[: index + 1], "stop")
    after = self_draft.engine.loads().counters.num_requests_finished
    assert after["stop"] - before.get("stop", 0) == len(stops) == 4


@pytest.mark.parametrize("gamma", [1, 8])
def test_only_text_that_can_become_a_stop_string_is_held_back(gamma, self_draft, goldens, tokenizer):
    """C10, C11, C12: stop strings that never complete delay nothing that cannot begin one, and lose nothing."""
    golden = goldens["p33"]
    ids = golden.greedy[:30]
    shown = shown_after(tokenizer, ids)
    whole = tokenizer.decode(ids)
    _, begun = straddling(tokenizer, ids)[3]
    for stop in ("ZZZZZZZZZZ", begun + "\0", whole[-1] + "\0"):
        chunks = list(self_draft.start(Job(golden.ids, greedy(30, stop=(stop,)), gamma)))
        assert "".join(chunk.text for chunk in chunks) == whole
        seen, text = 0, ""
        for chunk in chunks[:-1]:
            seen, text = seen + len(chunk.token_ids), text + chunk.text
            held = shown[seen - 1].removeprefix(text)
            assert stop.startswith(held), f"held back {held!r} for {stop!r}"


def test_a_stop_string_that_spells_a_special_token_stops_by_id(self_draft, goldens):
    """It shows no text to match."""
    done = self_draft.run(goldens["p150"].ids, greedy(64, stop=("<|end_of_text|>",)), 8)
    assert (len(done.token_ids), done.finish_reason) == (48, "stop")
    assert "<|" not in done.text


def test_a_row_has_room_for_every_kind_of_stop_at_once(make_rig, edited, tokenizer, goldens):
    """As many end tokens, stop ids and stop strings that spell special tokens as may be asked for."""
    specials = sorted(tokenizer.special_ids)
    strings = tuple(tokenizer.decode([i], skip_special=False) for i in specials)
    folder = edited("tiny-llama3", eos_token_ids=list(range(EOS_IDS_MAX - len(tokenizer.eos_ids))))
    rig = make_rig(method="none", folder=folder, warm=False, max_slots=SMALL_SLOTS, max_len=SMALL_MAX_LEN)
    sampling = greedy(20, ignore_eos=False, stop=strings[:16], stop_token_ids=tuple(range(100, 116)), min_tokens=3)
    done = rig.run(goldens["p7"].ids, sampling)
    assert list(done.token_ids) == goldens["p7"].greedy[: len(done.token_ids)]
    with pytest.raises(UserError, match=f"at most {EOS_IDS_MAX} end-of-sequence ids"):
        make_rig(method="none", folder=edited("tiny-llama3", eos_token_ids=list(range(EOS_IDS_MAX + 1))))


@pytest.mark.parametrize("drafter", ["self_draft", "near_draft", "ngram"])
def test_min_tokens_bans_stops_for_exactly_so_many_tokens(drafter, goldens, request):
    """C14: counted in tokens, not in steps, whatever the gamma; the reference decodes under the same ban."""
    rig: Rig = request.getfixturevalue(drafter)
    prompt, least = goldens["p7"].ids, 10
    stops = tuple(goldens["p7"].greedy[2:5])
    expected: list[int] = []
    while len(expected) < 24 and not (expected and expected[-1] in stops):
        logits = rig.reference.logits([[*prompt, *expected]])[0, -1].copy()
        if len(expected) < least:
            logits[list(stops)] = -1e9
        expected.append(int(logits.argmax()))
    for gamma in range(9):
        done = rig.run(prompt, greedy(24, min_tokens=least, stop_token_ids=stops), gamma)
        assert list(done.token_ids) == expected
    # Sampled, too: none of the first eleven is a stop.
    everything = tuple(goldens["p7"].greedy[10:20])
    for gamma in range(9):
        sampling = SamplingParams(max_tokens=100, min_tokens=11, seed=gamma, top_k=8, stop_token_ids=everything)
        done = rig.run(prompt, sampling, gamma)
        assert len(done.token_ids) >= 11
        assert not set(done.token_ids[:11]) & set(everything)


@pytest.mark.parametrize("drafter", ["ngram", "self_draft"])
def test_the_context_ends_at_exactly_its_last_token(drafter, goldens, request):
    """B06, B07, H20: prompts up to one below the context, budgets unset and huge, beside an ordinary request."""
    rig: Rig = request.getfixturevalue(drafter)
    base = (goldens["p150"].ids + goldens["p33"].ids * 3)[: MAX_LEN - 1]
    longest = rig.run(base[: MAX_LEN - 11], greedy(None), 0).token_ids
    assert len(longest) == 11
    for gamma in (0, 5, 8):
        jobs = [
            Job([*base[: MAX_LEN - 11], *longest[:more]], greedy(budget), gamma)
            for more in (0, 1, 2, 3, 5, 9, 10)
            for budget in (None, 2**31 - 1)
        ]
        neighbour = Job(goldens["p7"].ids, greedy(64), gamma)
        *finished, beside = rig.run_all([*jobs, neighbour])
        for job, done in zip(jobs, finished, strict=True):
            assert len(job.prompt) + len(done.token_ids) == MAX_LEN
            assert done.finish_reason == "length"
            assert rig.same_text(job, done.token_ids, longest[len(job.prompt) - (MAX_LEN - 11) :]) == 0
        assert list(beside.token_ids) == goldens["p7"].greedy
