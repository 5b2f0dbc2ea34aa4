"""What the command line asks for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """`effort` multiplies the numbers of rounds; `rows` is how many rows the undo takes back."""

    effort: float = 1.0
    rows: int = 100_000

    def rounds(self, usual: int) -> int:
        return max(3, round(usual * self.effort))
