"""The three prompts of the demo. Copying is what speculation is made for; free prose is where it must not hurt."""

import dataclasses
from pathlib import Path

from jaxspec import Prompt

MATERIAL = Path(__file__).resolve().parent.parent / "assets" / "demo"


@dataclasses.dataclass(frozen=True)
class DemoPrompt:
    """One prompt with where its completion ends."""

    name: str
    shown: str  # what a reader of the terminal is told
    prompt: Prompt
    max_tokens: int
    stop: tuple[str, ...] = ()


def chat() -> DemoPrompt:
    """Free prose: hardly anything can be looked up."""
    question = "Give me five tips for keeping a small vegetable garden."
    return DemoPrompt("chat", question, Prompt(chat=(("user", question),)), max_tokens=128)


def edit() -> DemoPrompt:
    """A code file, the same file with a class renamed, and the first lines of a third copy to go on with."""
    before = (MATERIAL / "inventory.py").read_text()
    after = before.replace("Ledger", "Store").replace("ledger", "store")
    opening = "".join(after.splitlines(keepends=True)[:5])
    text = (
        f"inventory.py, before the change:\n```python\n{before}```\n\n"
        f"inventory.py, after the change:\n```python\n{after}```\n\n"
        f"inventory.py, after the change:\n```python\n{opening}"
    )
    shown = "inventory.py twice, before and after a rename; the model writes the third copy"
    return DemoPrompt("edit", shown, Prompt(text=text), max_tokens=272, stop=("```",))


def extract() -> DemoPrompt:
    """A passage, and the wish to have much of it back word for word."""
    passage = " ".join((MATERIAL / "passage.txt").read_text().split())
    wish = "Copy out, word for word, the sentences of the passage that contain a year."
    prompt = Prompt(chat=(("user", f"Here is a passage.\n\n{passage}\n\n{wish}"),))
    return DemoPrompt("extract", f"a passage about a lighthouse. {wish}", prompt, max_tokens=176)


def demo_prompts() -> tuple[DemoPrompt, ...]:
    return chat(), edit(), extract()
