"""Shared code of all `advise` commands: streams, exit codes, error formatting.

stdout carries the report or JSON, stderr progress, notes and errors. Exit codes: 0 a plan was
found, 1 the question was valid and the answer is no, 2 bad usage or input, 101 a mistake of ours.
Under torchrun what all ranks would say is said once.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from advisor.inputs.console import COLUMNS, local_rank, say
from profiles.errors import (
    HINT,
    AdvisorError,
    FileError,
    InputError,
    UnknownNameError,
    near_misses,
)
from profiles.record.bounds import (
    MOST_BATCH,
    MOST_COUNT,
    MOST_SCATTER,
    MOST_TOKENS,
    MOST_WAIT_S,
    whole_number,
)

OUR_MISTAKE = 101  # as ruff and cargo: neither a success, nor an answer, nor the user's mistake
INTERRUPTED = 130  # 128 + SIGINT, as shells count
# Ranks of a node start within seconds of each other; torchrun ends all 0.1 s after one has failed.
FIRST_WORD_S = 5.0

Command = TypeVar("Command", bound=Callable[..., None])
Value = TypeVar("Value")
Callback = Callable[[click.Context, click.Parameter, str | None], Value | None]


class Advise(click.Group):
    """`advise MODEL ...` is `advise plan MODEL ...`; every error is one line, then hints."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            args = ["--help"]
        first = args[0]
        if first not in self.commands and first not in ("--help", "--version"):
            if near_misses(first, self.commands) and not os.path.exists(first):
                raise UnknownNameError("command", first, self.commands)
            args = ["plan", *args]
        return super().parse_args(ctx, args)

    def main(self, args: Sequence[str] | None = None, *rest: Any, **settings: Any) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        settings["standalone_mode"] = False
        if "--debug" in words:
            logging.basicConfig(format="%(levelname)s: %(message)s")
            logging.getLogger("advisor").setLevel(logging.DEBUG)
        try:
            code = super().main(words, *rest, **settings)
        except click.Abort:
            if not local_rank():
                say("interrupted")
            sys.exit(INTERRUPTED)
        except Exception as error:
            is_said = _is_first_to_speak()
            if "--debug" in words:
                traceback.print_exception(error)
            sys.exit(report_error(error, colour="--no-color" not in words, is_said=is_said))
        sys.exit(code if isinstance(code, int) else 0)


def _is_first_to_speak() -> bool:
    """Return True if this rank reports an error that all ranks have: the first of a node does.

    torchrun ends the others as soon as it left. One that still lives after some seconds may have a
    mistake of its own, or the machine is slow: so the first leaves a mark in the folder that
    torchrun makes for each attempt.
    """
    if rank := local_rank():
        try:
            time.sleep(FIRST_WORD_S + rank / 2)  # the first report is enough
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
    log = os.environ.get("TORCHELASTIC_ERROR_FILE")  # ATTEMPT/RANK/error.json
    if log is None:
        return True
    try:
        (Path(log).parents[1] / "advise-said").touch(exist_ok=False)
    except FileExistsError:
        return False
    except (OSError, IndexError):
        return True
    return True


def report_error(error: Exception, *, colour: bool, is_said: bool) -> int:
    """Print an error to stderr if `is_said`; return its exit code."""
    match error:
        case AdvisorError():
            shown = error
        case click.ClickException():
            shown = _usage_error(error)
        case OSError(errno=errno.ENOSPC):
            shown = FileError(f"cannot write: {error.strerror}")
        case _:
            first, *_ = str(error).splitlines() or [""]
            shown = AdvisorError(
                f"unexpected {type(error).__name__}: {first}",
                hints=[
                    "this is a mistake in `advise`, not yours",
                    "report it with what the same command prints under `--debug`",
                ],
            )
            shown.exit_code = OUR_MISTAKE
    allowed = colour and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    label = click.style("error:", fg="red", bold=True) if allowed else "error:"
    if is_said:
        say(_in_columns(f"error: {shown}").replace("error:", label, 1))
    return shown.exit_code


