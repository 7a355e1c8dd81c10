"""The classes of verbs and of their groups, whose help fits the terminal and has short types."""

from __future__ import annotations

from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

# what typer's types are called in the help
TYPES = {"int": "N", "int range": "N", "float": "X", "float range": "X", "str": "TEXT", "path": "PATH"}


class Verb(TyperCommand):
    """A command whose help has short types of options, and none of flags and arguments."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help; its paragraphs break where the terminal ends, not where the lines of the source do."""
        paragraphs = (self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        super().format_help(ctx, formatter)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage line's words; required arguments are bare, where typer puts braces around them."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, each with the name that its value has in the help."""
        return _with_short_types(super().get_params(ctx), ctx)


class Group(TyperGroup):
    """A group of verbs with the same help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, each with the name that its value has in the help."""
        return _with_short_types(super().get_params(ctx), ctx)


def _with_short_types(parameters: list[Any], ctx: Any) -> list[Any]:
    for parameter in parameters:
        if isinstance(parameter, TyperArgument):
            parameter.display_type_rich = _no_type  # type: ignore[method-assign]  # the name and the text say enough
        elif isinstance(parameter, TyperOption) and parameter.metavar is None:
            shown = parameter.display_type(ctx).strip("<>")
            # "<bool>" would read as a value to be given
            parameter.metavar = "" if parameter.is_flag else TYPES.get(shown, shown)
    return parameters


def _no_type(ctx: Any) -> str:
    return ""
