"""Heads that do not sit on the target, and trees that cannot be, are refused before anything is compiled."""

import json
import shutil

import pytest

from checkpoints_convert.heads import convert_heads
from jaxspec import Engine, SpeculationConfig, options
from jaxspec.errors import UserError
from tests.engine.test_loading import FINGERPRINT, refused


@pytest.fixture(scope="module")
def edited_heads(heads_folders, tmp_path_factory):
    """``edited_heads(fixture, file, **values)``: a copy with other values in a JSON file."""

    def edit(fixture: str, file: str = "config.json", **values):
        folder = tmp_path_factory.mktemp("edited") / fixture
        shutil.copytree(heads_folders(fixture), folder)
        data = json.loads((folder / file).read_text())
        assert set(values) <= set(data)
        (folder / file).write_text(json.dumps(data | values))
        return folder

    return edit


def with_heads(folder, method: str, **values) -> dict:
    return {"heads": folder, "speculation": SpeculationConfig(method=method, **values)}


def test_heads_of_another_target_are_refused_with_every_difference(checkpoints, heads_folders, edited_heads):
    eagle3 = heads_folders("eagle3")
    refused(checkpoints("tiny-llama3"), r"the head sees layers \[2, 4, 5\], the target has 0\.\.3", heads=eagle3)
    stranger = edited_heads("eagle1", "manifest.json", tokenizer_fingerprint=FINGERPRINT)
    target = checkpoints("tiny-llama3")
    own = json.loads((target / "manifest.json").read_text())["tokenizer_fingerprint"]
    refused(
        target,
        f"tokenizer: the heads were recorded with fingerprint {FINGERPRINT}, the target has {own}",
        heads=stranger,
    )
    other = edited_heads("medusa", "manifest.json", family="camel", tokenizer_fingerprint=FINGERPRINT)
    refused(target, r"fingerprint .*; family: the heads were recorded with camel 3, the target is llama 3", heads=other)
    refused(checkpoints("tiny-draft"), r"hidden size: the head was made for 64, the target has 32", heads=stranger)


def test_heads_for_another_method_and_folders_of_another_kind_are_refused(checkpoints, heads_folders):
    target, medusa = checkpoints("tiny-llama3"), heads_folders("medusa")
    refused(target, r"expected heads for method eagle, got heads for medusa", **with_heads(medusa, "eagle"))
    refused(target, r"expected speculative heads, found a model", heads=target)
    refused(target, r"expected a model, found medusa heads", draft=medusa)
    refused(medusa, r"expected a model, found medusa heads")
    refused(target, r"method eagle3 needs a folder of heads, got none", **with_heads(None, "eagle3"))


@pytest.mark.parametrize(
    ("fixture", "values", "message"),
    [
        ("medusa", {"tree_choices": [[0], [1, 0]]}, r"path \[1, 0\]: its parent \[1\] is missing"),
        ("medusa", {"tree_choices": "1,1,1,1,1,1"}, r"tree_choices: expected at most 5 levels, one per head, got 6"),
        ("medusa", {"tree_choices": "8,8"}, r"at most 63 nodes"),
        ("eagle1", {"tree_topk": 0}, r"tree_topk: expected an integer in 1\.\.63"),
        ("eagle1", {"tree_topk": 64}, r"tree_topk: expected an integer in 1\.\.63"),
        ("eagle1", {"tree_depth": 9}, r"tree_depth: expected an integer in 1\.\.8, got 9"),
        ("eagle1", {"tree_depth": True}, r"tree_depth: expected an integer in 1\.\.8, got True"),
        ("eagle1", {"tree_nodes": 65}, r"tree_nodes: expected an integer in 2\.\.64, got 65"),
        ("eagle1", {"heads": 7}, r"heads: expected the path of a checkpoint folder, got 7"),
    ],
)
def test_trees_that_cannot_be_are_refused(fixture, values, message, checkpoints, heads_folders):
    method = "eagle" if fixture == "eagle1" else fixture

    def load() -> None:
        speculation = SpeculationConfig(method=method, **values)
        heads = heads_folders(fixture)
        Engine.load(checkpoints("tiny-llama3"), heads=heads, speculation=speculation, mesh="1", max_len=61)

    with pytest.raises(UserError, match=message):
        load()


def test_heads_without_a_target_are_taken_with_a_line(checkpoints, shared, tmp_path, caplog):
    caplog.set_level("INFO", "jaxspec")
    convert_heads(shared / "fixtures" / "eagle1", tmp_path / "heads")
    with Engine.load(checkpoints("tiny-llama3"), heads=tmp_path / "heads", mesh="1", max_len=61, max_slots=2) as engine:
        info = engine.server_info()
        assert (info.method, info.prompt_lookup_max, info.prompt_lookup_min) == ("eagle", None, None)
    assert caplog.text.count("whether they know its tokenizer is not known") == 1


