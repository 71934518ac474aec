"""What both programs share: parsing that fails with one line, that line, exit codes."""

from __future__ import annotations

import argparse
import difflib
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pipesd import __version__
from pipesd.errors import Cancelled, PipeSDError, UsageError
from pipesd.streams import OutputClosed, prepare, show, tell

log = logging.getLogger("pipesd")
Failed = Callable[[Sequence[str], bool], str]


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing the usage and leaving; no abbreviated flags.

    `stray` says how what stands alone on the command line is given; `refusal` what the whole command is answered with.
    """

    def __init__(self, *, stray: str = "", refusal: str = "", **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})
        self.stray, self.refusal = stray, refusal

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse does, but nothing may be left over: it never is a part of the prompt that is shown then."""
        if self.refusal:
            raise UsageError(self.refusal)
        known, rest = super().parse_known_args(args, namespace)
        options = [each.partition("=")[0] for each in rest if each.startswith("-") and not set(each) & set(" \t\n")]
        if options:
            known = self._option_string_actions
            near = [each for each in known if each.startswith(options[0])] or difflib.get_close_matches(
                options[0], known, 1
            )
            self.error(f"unknown option {options[0]}" + (f", did you mean {near[0]}?" if near else ""))
        if rest:
            count = "an argument belongs" if len(rest) == 1 else f"{len(rest)} arguments belong"
            self.error(f"{count} to no option" + (f"; {self.stray}" if self.stray else ""))
        return known, rest

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += "; one that begins with - is written behind ="
        raise UsageError(f"{message} (see {self.prog} --help)")


def make_parser(prog: str, description: str) -> Parser:
    parser = Parser(prog=prog, description=description)
    _add_version(parser, prog)
    return parser


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="configuration file (TOML); flags win over it")
    parser.add_argument("--debug", action="store_true", help="show where an error came from, and debug messages")
    _add_version(parser, parser.prog.split()[0])


def not_yet(commands: Any, name: str, help: str) -> None:
    """A command of the interface that this version does not have: it says so, whatever follows it."""
    refusal = f"{name!r} is not part of this version"
    commands.add_parser(name, help=f"{help} (not part of this version)", refusal=refusal, add_help=False)


def run(parser: Parser, argv: Sequence[str] | None, *, failed: Failed = lambda argv, interrupted: "") -> int:
    """Parse and run the chosen command's `body`; returns the exit code. Errors are one line on stderr.

    `failed` gives what stdout gets from a command that raises, from the arguments and whether it was interrupted.
    """
    own_process = argv is None
    argv = sys.argv[1:] if argv is None else argv
    prepare()
    _log_to_stderr(parser.prog, debug="--debug" in argv, quiet="--quiet" in argv)
    try:
        code = _run_command(parser, argv, failed)
        show("")  # what was written without a flush
    except PipeSDError as error:
        code = complain(error)
    if own_process:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # from here on there is nothing to tidy up
    return code


def _run_command(parser: Parser, argv: Sequence[str], failed: Failed) -> int:
    try:
        args = parser.parse_args(argv)
        if not hasattr(args, "body"):
            raise UsageError(f"no command given (see {parser.prog} --help)")
        body: Callable[[argparse.Namespace], int] = args.body
        return body(args)
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    except OutputClosed as error:
        return error.exit_code
    except PipeSDError as error:
        code = complain(error)
        show(failed(argv, isinstance(error, Cancelled)))
        return code
    except (OSError, MemoryError) as error:  # what a machine refuses at any place: files, processes, memory
        code = complain(PipeSDError(f"this machine refuses: {error or type(error).__name__}"), cause=error)
        show(failed(argv, False))
        return code
    except KeyboardInterrupt:
        show(failed(argv, True))
        return Cancelled.exit_code


def complain(error: PipeSDError, cause: BaseException | None = None) -> int:
    """Say on stderr what went wrong, in one line, and with `--debug` where; returns the exit code."""
    if not isinstance(error, OutputClosed):
        log.error("%s", error, exc_info=(cause or error) if log.isEnabledFor(logging.DEBUG) else None)
    return error.exit_code


class _OneLine(logging.Formatter):
    """Messages are one line that no part of can steer a terminal: some quote what came from a file or a cloud."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = " ".join(super().formatMessage(record).split())
        return "".join(each if each.isprintable() else repr(each)[1:-1] for each in line)


class _ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        tell(self.format(record))


def _log_to_stderr(prog: str, *, debug: bool, quiet: bool) -> None:
    handler = _ToStderr()
    handler.setFormatter(_OneLine(f"{prog}: %(message)s"))
    log.handlers = [handler]
    log.setLevel(logging.DEBUG if debug else logging.WARNING if quiet else logging.INFO)


def _add_version(parser: argparse.ArgumentParser, prog: str) -> None:
    parser.add_argument("--version", action="version", version=f"{prog} {__version__}")
