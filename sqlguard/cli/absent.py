"""
Commands of the contract that this version does not have. They say so and what to do instead; none pretends.
"""

from collections.abc import Callable

import typer

from sqlguard.errors import NotConfigured

#: Command -> what to do meanwhile.
_ABSENT = {
    "console": "use `sqlguard journal list` and `sqlguard undo --preview`",
}


def register(app: typer.Typer) -> None:
    for name, instead in _ABSENT.items():
        app.command(
            name,
            hidden=True,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_command(name, instead))


def _command(name: str, instead: str) -> Callable[[], None]:
    def command() -> None:
        raise NotConfigured(f"`sqlguard {name}` is not in this version", hint=instead)

    command.__doc__ = f"Not in this version. {instead[0].upper()}{instead[1:]}."
    return command
