"""The program `pipesd-edge`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pipesd.config import EdgeConfig, GenerateConfig, TuneConfig, add_flags, make_config, read_tables, utf8_text
from pipesd.edge.advise import NOT_ASKED, AdviseConfig, show_advice
from pipesd.edge.advise_report import nothing as advise_failed
from pipesd.edge.interrupts import Interrupts
from pipesd.edge.link import LinkConfig, link_failed, show_link
from pipesd.edge.pair import PairConfig, pair_failed, show_pair
from pipesd.edge.plan import PlanConfig, plan_failed, show_plan
from pipesd.errors import UsageError
from pipesd.program import Parser, add_common, make_parser, not_yet, run
from pipesd.streams import show

TABLES = ("advise", "edge", "generate", "link", "pair", "plan", "tune")


def main(argv: Sequence[str] | None = None) -> int:
    return run(_parser(), argv, failed=_failed)


def _parser() -> Parser:
    parser = make_parser("pipesd-edge", "Draft at the edge, verify in the cloud: exactly the target model's text.")
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    generate = commands.add_parser(
        "generate", help="generate behind a prompt", stray="a prompt is given with --prompt TEXT"
    )
    source = generate.add_mutually_exclusive_group()
    source.add_argument("--prompt", type=utf8_text, metavar="TEXT", help="the prompt")
    source.add_argument(
        "--file",
        metavar="FILE",
        help="read the prompt from a file; without either from stdin. One newline at its end is dropped. With --out: "
        "many prompts, one JSON object a line, gzipped or not",
    )
    generate.add_argument(
        "--out", metavar="FILE", help="append a result for each prompt of --file; what is in it is not done again"
    )
    generate.add_argument("--restart", action="store_true", help="with --out: do all anew, what is in it goes")
    generate.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    generate.add_argument("--json", action="store_true", help="print one JSON object with text, ids and statistics")
    generate.set_defaults(body=_generate)
    chat = commands.add_parser("chat", help="talk with the target model, a line a turn")
    chat.set_defaults(body=_chat)
    for command in (generate, chat):
        command.add_argument("--system", type=utf8_text, metavar="TEXT", help="system message of the chat")
        command.add_argument("--quiet", action="store_true", help="no notes and statistics on stderr")
        add_common(command)
        add_flags(command.add_argument_group("the edge and its cloud"), EdgeConfig)
        add_flags(command.add_argument_group("the generation"), GenerateConfig)
    link = commands.add_parser("link", help="measure the link to the cloud")
    link.add_argument("--json", action="store_true", help="print one JSON object with all that was measured")
    link.add_argument("--save", metavar="FILE", help="write alpha, beta and gap into table [plan] of this file (TOML)")
    link.add_argument("--quiet", action="store_true", help="no notes and progress on stderr")
    add_flags(link, LinkConfig)
    add_common(link)
    link.set_defaults(body=_link)
    plan = commands.add_parser("plan", help="plan token batches for a link that is given in numbers")
    plan.add_argument("--json", action="store_true", help="print one JSON object with the sizes and the total")
    add_flags(plan, PlanConfig)
    add_common(plan)
    plan.set_defaults(body=_plan)
    tune = commands.add_parser("tune", help="search for the thresholds that suit models and link")
    tune.add_argument(
        "--prompt",
        type=utf8_text,
        action="append",
        metavar="TEXT",
        help="a prompt to search with; without any, three short ones of code, maths and prose",
    )
    tune.add_argument("--file", action="append", metavar="FILE", help="a file with such a prompt")
    tune.add_argument("--json", action="store_true", help="print one JSON object with all that was measured")
    tune.add_argument("--save", metavar="FILE", help="write the thresholds into table [edge] of this file (TOML)")
    tune.add_argument("--quiet", action="store_true", help="no notes and progress on stderr")
    add_flags(tune, EdgeConfig, leave_out=("tuning",))
    add_flags(tune, TuneConfig)
    add_common(tune)
    tune.set_defaults(body=_tune)
    pair = commands.add_parser("pair", help="say whether a draft and a target model fit, and what drafts are worth")
    pair.add_argument(
        "--prompt",
        type=utf8_text,
        action="append",
        metavar="TEXT",
        help="a prompt to measure acceptance with; without any, three short ones of code, maths and prose",
    )
    pair.add_argument("--json", action="store_true", help="print one JSON object with all that was found")
    pair.add_argument("--quiet", action="store_true", help="no notes and progress on stderr")
    add_flags(pair, PairConfig)
    add_common(pair)
    pair.set_defaults(body=_pair)
    advise = commands.add_parser("advise", help="say which strategy will be fastest here, and which cheapest")
    advise.add_argument(
        "--prompt",
        type=utf8_text,
        action="append",
        metavar="TEXT",
        help="a prompt to measure with; without any, six short ones of code, maths and prose",
    )
    advise.add_argument("--json", action="store_true", help="print one JSON object with all that was found")
    advise.add_argument("--quiet", action="store_true", help="no notes and progress on stderr")
    leave_out = [name for name in NOT_ASKED if name not in ("policy", "policy_option")]
    add_flags(advise, EdgeConfig, leave_out=leave_out)
    add_flags(advise, AdviseConfig)
    add_common(advise)
    advise.set_defaults(body=_advise)
    not_yet(commands, "serve", "serve an HTTP interface on this machine")
    not_yet(commands, "doctor", "check models, cloud and link")
    return parser


def _configs(args: argparse.Namespace) -> tuple[EdgeConfig, GenerateConfig]:
    tables = read_tables(args.config, TABLES)
    given = vars(args)
    edge = make_config(EdgeConfig, tables["edge"], given, {"generate": GenerateConfig})
    return edge, make_config(GenerateConfig, tables["generate"], given, {"edge": EdgeConfig})


def _generate(args: argparse.Namespace) -> int:
    edge, options = _configs(args)
    if args.system is not None and not args.chat:
        raise UsageError("--system goes with --chat")
    if args.out is not None:
        return _generate_batch(args, edge, options)
    if args.restart:
        raise UsageError("--restart goes with --out FILE")
    with Interrupts() as interrupts:
        if args.json:
            interrupts.last_words = lambda: show(_nothing(interrupted=True))
        prompt = _prompt(args)
        from pipesd.edge.output import generate_once

        return generate_once(
            edge, options, prompt, chat=args.chat, system=args.system, as_json=args.json, interrupts=interrupts
        )


def _generate_batch(args: argparse.Namespace, edge: EdgeConfig, options: GenerateConfig) -> int:
    if args.file is None:
        raise UsageError("--out goes with --file FILE, one JSON object a line")
    with Interrupts() as interrupts:
        if args.json:
            interrupts.last_words = lambda: show(_batch_failed(interrupted=True))
        from pipesd.edge.batch import generate_batch

        return generate_batch(
            edge, options, args.file, args.out, chat=args.chat, system=args.system, restart=args.restart,
            as_json=args.json, interrupts=interrupts,
        )  # fmt: skip


def _chat(args: argparse.Namespace) -> int:
    edge, options = _configs(args)
    with Interrupts() as interrupts:
        from pipesd.edge.output import chat_loop

        return chat_loop(edge, options, system=args.system, interrupts=interrupts)


def _link(args: argparse.Namespace) -> int:
    tables = read_tables(args.config, TABLES)
    edge = make_config(EdgeConfig, tables["edge"], {})
    config = make_config(LinkConfig, {"cloud": edge.cloud, "connect_s": edge.connect_s, **tables["link"]}, vars(args))
    with Interrupts() as interrupts:
        if args.json:
            interrupts.last_words = lambda: show(link_failed(interrupted=True))
        return show_link(config, as_json=args.json, quiet=args.quiet, save=args.save)


def _tune(args: argparse.Namespace) -> int:
    tables = read_tables(args.config, TABLES)
    edge = make_config(EdgeConfig, tables["edge"], vars(args))
    config = make_config(TuneConfig, tables["tune"], vars(args))
    with Interrupts() as interrupts:
        if args.json:
            interrupts.last_words = lambda: show(_tune_failed(interrupted=True))
        prompts = [*(args.prompt or ()), *(_read(name) for name in args.file or ())]
        from pipesd.edge.tune import tune

        return tune(edge, config, prompts, save=args.save, as_json=args.json, interrupts=interrupts)


def _plan(args: argparse.Namespace) -> int:
    tables = read_tables(args.config, TABLES)
    return show_plan(make_config(PlanConfig, tables["plan"], vars(args)), as_json=args.json)


def _pair(args: argparse.Namespace) -> int:
    tables = read_tables(args.config, TABLES)
    edge = make_config(EdgeConfig, tables["edge"], {})
    shared = {"draft": edge.draft, "threads": edge.threads, "connect_s": edge.connect_s}
    config = make_config(PairConfig, {**shared, **tables["pair"]}, vars(args))
    with Interrupts() as interrupts:
        if args.json:
            interrupts.last_words = lambda: show(pair_failed(interrupted=True))
        return show_pair(config, args.prompt or (), as_json=args.json, interrupts=interrupts)


def _advise(args: argparse.Namespace) -> int:
    tables = read_tables(args.config, TABLES)
    edge = make_config(EdgeConfig, tables["edge"], vars(args))
    config = make_config(AdviseConfig, tables["advise"], vars(args))
    with Interrupts() as interrupts:
        return show_advice(edge, config, args.prompt or (), as_json=args.json, quiet=args.quiet, interrupts=interrupts)


def _failed(argv: Sequence[str], interrupted: bool) -> str:
    """What stdout gets from a command that failed: with --json the object of what never began."""
    objects = {
        "advise": advise_failed,
        "generate": _nothing,
        "link": link_failed,
        "pair": pair_failed,
        "plan": plan_failed,
        "tune": _tune_failed,
    }
    asked = bool(argv) and argv[0] in objects and "--json" in argv
    if asked and argv[0] == "generate" and any(each.partition("=")[0] == "--out" for each in argv):
        return _batch_failed(interrupted)
    return objects[argv[0]](interrupted) if asked else ""


def _nothing(interrupted: bool) -> str:
    from pipesd.edge.result import result_line, result_of

    return result_line(result_of("cancelled" if interrupted else "error"))


def _batch_failed(interrupted: bool) -> str:
    from pipesd.edge.result import batch_line

    return batch_line("cancelled" if interrupted else "error", prompts=None, before=0)


def _tune_failed(interrupted: bool) -> str:
    from pipesd.edge.result import tune_failed

    return tune_failed(interrupted)


def _prompt(args: argparse.Namespace) -> str:
    """The prompt as given, or from a file or stdin without one newline at its end."""
    if args.prompt is not None:
        return str(args.prompt)
    if args.file is not None:
        return _read(args.file)
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("no prompt: give --prompt TEXT or --file FILE, or pipe it in")
    return _read("stdin")


def _read(name: str) -> str:
    """The text of a file, or of stdin, without one newline at its end."""
    try:
        data = sys.stdin.buffer.read() if name == "stdin" else Path(os.path.expanduser(name)).read_bytes()
        return data.removesuffix(b"\r\n" if data.endswith(b"\r\n") else b"\n").decode()
    except OSError as error:
        raise UsageError(f"prompt file {name}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt from {name} is not UTF-8 (byte {error.start}): convert it first") from error
