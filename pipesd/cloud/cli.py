"""The program `pipesd-cloud`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pipesd.config import CloudConfig, add_flags, make_config, read_tables
from pipesd.errors import UsageError
from pipesd.program import Parser, add_common, make_parser, not_yet, run


def main(argv: Sequence[str] | None = None) -> int:
    return run(_parser(), argv)


def _parser() -> Parser:
    parser = make_parser("pipesd-cloud", "Verify what edges draft: the target model behind one address.")
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    serve = commands.add_parser(
        "serve", help="load the target model and serve it", stray="the model is given with --model PATH"
    )
    serve.add_argument("--quiet", action="store_true", help="only warnings and errors on stderr")
    serve.set_defaults(body=_serve)
    add_flags(serve, CloudConfig)
    add_common(serve)
    not_yet(commands, "keys", "make, allow, list and revoke keys")
    return parser


def _serve(args: argparse.Namespace) -> int:
    config = make_config(CloudConfig, read_tables(args.config, ("cloud",))["cloud"], vars(args))
    if not config.model:
        raise UsageError("no model: give --model PATH, a GGUF file or a Hugging Face folder")
    from pipesd.cloud.server import serve

    return serve(config)
