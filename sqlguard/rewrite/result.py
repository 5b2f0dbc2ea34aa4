"""
What a rewrite gives: the text to run, and how to speak of it in the words of the text that was sent.
"""

from dataclasses import dataclass

from sqlguard.rewrite.edits import Copied


@dataclass(frozen=True, slots=True)
class Rewritten:
    """`tag` is the command tag's verb for the client, `writes_soft` the oids of the tables marked in."""

    text: str
    changed: bool = False
    tag: str | None = None
    writes_soft: tuple[int, ...] = ()
    copied: tuple[Copied, ...] = ()
    #: What `tag` has to be when a statement is PREPAREd here and EXECUTEd later.
    execute_tag: str | None = None

    def position(self, p: int) -> int | None:
        """Return which character of the original *p* of the new text is, from 1; None if it is ours."""
        if not self.changed:
            return p
        for run in self.copied:
            if run.new < p <= run.new + run.length:
                return run.old + p - run.new
        return None
