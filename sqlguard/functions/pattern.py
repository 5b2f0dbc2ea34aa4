"""
Tell a tame regular expression from one that PostgreSQL's engine may chew on for ever.

Time explodes with repetitions inside repetitions, and memory with counted ones inside counted ones. So
those are counted, by reading the pattern as PostgreSQL does: escapes, bracket expressions, groups,
quantifiers.
"""

from dataclasses import dataclass

MAX_LENGTH = 2_000
#: `^((a+b*)+c)*$` has three levels; people do not write a fourth.
MAX_NESTING = 3
#: Copies of the innermost atom that counted repetitions ask for, `(a{50}){50}` being 2500.
MAX_COPIES = 10_000


@dataclass(slots=True)
class _Group:
    """The deepest repetition and the most copies of anything seen in one group so far."""

    nesting: int = 0
    copies: int = 1

    def include(self, nesting: int, copies: int) -> None:
        self.nesting = max(self.nesting, nesting)
        self.copies = max(self.copies, copies)


def tame(pattern: str) -> bool:
    """Whether *pattern* keeps within the limits above. A pattern the server would reject may be either."""
    if len(pattern) > MAX_LENGTH:
        return False
    if pattern.startswith("***="):
        return True
    groups = [_Group()]
    position = 0
    while position < len(pattern):
        char = pattern[position]
        atom = _Group()
        if char == "(":
            groups.append(_Group())
            position += 1
            continue
        if char == ")" and len(groups) > 1:
            atom = groups.pop()
            position += 1
        elif char == "[":
            position = _after_bracket(pattern, position)
        else:
            position += 2 if char == "\\" else 1
        position, repeats, copies = _quantifier(pattern, position)
        groups[-1].include(atom.nesting + repeats, atom.copies * copies)
    # Groups that are never closed count as closed here.
    nesting = max(group.nesting for group in groups)
    return nesting <= MAX_NESTING and all(group.copies <= MAX_COPIES for group in groups)


def _after_bracket(pattern: str, start: int) -> int:
    """Return the position after the bracket expression that opens at *start*."""
    position = start + 1
    if pattern[position : position + 1] == "^":
        position += 1
    # A `]` in the first place stands for itself.
    first = position
    while position < len(pattern):
        pair = pattern[position : position + 2]
        if pair in ("[:", "[.", "[="):
            end = pattern.find(pair[1] + "]", position + 2)
            position = len(pattern) if end < 0 else end + 2
        elif pattern[position] == "\\":
            position += 2
        elif pattern[position] == "]" and position > first:
            return position + 1
        else:
            position += 1
    return position


def _quantifier(pattern: str, position: int) -> tuple[int, int, int]:
    """Read quantifiers at *position*: where they end, how many repeat, how many copies they ask for."""
    repeats, copies = 0, 1
    while position < len(pattern):
        char = pattern[position]
        if char in "*+":
            repeats += 1
            position += 1
        elif char == "?":
            position += 1
        elif char == "{" and pattern[position + 1 : position + 2].isdecimal():
            end = pattern.find("}", position)
            if end < 0:
                return len(pattern), repeats, copies
            bounds = [int(b[:9]) for b in pattern[position + 1 : end].split(",") if b.isdecimal()]
            repeats += 1
            copies *= max([1, *bounds])
            position = end + 1
        else:
            break
        # `+?` is one quantifier: the question mark only makes it lazy, so the loop swallows it.
    return position, min(repeats, 1), copies
