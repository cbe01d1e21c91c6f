"""The command line: registers the commands, and prints their answers and errors."""

from __future__ import annotations

import io
import math
import os
import re
import sys
import traceback
from functools import wraps
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kprof.commands import Answer, say
from kprof.errors import INTERRUPTED, KprofError
from kprof.report.redaction import redacted, redacted_json, secrets_shown, without_secrets

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

# In the order of `kprof --help`, by purpose; each with the first sentence of its own help.
GROUPS = {
    "Profile": {
        "run": "Run a workload unmodified, record some steps and report on them.",
        "open": "Analyze a trace or a saved run and write its report.",
        "ncu": "Measure hardware counters of a run's kernels with Nsight Compute.",
        "roofline": "Measure this GPU's roofline once, for later runs on it.",
    },
    "Understand": {
        "playbook": "Show how to confirm and fix a finding, or list all playbooks.",
        "whatif": "Predict the time of a step after changes.",
        "diff": "Compare two runs part by part.",
    },
    "Change and prove": {
        "kernels": "List, check and benchmark replacement kernels.",
        "ab": "Compare two variants of a workload and say which is faster.",
        "gate": "Fail a CI job on a proven regression.",
        "selftest": "Measure the error rates of `kprof ab` on this machine.",
    },
    "Report and price": {
        "report": "Write one page for decision makers: verdict, cost and confidence.",
        "cost": "Compute the cost of tokens, fleets and training.",
        "fit": "Compute which models can keep a time to N tokens, by bytes and FLOPs alone.",
        "sla": "Judge SLA targets with 99 % confidence bounds.",
        "engage": "Keep the evidence of one workload and score its predictions.",
    },
    "Agents": {
        "mcp": "Serve kprof's answers to an agent, over stdin and stdout (Model Context Protocol).",
    },
    "This machine": {
        "doctor": "Show what this machine can measure, and how to fix the rest.",
    },
}
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}


class Commands(TyperGroup):
    """The commands; the module of one is imported where that command is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return one command, or None where there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        add_command(alone, import_module(f"kprof.commands.{cmd_name}"))
        return typer.main.get_command(alone)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options before a command.

        Raises:
            KprofError: there is none of this name.
        """
        if args and args[0].startswith("-") and args[0] not in ("--help", "--version"):
            raise KprofError(f"no such option: {args[0]}", fix="kprof --help lists the commands")
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of a command line.

        Raises:
            KprofError: there is none of this name; the fix names the nearest.
        """
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            from difflib import get_close_matches

            near = ", ".join(get_close_matches(name, COMMANDS, 3))
            fix = f"the nearest: {near}; kprof --help lists all" if near else "see kprof --help"
            if name.endswith(".py"):
                fix = f"to record a script: kprof run {name}"
            raise KprofError(f"there is no command {name}", fix=fix)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands by group, without importing them."""
        longest = max(map(len, COMMANDS))
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(longest), text) for name, text in group.items()])


app = typer.Typer(
    name="kprof",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Profile GPU workloads unmodified and account for every nanosecond.",
)


