"""The shape of the code: short modules, short functions, and every module in its layer."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sqlguard"
TESTS = ROOT / "tests"
MODULES = sorted(PACKAGE.rglob("*.py"))
LONGEST_MODULE = 400
LONGEST_FUNCTION = 40
#: A longer function says why, on the line of its `def` or just above.
REASON = "# long: "
CONTRACTS: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
    "importlinter"
]["contracts"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_MODULE
    assert list(long_functions(text)) == []


def test_modules_of_the_tests_are_short() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in TESTS.rglob("*.py")}
    assert {str(path.relative_to(ROOT)): n for path, n in lines.items() if n > LONGEST_MODULE} == {}


def test_a_long_function_is_found_unless_it_gives_a_reason() -> None:
    body = "    x = 1\n" * LONGEST_FUNCTION
    assert list(long_functions(f"def f():\n{body}")) == ["f: 41 lines"]
    assert list(long_functions(f"class C:\n    def f(self):\n{body.replace('    ', '        ')}")) == [
        "f: 41 lines"
    ]
    assert list(long_functions(f"def f():  # long: a table\n{body}")) == []
    assert list(long_functions(f"# long: a table\n@wrap\ndef f():\n{body}")) == []
    assert list(long_functions(f'def f():\n    """a\n\n    b"""\n{body[10:]}')) == []
    assert list(long_functions(f"# long: \ndef f():\n{body}")) == ["f: 41 lines"]


def test_every_module_of_the_core_is_kept_from_input_and_output() -> None:
    layers, core, *_ = CONTRACTS
    below = layers["layers"][layers["layers"].index("(gate)") :]
    names = {part.strip(" ()") for line in below for part in line.split("|")}
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    # `ports` asks the system for a free port and is not of the core.
    assert {f"sqlguard.{name}" for name in (names & there) - {"ports"}} == set(core["source_modules"])


def long_functions(text: str) -> Iterator[str]:
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
            continue
        length = node.end_lineno - node.lineno + 1 - docstring_lines(node)
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        signature = lines[max(first - 2, 0) : node.body[0].lineno - 1]
        if length > LONGEST_FUNCTION and not any(gives_reason(line) for line in signature):
            yield f"{node.name}: {length} lines"


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many lines are the docstring: that of a rule is its page, and no code."""
    first = node.body[0]
    if ast.get_docstring(node) is None or first.end_lineno is None:
        return 0
    return first.end_lineno - first.lineno + 1


def gives_reason(line: str) -> bool:
    _, found, reason = line.partition(REASON)
    return bool(found and reason.strip())