def _in_columns(text: str) -> str:
    """Wrap at spaces on a terminal, as the report; a pipe gets whole lines."""
    if not sys.stderr.isatty():
        return text
    width = min(COLUMNS, shutil.get_terminal_size().columns)
    lines: list[str] = []
    for line in text.splitlines():
        indent = len(HINT) if line.startswith(HINT) else len(line) - len(line.lstrip()) + 2
        lines += textwrap.wrap(
            line,
            width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines)


def _usage_error(error: click.ClickException) -> InputError:
    """Convert click's message to our form: problem, location, and near miss."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    command = ctx.command_path if ctx else "advise"
    hints = [f"`{command} --help` lists what there is"]
    if isinstance(error, click.NoSuchOption):
        known = [name for param in ctx.command.params for name in param.opts] if ctx else []
        bare = {name.lstrip("-"): name for name in known}
        given = error.option_name.lstrip("-")
        begun = [name for name in bare if len(name) > 2 and given.startswith(name)]
        near = near_misses(given, bare, limit=1) or begun[:1]
        meant = [f"did you mean `{bare[name]}`?" for name in near]
        what = f"unknown option `{error.option_name}`"
        return InputError(what, where=command, hints=[*meant, *hints])
    if isinstance(error, click.MissingParameter) and error.param is not None:
        name = error.param.human_readable_name
        return InputError(f"{name} is missing", where=command, hints=hints)
    return InputError(
        error.format_message().rstrip(".").removeprefix("Got "), where=command, hints=hints
    )


def one_of(*known: str) -> Callback[str]:
    """Callback for an option with a closed list of values, ignoring case."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        if value is None or value.lower() in known:
            return value and value.lower()
        raise UnknownNameError("choice", value, known, where=param.opts[-1])

    return convert


def at_most(most: int) -> Callback[int]:
    """Callback for an option that is a whole number from 1 to `most`."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
        return None if value is None else whole_number(value, param.opts[-1], most=most)

    return convert


count, batch, tokens = map(at_most, (MOST_COUNT, MOST_BATCH, MOST_TOKENS))
"""Of options that count something, samples of a step, or tokens of a sequence."""


def seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Callback for an option in seconds, zero or more."""
    return _zero_or_more(param, value, "seconds", MOST_WAIT_S)


def fraction(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Callback for an option that is a fraction, zero or more."""
    return _zero_or_more(param, value, "a fraction", MOST_SCATTER)


def _zero_or_more(param: click.Parameter, value: str | None, what: str, most: int) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise InputError(f"`{param.opts[-1]}` wants {what}, zero or more, not `{value}`")
    if number > most:
        raise InputError(f"`{param.opts[-1]}` = {value}: {most:,} is the most")
    return number


_SHARED: dict[str, dict[str, Any]] = {
    "--cluster": {"default": "auto", "show_default": True, "metavar": "NAME|FILE|auto"},
    "--global-batch": {"callback": batch, "metavar": "SAMPLES"},
    "--optimizer": {"default": "adamw", "show_default": True, "metavar": "NAME"},
    "--precision": {
        "callback": one_of("auto", "fp32", "bf16", "fp16", "fp8"),
        "metavar": "[auto|fp32|bf16|fp16|fp8]",
    },
    "--seq": {"callback": tokens, "metavar": "TOKENS"},
}


def shared_option(name: str, text: str) -> Callable[[Command], Command]:
    """An option that several commands have, with its help."""
    return click.option(name, help=text, **_SHARED[name])


def common_options(command: Command) -> Command:
    """Options of every command."""
    for option in (
        # Parsed by `Advise.main`, which handles errors.
        click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks."),
        click.option("--no-color", is_flag=True, help="Plain text; NO_COLOR does the same."),
    ):
        command = option(command)
    return command
