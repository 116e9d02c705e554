"""A small stock ledger: what came in, what went out, what is left."""

from dataclasses import dataclass, field


@dataclass
class Ledger:
    name: str
    stock: dict[str, int] = field(default_factory=dict)
    history: list[tuple[str, str, int]] = field(default_factory=list)

    def receive(self, item: str, count: int) -> None:
        if count <= 0:
            raise ValueError(f"count must be positive, got {count}")
        self.stock[item] = self.stock.get(item, 0) + count
        self.history.append(("receive", item, count))

    def ship(self, item: str, count: int) -> None:
        left = self.stock.get(item, 0)
        if count > left:
            raise ValueError(f"only {left} of {item} left")
        self.stock[item] = left - count
        self.history.append(("ship", item, count))

    def report(self) -> str:
        lines = [f"Ledger {self.name}"]
        for item, count in sorted(self.stock.items()):
            lines.append(f"{item}: {count}")
        return "\n".join(lines)