@app.callback(invoke_without_command=True)
def version_or_help(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Profile GPU workloads unmodified and account for every nanosecond."""
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"kprof {installed('kprof')}")
        raise typer.Exit


def add_command(app: typer.Typer, module: ModuleType) -> None:
    """Add the command that `module` holds: its function of the same name."""
    name = module.__name__.rpartition(".")[2]
    function: Callable[..., Answer | None] = getattr(module, name)

    @app.command(name, cls=Command, context_settings=getattr(module, "SETTINGS", None))
    @wraps(function)
    def command(*words: object, **options: object) -> None:
        try:
            answer = function(*words, **options)
        except KeyboardInterrupt:
            # The parser would exit without a word. A command tells itself what it keeps.
            say("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        if answer is None:
            return
        problem = _write(answer)
        if problem is not None and answer.if_unwritten is not None:
            why = f"the output cannot be written: {problem.strerror}"
            raise KprofError(why, fix=answer.if_unwritten)
        raise typer.Exit(answer.exit_code)


def _write(answer: Answer) -> OSError | None:
    """Print an answer; return why that was not possible, unless its reader had seen enough."""
    try:
        _print(answer)
        sys.stdout.flush()
    except SystemExit:  # How rich answers a reader that has gone.
        return None
    except OSError as error:
        # The rest of the buffer must not fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return None if isinstance(error, BrokenPipeError) else error
    return None


def _print(answer: Answer) -> None:
    with secrets_shown(shown=answer.shows_secrets):
        json, title = answer.json and redacted_json(answer.json), without_secrets(answer.title)
        sections, last = redacted(answer.sections), without_secrets(answer.last)
    if json is not None:
        sys.stdout.buffer.write(json + b"\n")
        return
    from rich.console import Console

    from kprof.report.terminal import print_summary

    print_summary(title, sections, console := Console())
    console.print(last, soft_wrap=True, markup=False, highlight=False)


# The exit code of faults of kprof, as sysexits.h calls EX_SOFTWARE.
FAULT = 70


def run_command_line(args: list[str] | None = None) -> None:
    """Run one command; exit with 2 on errors of the user or the input, 70 on faults of kprof."""
    arguments = sys.argv[1:] if args is None else args
    _accept_any_name()
    try:
        app(arguments, obj=arguments)
    except KprofError as error:
        say(str(error))
        sys.exit(error.exit_code)
    except Exception:  # noqa: BLE001 - a fault of kprof keeps its traceback
        # Python would exit with 1, by which commands say that the answer is no.
        traceback.print_exc()
        sys.exit(FAULT)


def _accept_any_name() -> None:
    """Let stdout take every character, also where it is closed or knows ASCII alone."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


# How the parser that typer uses answers a wrong command line, whichever version it has.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
# What the parser says of a value, in the words of a reader.
REASONS = (
    (r"^Value error, (?:'.*?' )?", ""),
    (r"^Input should be a valid integer.*|^'.*' is not a valid int.*", "must be a whole number"),
    (r"^Input should be a valid number.*|^'.*' is not a valid float.*", "must be a number"),
    (r"^Input should be greater than or equal to (\S+)", r"must be at least \1"),
    (r"^Input should be less than or equal to (\S+)", r"must be at most \1"),
    (r"^does not match the formats '%Y-%m-%d'\.$", "must be a day, as 2026-11-26"),
    (r"^is not one of (.*)\.$", r"must be one of \1"),
)


class Command(TyperCommand):
    """A command whose help names words and options as they are typed, without types of Python."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words and options of a command line.

        Raises:
            KprofError: an option is unknown, has no value, or one that it does not take.
        """
        words = list(args)
        try:
            rest: list[str] = super().parse_args(ctx, args)
            given = self.make_parser(ctx).parse_args(words)[0]
        except USAGE_ERROR as error:
            raise self._refused(ctx, error, words) from None
        for parameter in self.get_params(ctx):
            self._require_value(ctx, parameter, given.get(parameter.name))
        return rest

    def _require_value(self, ctx: Any, parameter: Any, given: object) -> None:
        """Refuse an empty text, and a number that is none or without end."""
        name, value = _flag(parameter), ctx.params.get(parameter.name)
        if name in MAY_BE_EMPTY:
            return
        if "" in (given if isinstance(given, (list, tuple)) else [given]):
            raise KprofError(f"{name} is empty", fix=self._meaning(ctx, parameter))
        if isinstance(value, float) and not math.isfinite(value):
            raise KprofError(f"{name} {given} must be finite", fix=self._meaning(ctx, parameter))

    def _refused(self, ctx: Any, error: Any, words: list[str]) -> KprofError:
        """Return an error of the parser with the option, its value, and its meaning."""
        see = f"{ctx.command_path} --help lists all options"
        parameter = getattr(error, "param", None)
        if parameter is None:
            near = getattr(error, "possibilities", None)
            fix = f"the nearest: {', '.join(sorted(near))}; {see}" if near else see
            return KprofError(_in_lower_case(error.message), fix=fix)
        name = _flag(parameter)
        if type(error) is not typer.BadParameter:
            return KprofError(f"{name} is missing", fix=f"{self._meaning(ctx, parameter)}; {see}")
        reason = str(error.message)
        for pattern, said in REASONS:
            reason = re.sub(pattern, said, reason)
        value = _value_of(parameter, words)
        return KprofError(f"{name} {value}: {reason}", fix=self._meaning(ctx, parameter))

    def _meaning(self, ctx: Any, parameter: Any) -> str:
        """Return how a parameter is given, with its meaning and range as its help has them."""
        name, text = parameter.get_help_record(ctx)
        text = re.sub(r"\s*\[required\]", "", _in_words(text))
        return f"give {_without_type(name)}: {' '.join(text.split()).rstrip('.')}"

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """List the arguments, then the options, each with its range in words."""
        records: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                name, text = record
                records[parameter.param_type_name].append((_without_type(name), _in_words(text)))
        for kind, listed in records.items():
            if listed:
                with formatter.section(f"{kind.capitalize()}s"):
                    formatter.write_dl(listed)


# Words of the workload, which may be any.
MAY_BE_EMPTY = ("SCRIPT", "--arg")


def _flag(parameter: Any) -> str:
    """Return the name by which a parameter is given."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper()).strip("{}[].")
    return str(max(parameter.opts, key=len))


def _value_of(parameter: Any, words: list[str]) -> str:
    """Return the last value that the command line gives an option."""
    values = [after for flag, after in pairwise(words) if flag in parameter.opts]
    values += [
        word.partition("=")[2]
        for word in words
        if word.partition("=")[0] in parameter.opts and "=" in word
    ]
    return values[-1] if values else ""


def _in_lower_case(text: str) -> str:
    return f"{text[:1].lower()}{text[1:].rstrip('.')}"


def _without_type(name: str) -> str:
    """Return the name of a parameter without its type."""
    return re.sub(r" <.*>$", "", name)


def _in_words(text: str) -> str:
    """Write the range of a number, such as x>=1, in words; nothing is below 0 anyway."""
    text = re.sub(r"([\d.]+)<=x<=([\d.]+)", r"\1 to \2", text)
    text = re.sub(r"; x>=0(?=\])", "", text)
    return re.sub(r"x>=([\d.]+)", r"at least \1", text)
