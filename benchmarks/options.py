"""What the command line asks for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """
    `effort` multiplies the numbers of rounds; `rows` is how many rows the undo takes back.

    `processor`: **delete** and **capture** count the processor time of the server's process, not the time on the wall.
    """

    effort: float = 1.0
    rows: int = 100_000
    processor: bool = False

    def rounds(self, usual: int) -> int:
        return max(3, round(usual * self.effort))
