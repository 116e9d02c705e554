"""What the documentation promises by name is there."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def test_every_page_below_docs_is_in_an_index():
    for index in (ROOT / "docs" / "README.md", ROOT / "docs" / "decisions" / "README.md"):
        linked = {link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", index.read_text())}
        pages = {page.name for page in index.parent.glob("*.md")} - {index.name}
        assert pages <= linked, index


def test_readme_tree_names_what_is_there():
    readme = (ROOT / "README.md").read_text()
    (tree,) = re.findall(r"## What is where\n\n```\n(.*?)```", readme, flags=re.DOTALL)
    folders: list[str] = []
    named = set()
    for line in tree.splitlines():
        if not line.strip():
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        # Columns are two or more spaces apart; the first holds one or several names.
        names = re.split(r"\s{2,}", line.strip())[0].split()
        named |= {"/".join([*folders[:depth], name]).replace("//", "/") for name in names}
        if names[0].endswith("/"):
            folders[depth:] = [names[0].rstrip("/")]
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    assert {f"{folder}/" for folder in ("jaxspec", "checkpoints_convert", "serve", "tests", "scripts", "docs")} <= named


def test_readme_commands_are_targets_and_console_scripts():
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    commands = set(re.findall(r"(?:^|`)(?:MESH=4 )?make ([a-z-]+)", readme, flags=re.MULTILINE))
    assert {"demo", "test"} <= commands <= targets
    scripts = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"])
    assert set(re.findall(r"\.venv/bin/([a-z-]+)", readme)) <= scripts
