"""The classes of verbs and of their groups, whose help fits the terminal and is short about the types of options."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption


class Verb(TyperCommand):
    """A command whose help gives flags no type, and whole numbers the type ``N``."""

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
    for option in parameters:
        if isinstance(option, TyperOption) and option.metavar is None:
            if option.is_flag:
                option.metavar = ""  # "<bool>" would read as a value to be given
            elif option.display_type(ctx) in ("<int>", "<int range>"):
                option.metavar = "N"
    return parameters
