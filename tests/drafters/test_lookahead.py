"""Lookahead decoding on the running engine: every step against plain lists, and exactness under every law.

In company, cancelled, and that nothing compiles after warming up: tests/lossless.

Every chi-square is at a false-alarm rate of 1e-6 (tests/speculate/oracle.py), and there are fewer than 20. Seeds are
fixed.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from jaxspec import Engine, SamplingParams, SpeculationConfig, options
from jaxspec.errors import UserError
from tests.drafters.jacobi import Diary, Jacobi, jacobi_of
from tests.engine.conftest import Job, Rig, greedy, widest
from tests.engine.laws import Ranks, batched, law
from tests.engine.watch import Row, Watch
from tests.speculate.oracle import assert_follows

# Which target, law and shape. ``loop`` repeats itself; ``swing`` does so less, and attends enough for a wrong mask or
# position to show.
RIGS = {
    "token": ("loop", {"rejection_sample_method": "token"}),
    "block": ("loop", {"lookahead_window": 5, "lookahead_ngram": 3, "lookahead_candidates": 3}),
    "coupled": (
        "swing",
        {
            "rejection_sample_method": "coupled",
            "lookahead_window": 2,
            "lookahead_ngram": 5,
            "lookahead_candidates": 7,
        },
    ),
}
AT_LEAST = {"token": 20, "block": 20, "coupled": 1}  # drafts that stand in some 70 tokens
SLOTS = 3
SHIFTING = (8, 3, 1, 0, 0, 2, 8, 0, 8, 8, 1, 2, 3) * 5


@pytest.fixture(scope="module")
def rigs(references, checkpoints, variant) -> Iterator[Callable[..., Rig]]:
    """``rigs(name, **engine options)``; engines close with the module."""
    references["swing"] = variant("swing", lambda name, x: x * (0.2 if "o_proj" in name else 1))
    made: dict[str, Rig] = {}

    def make(name: str, **options) -> Rig:
        key = f"{name} {options}"
        if key not in made:
            target, speculation = RIGS[name]
            engine = Engine.load(
                checkpoints(target),
                speculation=SpeculationConfig(method="lookahead", **speculation),
                **{"mesh": "1", "max_slots": SLOTS, "max_len": 240, "max_queue": 4096, **options},
            )
            widest(engine, gammas=True)  # plain steps without a window cost much less
            made[key] = Rig(engine, Watch(engine), references[target])
        return made[key]

    yield make
    for rig in made.values():
        rig.engine.close()


def prompts(rig: Rig, repeating: int, fresh: int) -> list[list[int]]:
    """Prompts that their own greedy continuation follows, then some in which nothing repeats."""
    rng = np.random.default_rng(3)
    made = [rng.permutation(490)[:size].tolist() for size in (5, 7, 11, 13)[:repeating]]
    made = [[*p, *done.token_ids, *p] for p in made for done in [rig.run(p, greedy(23), 0)]]
    return made + [rng.permutation(490)[: 9 + 4 * index].tolist() for index in range(fresh)]


def rows_of(steps: list[list[Row]], request_id: str) -> list[Row]:
    return [row for rows in steps for row in rows if row.request_id == request_id]


def follow(rig: Rig, jobs: list[Job], diary: Diary) -> tuple[list[int], Jacobi]:
    """Runs the jobs together and checks every step of each; drafts accepted by job, at least what the lists accept."""
    plain = [rig.run(*job._replace(gamma=0)).token_ids for job in jobs]
    jacobi = jacobi_of(rig)
    with rig.watch.recording() as steps, rig.watch.meddling(diary):
        done = rig.run_all(jobs)
    accepted = []
    for job, completion, text in zip(jobs, done, plain, strict=True):
        assert completion.token_ids == text
        moments = diary.moments[completion.request_id]
        rows = rows_of(steps, completion.request_id)
        accepted.append(jacobi.check(moments, rows, [*job.prompt, *text], len(job.prompt)))
        assert completion.summary.speculation.num_accepted_draft_tokens == accepted[-1]
    return accepted, jacobi


@pytest.mark.parametrize("name", RIGS)
def test_alone_every_step_is_that_of_plain_lists(rigs, name):
    """Window, pool, drafts and what is accepted, with all levels drafted and with other ones in every step."""
    rig = rigs(name)
    for gammas in (None, SHIFTING):
        accepted = 0
        for prompt in prompts(rig, 1, 1):
            found, jacobi = follow(rig, [Job(prompt, greedy(41), 8)], Diary(gammas))
            accepted += sum(found)
            assert jacobi.ties < 5
        assert accepted > AT_LEAST[name] // (1 if gammas is None else 2)


@pytest.mark.parametrize("name", RIGS)
def test_together_mixed_lengths_and_gammas_and_slots_used_again(rigs, name):
    """Three rows at a time, each with a window and a pool of its own; a row at gamma 0 beside them keeps still."""
    rig = rigs(name)
    made = prompts(rig, 2, 2)
    jobs = [Job(made[i % 4], greedy(31 - 7 * (i % 3)), gamma) for i, gamma in enumerate((8, 0, 3, 1, 2, 8))]
    accepted, _ = follow(rig, jobs, Diary())
    assert sum(accepted) > AT_LEAST[name]
    assert accepted[1] == 0
    rig.assert_idle()


def test_the_coupled_law_gives_the_plain_text_at_any_temperature(rigs):
    """Alone and together, against speculation off."""
    rig = rigs("coupled")
    jobs = []
    for seed, temperature in enumerate((0.0, 0.3, 0.7, 1.0, 0.5, 0.7)):
        sampling = SamplingParams(max_tokens=47, temperature=temperature, top_p=0.9, seed=seed, ignore_eos=True)
        jobs.append(Job(prompts(rig, 2, 2)[seed % 4], sampling, (8, 4, 1, 2, 8, 3)[seed]))
    plain = [rig.run(*job._replace(gamma=0)).token_ids for job in jobs]
    alone = [rig.run(*job) for job in jobs]
    assert [done.token_ids for done in alone] == plain
    assert [done.token_ids for done in rig.run_all(jobs)] == plain
    assert sum(done.summary.speculation.num_accepted_draft_tokens for done in alone[1:]) > 0


FILTERS = {"t1": {"temperature": 1.0}, "t0.7": {"temperature": 0.7, "top_p": 0.9}}


# Both laws under both filters: tests/lossless, with a vocabulary of 16.
@pytest.mark.parametrize(("name", "filters"), [("token", "t1"), ("block", "t0.7")])
def test_sampled_text_follows_the_target(rigs, name, filters):
    """Texts that repeat themselves, so that drafts are tried and stand. Ranked by the latest run in the text.

    Under the block law an offset that was reached says something of the tokens before it, so there all tokens of texts
    of one length count together.
    """
    rig = rigs(name)
    jobs = []
    starts = [
        Job(prompt, SamplingParams(max_tokens=120, seed=seed, ignore_eos=True, **FILTERS[filters]), 0)
        for seed, prompt in enumerate(prompts(rig, 0, 12))
    ]
    for seed, (start, done) in enumerate(zip(starts, rig.run_all(starts), strict=True)):
        long = [*start.prompt, *done.token_ids]
        short = dataclasses.replace(start.sampling, max_tokens=41)
        jobs += [Job(long, dataclasses.replace(short, seed=100 + 3 * seed + i), 8) for i in range(3)]
    before = rig.engine.loads().counters.num_accepted_tokens
    ranks = Ranks(rig, jobs, rig.chunks(jobs))
    if name == "token":
        for offset, at_least in ((0, 400), (1, 100), ("plain", 500)):
            ranks.assert_uniform(offset, at_least)
    ranks.assert_uniform("all", 1400)
    assert abs(ranks.z) < 5
    assert rig.engine.loads().counters.num_accepted_tokens - before > 100


def test_the_first_tokens_after_one_prompt_have_the_exact_joint_law(rigs):
    """The plain picture: all 16 outcomes of four tokens at top_k=2, over 400 seeds that stream through the slots."""
    rig = rigs("block")
    (prompt,) = prompts(rig, 1, 0)
    sampling = SamplingParams(max_tokens=4, temperature=1.0, top_k=2, ignore_eos=True)
    jobs = [Job(prompt, dataclasses.replace(sampling, seed=seed), 8) for seed in range(400)]
    before = rig.engine.loads().counters.num_accepted_tokens
    counts = Counter(done.token_ids for done in rig.run_all(jobs))
    assert rig.engine.loads().counters.num_accepted_tokens - before > 50
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(4):
        logits = batched(rig.reference, [[*prompt, *prefix] for prefix in expected])
        expected = {
            (*prefix, int(token)): chance * p_V[token]
            for (prefix, chance), own in zip(expected.items(), logits, strict=True)
            for p_V in [law(own[len(prompt) + len(prefix) - 1], jobs[0].sampling)]
            for token in np.flatnonzero(p_V)
        }
    assert set(counts) <= set(expected)
    assert_follows([counts[outcome] for outcome in expected], list(expected.values()))


def test_the_end_of_the_context_is_reached_without_nodes_that_have_no_slot(rigs):
    """The window counts: it stops as soon as the last of its nodes would have no slot, and plain steps go on."""
    end = 80
    rig = rigs("token", max_slots=1, max_len=end)
    (prompt,) = prompts(rig, 1, 0)
    diary = Diary()
    (accepted,), jacobi = follow(rig, [Job(prompt, greedy(None), 8)], diary)
    (moments,) = diary.moments.values()
    assert accepted > 3
    assert len(moments[-1].tokens) == end - 1
    nodes = rig.engine.programs.nodes
    assert nodes == 1 + 4 * 3 + 6 * 3 - 1
    assert {len(now.tokens) + nodes - 1 <= end for now in moments} == {True, False}
    assert all(jacobi.fed(now) == (now.gamma > 0 and len(now.tokens) + nodes - 1 <= end) for now in moments)


def test_max_tokens_and_stop_tokens_end_a_row_inside_an_n_gram(rigs):
    rig = rigs("token")
    (prompt,) = prompts(rig, 1, 0)
    text = rig.run(prompt, greedy(30), 0).token_ids
    for count in range(2, 14):
        done = rig.run(prompt, greedy(count), 8)
        assert (done.token_ids, done.finish_reason) == (text[:count], "length")
    inside = 0
    for stop in dict.fromkeys(text[1:12]):
        with rig.watch.recording() as steps:
            done = rig.run(prompt, greedy(30, stop_token_ids=(stop,)), 8)
        assert (done.token_ids, done.finish_reason) == (text[: text.index(stop) + 1], "stop")
        inside += steps != [] and len(steps[-1][0].tokens) <= steps[-1][0].accepted
    assert inside
    banned = greedy(30, stop_token_ids=text[4:7], min_tokens=19)
    plain = rig.run(prompt, banned, 0).token_ids
    assert plain != text
    assert rig.run(prompt, banned, 8).token_ids == plain


def test_a_mesh_of_four_says_the_same(rigs):
    rig, one = rigs("coupled", mesh="4", max_slots=2), rigs("coupled")
    (repeating,) = prompts(one, 1, 0)
    sampled = SamplingParams(max_tokens=31, temperature=0.7, seed=5, ignore_eos=True)
    jobs = [Job(repeating, greedy(31), 8), Job(repeating, sampled, 8), Job(repeating, sampled, 2)]
    expected = [one.run(*job).token_ids for job in jobs]
    assert [rig.run(*job).token_ids for job in jobs] == expected
    assert [done.token_ids for done in rig.run_all(jobs)] == expected
    assert rig.engine.loads().counters.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lookahead_ngram": 1}, r"lookahead_ngram: expected an integer in 2\.\.9, got 1"),
        ({"lookahead_ngram": 10}, r"lookahead_ngram: expected an integer in 2\.\.9, got 10"),
        ({"lookahead_window": 0}, r"lookahead_window: expected an integer in 1\.\.42 \(at most 128 tokens"),
        ({"lookahead_window": 43}, r"lookahead_window: expected .* with lookahead_ngram=4\), got 43"),
        ({"lookahead_candidates": 22}, r"lookahead_candidates: expected an integer in 1\.\.21 .*, got 22"),
        ({"lookahead_ngram": 9, "lookahead_candidates": 8}, r"lookahead_candidates: expected an integer in 1\.\.7"),
        ({"lookahead_window": 2.5}, "lookahead_window: expected an integer"),
    ],
)
def test_shapes_that_cannot_be_are_refused(given, words):
    with pytest.raises(UserError, match=words):
        SpeculationConfig(method="lookahead", **given)


def test_options_fix_the_shapes(checkpoints):
    parser = options.Parser(prog="p")
    options.add_speculation_flags(parser)
    flags = [
        "--method",
        "lookahead",
        "--lookahead-window",
        "5",
        "--lookahead-ngram",
        "3",
        "--lookahead-candidates",
        "2",
    ]
    config = options.speculation_from(parser.parse_args(flags))
    assert config == SpeculationConfig.from_mapping(
        {"method": "lookahead", "lookahead_window": 5, "lookahead_ngram": 3, "lookahead_candidates": 2}
    )
    assert (config.slots_per_step, SpeculationConfig(method="lookahead").slots_per_step) == (14, 30)
    for name, gammas in (("token", (0, 3)), ("block", (0, 2)), ("coupled", (0, 4))):
        config = SpeculationConfig(method="lookahead", **RIGS[name][1])
        with Engine.load(checkpoints("loop"), speculation=config, mesh="1", max_slots=SLOTS, max_len=240) as engine:
            assert engine.programs.shapes.gammas == gammas
            assert engine.programs.nodes == config.slots_per_step
