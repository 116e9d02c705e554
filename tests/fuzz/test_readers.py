"""Thousands of broken sources per format: each is opened, or refused in lines that a user can read."""

import pytest

from tests.fuzz.bases import FORMATS
from tests.fuzz.broken import BREAKS
from tests.fuzz.conftest import told

MUTANTS = 2_200  # per format
COMMANDS = 20  # per format, through the whole command


@pytest.mark.parametrize("format_name", FORMATS)
def test_every_mutant_opens_or_is_refused_in_printable_lines(fuzz, format_name) -> None:
    """No other exception, two seconds and a gigabyte at most, no file written; names that leave the folder and pickles
    that call something are never accepted (in ``judging.py``)."""
    report = fuzz(format_name, 0, MUTANTS, batches=2)
    assert not report["failures"], told(format_name, report)
    assert report["harmless"] + report["refused"] == MUTANTS
    # The bases are right, and most changes to them are not.
    assert report["harmless"] > 0
    assert report["refused"] > 0.8 * MUTANTS, report


@pytest.mark.parametrize("format_name", FORMATS)
def test_the_command_refuses_mutants_with_status_2_and_leaves_nothing(fuzz, format_name) -> None:
    """One ``error:`` line per finding, those of the function; nothing at the destination, beside it, or in TMPDIR."""
    report = fuzz(format_name, 1_000_000, COMMANDS, module="command")
    assert not report["failures"], told(format_name, report)
    assert report["harmless"] + report["refused"] == COMMANDS
    assert report["refused"] > 0.6 * COMMANDS, report


# Fault -> format, mutants, and what the report must say of it.
SEEN = {
    "believes entries": ("safetensors", 200, ("TypeError", "ValueError")),
    "believes lengths": ("gguf", 300, ("Unable to allocate",)),
    "opens anything": ("meta", 400, ("Overtime",)),
    "prints anything": ("safetensors", 300, ("not one printable line", "a finding of")),
    "follows paths": ("safetensors", 700, ("accepted, but it must be refused",)),
    "runs pickles": ("heads", 1_000, ("files changed outside",)),
    "writes beside": ("meta", 50, ("files changed outside",)),
}


@pytest.mark.parametrize("fault", SEEN)
def test_the_fuzzer_sees_a_reader_that_is_wrong(fuzz, fault) -> None:
    format_name, count, expected = SEEN[fault]
    report = fuzz(format_name, 0, count, "--break", fault)
    reasons = " ".join(failure["why"] for failure in report["failures"])
    for words in expected:
        assert words in reasons, told(format_name, report)


def test_the_fuzzer_names_the_mutant_that_took_the_process_down(fuzz) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"ended with 139 at mutant gguf \d+: .*type 24"):
        fuzz("gguf", 1_000, 1_000, "--break", "crashes")


def test_every_fault_made_on_purpose_is_looked_for() -> None:
    assert {*SEEN, "crashes"} == set(BREAKS)
