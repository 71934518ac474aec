"""What both programs share: parsing that fails with one line, output that survives any terminal, exit codes."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pipesd import __version__
from pipesd.errors import Cancelled, PipeSDError, UsageError


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing the usage and leaving; no abbreviated flags."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def make_parser(prog: str, description: str) -> Parser:
    parser = Parser(prog=prog, description=description)
    parser.add_argument("--version", action="version", version=f"{prog} {__version__}")
    return parser


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="configuration file (TOML); flags win over it")
    parser.add_argument("--debug", action="store_true", help="show where an error came from, and debug messages")


def not_yet(commands: Any, name: str, help: str) -> None:
    """A command of the interface that this version does not have: it says so, whatever follows it."""
    command = commands.add_parser(name, help=f"{help} (not part of this version)", add_help=False)
    command.add_argument("rest", nargs=argparse.REMAINDER)
    command.set_defaults(body=_refuse, debug=False, command_name=name)


def _refuse(args: argparse.Namespace) -> int:
    raise UsageError(f"{args.command_name!r} is not part of this version")


def run(parser: Parser, argv: Sequence[str] | None) -> int:
    """Parse and run the chosen command's `body`; returns the exit code. Errors are one line on stderr; with `--json`
    an object that holds the error goes to stdout if the command had not printed its own."""
    argv = sys.argv[1:] if argv is None else argv
    _survive_encoding()
    debug = "--debug" in argv
    try:
        args = parser.parse_args(argv)
        if not hasattr(args, "body"):
            raise UsageError(f"no command given (see {parser.prog} --help)")
        _log_to_stderr(parser.prog, debug, getattr(args, "quiet", False))
        body: Callable[[argparse.Namespace], int] = args.body
        code = body(args)
        sys.stdout.flush()
        return code
    except PipeSDError as error:
        if debug:
            traceback.print_exc()
        if "--json" in argv and not getattr(error, "printed", False):
            print(json.dumps({"text": "", "token_ids": [], "finish_reason": "error", "error": str(error)}))
        complain(parser.prog, str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return Cancelled.exit_code
    except BrokenPipeError:
        # whoever read our output has gone: there is nobody left to tell, not even at the interpreter's last flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Cancelled.exit_code


def complain(prog: str, text: str) -> None:
    print(f"{prog}: {' '.join(text.split())}", file=sys.stderr)


def _survive_encoding() -> None:
    """Characters that the terminal's encoding lacks are escaped instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _log_to_stderr(prog: str, debug: bool, quiet: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{prog}: %(message)s"))
    root = logging.getLogger("pipesd")
    root.handlers = [handler]
    root.setLevel(logging.DEBUG if debug else logging.WARNING if quiet else logging.INFO)
