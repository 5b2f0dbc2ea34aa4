"""
The SQL in a plpgsql body: every expression and statement of it, and the types of its variables.

libpg_query reads the body. Of a variable of a type that it does not know it keeps neither type nor default, so the
declaration is looked up among the body's tokens; what can't be found there is not understood (ValueError).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import postgast

from sqlguard.catalog import Catalog, Function
from sqlguard.statement.model import Session

#: Statements of plpgsql that only compute and read; everything else does not pass.
_HARMLESS = frozenset(
    {
        "PLpgSQL_function",
        "PLpgSQL_stmt_block",
        "PLpgSQL_stmt_assign",
        "PLpgSQL_stmt_if",
        "PLpgSQL_if_elsif",
        "PLpgSQL_stmt_case",
        "PLpgSQL_case_when",
        "PLpgSQL_stmt_loop",
        "PLpgSQL_stmt_while",
        "PLpgSQL_stmt_fori",
        "PLpgSQL_stmt_fors",
        "PLpgSQL_stmt_foreach_a",
        "PLpgSQL_stmt_exit",
        "PLpgSQL_stmt_return",
        "PLpgSQL_stmt_return_next",
        "PLpgSQL_stmt_return_query",
        "PLpgSQL_stmt_raise",
        "PLpgSQL_raise_option",
        "PLpgSQL_stmt_assert",
        "PLpgSQL_stmt_perform",
        "PLpgSQL_stmt_execsql",
        "PLpgSQL_stmt_getdiag",
        "PLpgSQL_diag_item",
        "PLpgSQL_exception_block",
        "PLpgSQL_exception",
        "PLpgSQL_condition",
        "PLpgSQL_expr",
        "PLpgSQL_var",
        "PLpgSQL_type",
        "PLpgSQL_row",
        "PLpgSQL_rec",
        "PLpgSQL_recfield",
    }
)
#: RawParseMode of an expression: 0 a statement, 2 an expression, 3 to 5 assignments.
_STATEMENT = 0
_EXPRESSION = 2


def texts(function: Function, session: Session, catalog: Catalog) -> Iterator[str]:
    """Yield every SQL text of a plpgsql body as statements. Raises ValueError for what is not known."""
    arguments = ", ".join(_arguments(function))
    out = sum(mode in ("o", "t", "b") for mode in function.arg_modes)
    returns = "text" if out == 1 else "record"
    if function.returns_set:
        returns = f"SETOF {returns}"
    quote = "$sqlguard_body$"
    if quote in function.source:
        raise ValueError(function.oid)
    text = f"CREATE FUNCTION f({arguments}) RETURNS {returns} LANGUAGE plpgsql AS {quote}{function.source}{quote}"
    body = _Body(function.source, session, catalog)
    yield from body.texts(postgast.parse_plpgsql(text))


def _arguments(function: Function) -> Iterator[str]:
    """Yield the arguments as libpg_query has to know them: by name. Their types are nothing to it."""
    names = function.arg_names or ("",) * len(function.arg_types)
    modes = function.arg_modes or ("i",) * len(names)
    for name, mode in zip(names, modes, strict=True):
        word = {"o": "OUT ", "t": "OUT ", "b": "INOUT "}.get(mode, "")
        quoted = '"' + name.replace('"', '""') + '" ' if name else ""
        yield f"{word}{quoted}text"


@dataclass(frozen=True, slots=True)
class _Body:
    source: str
    session: Session
    catalog: Catalog

    def texts(self, node: Any) -> Iterator[str]:
        if isinstance(node, list):
            for item in node:
                yield from self.texts(item)
        elif isinstance(node, dict):
            for name, value in node.items():
                if (name.startswith("PLpgSQL_") and name not in _HARMLESS) or name == "dynquery":
                    raise ValueError(name)
                if name == "PLpgSQL_expr":
                    yield from _text(value)
                elif name == "PLpgSQL_type":
                    yield self._value_of(str(value["typname"]))
                elif name == "PLpgSQL_rec":
                    yield from self._declared(str(value["refname"]))
                else:
                    yield from self.texts(value)

    def _value_of(self, name: str) -> str:
        """Return a statement that makes a value of a variable's type, as assigning to it does."""
        base, sign, word = name.rpartition("%")
        if not sign:
            return f"SELECT NULL::{name}"
        names = [part.strip() for part in base.split(".")]
        if any(not part.replace("_", "").isalnum() for part in names):
            raise ValueError(name)
        if word.strip().lower() == "rowtype":
            return f"SELECT NULL::{base}"
        if len(names) == 1:
            return "SELECT"  # another variable's type, which is looked at where that one is declared
        schema = names[-3] if len(names) > 2 else None  # noqa: PLR2004  schema.table.column
        table = self.catalog.table(schema, names[-2], self.session.search_path)
        column = table.column(names[-1]) if table is not None else None
        if column is None:
            raise ValueError(name)
        return f"SELECT NULL::{column.type_name}"

    def _declared(self, variable: str) -> Iterator[str]:
        """Yield the type and the default of a variable, as the body declares it."""
        if variable.startswith("$") or variable in ("new", "old"):
            return
        raw = self.source.encode()
        words = [raw[t.start : t.end].decode() for t in postgast.scan(self.source).tokens]
        found = False
        for at, word in enumerate(words[:-2]):
            first = at == 0 or words[at - 1].lower() in _BEFORE
            if first and _folded(word) == variable and _is_word(words[at + 1]):
                found = True
                yield from self._declaration(words[at + 1 :])
        if not found:
            raise ValueError(variable)

    def _declaration(self, words: Sequence[str]) -> Iterator[str]:
        """`[CONSTANT] type [COLLATE name] [NOT NULL] [{ DEFAULT | := | = } expression] ;` -> type, expression."""
        end = next((n for n, word in enumerate(words) if word == ";"), len(words))
        signs = (n for n, word in enumerate(words[:end]) if word.lower() in _DEFAULT)
        sign = next(signs, end)
        kind = [word for word in words[:sign] if word.lower() != "constant"]
        kind = kind[: next((n for n, w in enumerate(kind) if w.lower() in ("collate", "not")), len(kind))]
        if kind and kind[0].lower() in ("cursor", "no", "scroll", "alias"):
            raise ValueError(kind[0])
        if [w.lower() for w in kind] != ["record"]:
            yield self._value_of("".join(kind))
        if sign < end:
            yield f"SELECT {' '.join(words[sign + 1 : end])}"


#: What a declaration can stand behind.
_BEFORE = frozenset({";", "declare", ">>", ">"})
_DEFAULT = frozenset({":=", "=", "default"})


def _folded(word: str) -> str:
    return word[1:-1].replace('""', '"') if word.startswith('"') else word.lower()


def _is_word(word: str) -> bool:
    return word.startswith('"') or word[:1].isalpha() or word[:1] == "_"


def _text(expression: dict[str, Any]) -> Iterator[str]:
    query, mode = str(expression["query"]), expression.get("parseMode", _STATEMENT)
    if mode == _STATEMENT:
        yield query
    elif mode == _EXPRESSION:
        yield f"SELECT {query}"
    else:
        # An assignment: `variable := expression`; the variable may have subscripts, which are expressions too.
        target, sign, value = query.partition(":=")
        if not sign:
            target, sign, value = query.partition("=")
        if not sign or not target.strip():
            raise ValueError(query)
        if "[" in target:
            yield f"SELECT {target}"
        yield f"SELECT {value}"
