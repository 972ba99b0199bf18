"""Command-line options made from a settings model, so that a file's keys and the options are one list."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from pd_rerank.config import Settings

Command = Callable[..., None]


def flags(model: type[Settings]) -> Callable[[Command], Command]:
    """Give a command, in place of its `**given`, one option per field of `model`; options not typed are None.

    A field without a panel is for files only.
    """

    def decorate(command: Command) -> Command:
        own = [p for p in _parameters(command) if p.kind is not inspect.Parameter.VAR_KEYWORD]
        made = [_parameter(name, field) for name, field in model.model_fields.items() if field.json_schema_extra]

        @functools.wraps(command)
        def wrapped(**values: Any) -> None:
            command(**values)

        wrapped.__signature__ = inspect.Signature(made + own)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in made + own} | {"return": None}
        return wrapped

    return decorate


def _parameters(command: Command) -> list[inspect.Parameter]:
    kind = inspect.Parameter.KEYWORD_ONLY
    found = inspect.signature(command, eval_str=True).parameters.values()
    return [p if p.kind is inspect.Parameter.VAR_KEYWORD else p.replace(kind=kind) for p in found]


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    kind, choices = _value_type(field.annotation)
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    flag = f"--{name.replace('_', '-')}"
    if kind is bool:
        flag += f"/--no-{name.replace('_', '-')}"
    default = (
        "" if field.default is None else f" Default: {str(field.default).lower() if kind is bool else field.default}."
    )
    option = typer.Option(
        flag,
        help=f"{field.description}{default}",
        metavar="|".join(choices) or None,
        rich_help_panel=str(extra.get("panel", "Options")),
        show_default=False,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _value_type(annotation: Any) -> tuple[Any, list[str]]:
    """The type typed on the command line, and the words to choose from where there are any."""
    kinds = [a for a in get_args(annotation) if a is not NoneType] if NoneType in get_args(annotation) else [annotation]
    if get_origin(kinds[0]) is Literal:
        return str, [str(word) for word in get_args(kinds[0])]
    return kinds[0], []
