"""The command line: `pd-rerank COMMAND` and `python -m pd_rerank COMMAND`.

A command's module is imported when the command is called. Errors end in one line on stderr and an exit code:
0 ok, 2 bad arguments, 3 missing prerequisite, 4 missing resource, 5 invalid data, 6 failure, 7 partial
success, 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import inspect
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from pd_rerank import __version__
from pd_rerank.errors import PdRerankError

COMMANDS = {
    "index": ("pd_rerank.cli.index", "Index a corpus for BM25, dense or learned-sparse search."),
    "pool": ("pd_rerank.cli.pool", "Make candidate pools from indexes and runs; check and convert pools."),
    "rerank": ("pd_rerank.cli.rerank", "Rerank a TREC run or a set of pools with a model."),
    "serve": ("pd_rerank.cli.serve", "Serve a model over HTTP, as Cohere's and Jina's clients call it."),
    "label": ("pd_rerank.cli.label", "Make training labels with a teacher, from its scores, or from judgements."),
    "evaluate": ("pd_rerank.cli.evaluate", "Evaluate runs or scores against judgements."),
    "stability": ("pd_rerank.cli.stability", "Measure what changes when candidates arrive in another order."),
    "preference": ("pd_rerank.cli.preference", "Measure preference and position on labelled pairs."),
    "compare": ("pd_rerank.cli.compare", "Compare systems in quality, stability and preference."),
    "export": ("pd_rerank.cli.export", "Fold a trained adapter into its base, as a model or a classifier."),
    "doctor": ("pd_rerank.cli.doctor", "Show the environment; with a model, prove that it can be read."),
    "demo": ("pd_rerank.cli.demo", "See what candidate order does to a small model's decisions."),
}

SPELLINGS = {
    "model-path": "model",
    "torch-dtype": "dtype",
    "context-size": "max-length",
    "requests-file": "pools",
    "top-k-candidates": "hits",
    "top-k-rerank": "top-k",
    "output-dir": "output",
    "M": "m",
    "efC": "ef-c",
    "quantize": "quantise",
}
"""Other tools' words for our options; underscores are taken for hyphens too."""

ANYWHERE = ("--verbose", "--quiet", "--debug")

logger = logging.getLogger("pd_rerank")

_UsageError: Any = typer.BadParameter.__base__
"""Typer keeps click to itself in some releases; this name is public in all of them."""


class Commands(TyperGroup):
    """The group of commands: loads the one called, and turns errors into a line and an exit code."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command by name and import it."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, _load(str(name)), rest

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line `args` and leave with its exit code; with `standalone_mode` off, return or raise."""
        words = list(sys.argv[1:] if args is None else args)
        rest = [word for word in words if word not in ANYWHERE]

        def run() -> Any:
            return super(Commands, self).main(
                rest, "pd-rerank", complete_var, False, windows_expand_args=windows_expand_args, **extra
            )

        if not standalone_mode:
            return run()
        with _logging(verbose="--verbose" in words, quiet="--quiet" in words):
            sys.exit(_exit_code(run, debug="--debug" in words))


def flowing(text: str) -> str:
    """A docstring as help: paragraphs, their lines joined."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(text))


def _load(name: str) -> Any:
    module, _ = COMMANDS[name]
    command = getattr(importlib.import_module(module), name)
    if isinstance(command, typer.Typer):  # it has commands of its own
        return get_command(command)
    return _single(command, name)


def _single(command: Any, name: str) -> Any:
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    single.command(name, help=flowing(command.__doc__ or ""), epilog=_EPILOG, context_settings=_CONTEXT)(command)
    return get_command(single)


def _exit_code(run: Any, *, debug: bool) -> int:
    """Call `run`; 0, the code it returns, or the code of its error after one line on stderr."""
    try:
        code = run()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        logger.error("interrupted")
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        code, message = _described(error, debug=debug)
        logger.error("%s", _one_line(message))
        return code


def _described(error: Exception, *, debug: bool) -> tuple[int, str]:
    """The exit code of an error, and what to say of it."""
    if isinstance(error, PdRerankError):
        return error.exit_code, str(error)
    if isinstance(error, _UsageError):
        ctx: Any = getattr(error, "ctx", None)
        hint = f" (see {ctx.command_path} --help)" if ctx is not None else ""
        return 2, f"{error.format_message()}{hint}"
    if isinstance(error, OSError):
        full = error.errno == errno.ENOSPC
        return 6, "No space left on device; free some, and run the same command again" if full else str(error)
    return 6, f"unforeseen {type(error).__name__}: {error}{'' if debug else '; --debug shows where'}"


def _one_line(message: str) -> str:
    return " ".join(message.split())


@contextmanager
def _logging(*, verbose: bool, quiet: bool) -> Iterator[None]:
    """Send the package's messages to stderr while a command runs."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines())
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


class _Lines(logging.Formatter):
    """`error: …` and `warning: …`; plain text below that."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for one record."""
        text = super().format(record)
        return f"{record.levelname.lower()}: {text}" if record.levelno >= logging.WARNING else text


_EPILOG = "Anywhere: --verbose, --quiet, --debug. Underscores in option names are read as hyphens."

_CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda word: SPELLINGS.get(hyphened := word.replace("_", "-"), hyphened),
}

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    invoke_without_command=True,
    rich_markup_mode="rich",
    context_settings=_CONTEXT,
    epilog="Results go to files or stdout, everything else to stderr. Exit codes: 0 ok, 2 bad arguments, 3 missing "
    "prerequisite, 4 missing resource, 5 invalid data, 6 failure, 7 partial success, 130 interrupted.",
)


@app.callback()
def _everywhere(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and stop.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say more on stderr. May stand anywhere.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Errors only, no progress. May stand anywhere.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from. May stand anywhere.")] = False,
) -> None:
    """Order-consistent batched LLM reranking."""
    if version:
        typer.echo(f"pd-rerank {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        with redirect_stdout(sys.stderr):  # with rich, asking for the help prints it
            typer.echo(ctx.get_help())
        raise typer.Exit(2)


def _placeholder() -> None:
    """Stand in the list of commands for one that is loaded when called."""


for _name, (_, _help) in COMMANDS.items():
    app.command(_name, help=_help)(_placeholder)


def program(command: Any, args: Sequence[str] | None = None) -> None:
    """Run one function (see `flags`) as a script of its own, with our messages, and exit with its code."""
    words = list(sys.argv[1:] if args is None else args)
    rest = [word for word in words if word not in ANYWHERE]
    made = _single(command, command.__name__)
    with _logging(verbose="--verbose" in words, quiet="--quiet" in words):
        sys.exit(_exit_code(lambda: made.main(rest, standalone_mode=False), debug="--debug" in words))


def main(args: Sequence[str] | None = None) -> None:
    """Run `pd-rerank` with `args` (default: the process's) and exit with its code."""
    # Waiting threads otherwise spin: on a machine with other work that tripled the CPU time (torch reads this once).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app(args)