def test_a_head_with_a_shorter_context_is_taken_with_a_line(checkpoints, edited_heads, caplog):
    caplog.set_level("INFO", "jaxspec")
    short = edited_heads("eagle1", max_position_embeddings=40)
    with Engine.load(checkpoints("tiny-llama3"), heads=short, mesh="1", max_len=61, max_slots=2):
        pass
    assert caplog.text.count("trained for 40 positions, past them rows decode without it") == 1


def test_folders_and_options_that_a_method_has_no_use_for_are_named(checkpoints, heads_folders, caplog):
    caplog.set_level("INFO", "jaxspec")
    speculation = SpeculationConfig(method="ngram", tree_choices="2,1")
    with Engine.load(checkpoints("tiny-llama3"), heads="/nowhere", speculation=speculation, mesh="1", max_len=61):
        pass
    assert "heads /nowhere: ignored by method ngram" in caplog.text
    assert "tree_choices: ignored" in caplog.text
    eagle = SpeculationConfig(method="eagle", heads=str(heads_folders("eagle1")), model="/elsewhere")
    with Engine.load(checkpoints("tiny-llama3"), speculation=eagle, mesh="1", max_len=61):
        pass
    assert "draft /elsewhere: ignored by method eagle" in caplog.text


def test_the_shapes_that_a_tree_needs(checkpoints, heads_folders):
    """One bucket per tree, all of GAMMA_BUCKETS for a chain."""
    target = checkpoints("tiny-llama3")

    def gammas(fixture: str, method: str, **values) -> tuple[int, ...]:
        options_ = with_heads(heads_folders(fixture), method, **values)
        with Engine.load(target, mesh="1", max_len=61, max_slots=2, **options_) as engine:
            return engine.programs.shapes.gammas

    assert gammas("medusa", "medusa") == (0, 4)  # five heads, but the default tree has better uses for its 15 nodes
    assert gammas("medusa", "medusa", num_speculative_tokens=3) == (0, 3)
    assert gammas("medusa", "medusa", tree_choices="4,2") == (0, 2)
    assert gammas("eagle1", "eagle") == (0, 5)
    assert gammas("eagle1", "eagle", num_speculative_tokens=2) == (0, 2)
    assert gammas("eagle1", "eagle", tree_depth=7) == (0, 7)
    assert gammas("eagle1", "eagle", tree_topk=1) == (0, 2, 4, 8)


def parsed(*arguments: str) -> SpeculationConfig:
    parser = options.Parser(prog="p")
    options.add_speculation_flags(parser)
    return options.speculation_from(parser.parse_args(arguments))


def test_the_heads_name_the_method(heads_folders, checkpoints):
    """Flags and JSON say the same; a model in the place of heads is taken for heads when the method is theirs."""
    for fixture, method in (("medusa", "medusa"), ("eagle1", "eagle"), ("eagle3", "eagle3")):
        folder = str(heads_folders(fixture))
        assert parsed("--heads", folder).method == method
        assert parsed("--speculative-config", json.dumps({"method": method, "model": folder})).heads_folder == folder
    medusa = str(heads_folders("medusa"))
    assert parsed("--heads", medusa, "--tree-choices", "4,2").tree_choices == "4,2"
    eagle = parsed("--heads", medusa, "--tree-topk", "3", "--tree-depth", "2", "--tree-nodes", "7")
    assert (eagle.tree_topk, eagle.tree_depth, eagle.tree_nodes) == (3, 2, 7)
    for arguments, message in (
        (("--heads", medusa, "--draft", "d"), "method: expected one, because both --draft and --heads are given"),
        (("--method", "eagle"), "method eagle: expected the heads' folder in --heads, got none"),
        (("--heads", "/nowhere"), "/nowhere: expected the folder of a converted checkpoint"),
        (("--heads", str(checkpoints("tiny-llama3"))), "expected speculative heads, found a model"),
    ):
        with pytest.raises(UserError, match=message):
            parsed(*arguments)
    assert "ignored" in (options.unused_note(parsed("--method", "ngram", "--heads", "h")) or "")
    assert options.unused_note(parsed("--method", "eagle", "--draft", "h")) is None
    assert "ignored" in (options.unused_note(parsed("--method", "eagle", "--heads", "h", "--draft", "d")) or "")
