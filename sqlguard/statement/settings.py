"""SET, RESET and SHOW: which setting, to which value."""

from typing import Any

Body = dict[str, Any]


def value_of(node: Body) -> str | None:  # noqa: PLR0911  one return per kind of constant
    """Return a SET argument as text, None when it is not a plain constant."""
    if "TypeCast" in node:
        return value_of(node["TypeCast"]["arg"])
    if "String" in node:
        return str(node["String"].get("sval", ""))
    constant = node.get("A_Const")
    if constant is None:
        return None
    if "ival" in constant:
        return str(constant["ival"].get("ival", 0))
    if "fval" in constant:
        return str(constant["fval"]["fval"])
    if "boolval" in constant:
        return "on" if constant["boolval"].get("boolval") else "off"
    return str(constant["sval"].get("sval", "")) if "sval" in constant else None


def assigned(body: Body) -> tuple[str, dict[str, Any]]:
    """
    Return the setting's name in lower case, and the details of a VariableSetStmt.

    `values` are the values as text, None for DEFAULT and RESET; `modes` those of SET TRANSACTION.
    """
    kind = body["kind"]
    details: dict[str, Any] = {"local": body.get("is_local", False), "values": None, "kind": kind}
    name = str(body.get("name", "")).lower()
    if kind == "VAR_SET_VALUE":
        details["values"] = tuple(value_of(a) for a in body.get("args", ()))
    elif kind == "VAR_SET_MULTI":
        details["modes"] = modes(body.get("args", ()))
    elif kind == "VAR_SET_CURRENT":
        details["current"] = True
    return name, details


def modes(options: Any) -> dict[str, str | None]:
    """Return transaction modes (`transaction_read_only`, `transaction_isolation` …) as name -> text."""
    return {o["DefElem"]["defname"]: value_of(o["DefElem"].get("arg", {})) for o in options if "DefElem" in o}


def option_on(options: Any, name: str) -> bool:
    """Whether an EXPLAIN option is on; the last one of a name wins, one without value is on."""
    found = False
    for option in options:
        if option["DefElem"]["defname"].lower() == name:
            value = value_of(option["DefElem"]["arg"]) if "arg" in option["DefElem"] else "on"
            found = value is None or value.lower() not in (
                "false",
                "off",
                "0",
                "f",
                "no",
                "n",
                "of",
                "fa",
                "fals",
            )
    return found
