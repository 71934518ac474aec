"""All benches by name: `python -m bench --list`, `python -m bench NAME [options]`, `python -m bench all [--quick]`.

`all` runs every bench that needs no option, one after the other, whatever became of the one before; the exit code is 1
if one failed. One that says by its exit code that the machine is not for it has not. Each is also a program of its own,
`python bench/NAME.py`.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
NOT_HERE = 77  # the exit code of a bench that this machine has nothing for


class Bench(NamedTuple):
    """One file: its name, the first line of what it says of itself, the options that it cannot do without, whether it
    has a short form."""

    name: str
    about: str
    needs: tuple[str, ...]
    quick: bool


def benches() -> dict[str, Bench]:
    """Every file here that is a program, by name."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        runs = any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body)
        if runs and path.stem != "__main__":
            doc = ast.get_docstring(tree) or ""
            found[path.stem] = Bench(path.stem, about(doc), needs(doc, path.stem), "--quick" in source)
    return found


def about(doc: str) -> str:
    """The first sentence, without the command that stands in it or follows it."""
    first = re.sub(r"[,:]? `python [^`]*`", "", doc.split("\n\n")[0].replace("\n", " "))
    return re.split(r"(?<=[?.])\s", first)[0].rstrip(".")


def needs(doc: str, name: str) -> tuple[str, ...]:
    """The options that stand outside brackets in the command of the docstring; of `--a FILE|--b`, which is `--a|--b`
    here, one is enough."""
    command = re.search(rf"`python bench/{name}\.py([^`]*)`", doc)
    words = re.sub(r"\[[^\]]*\]|(?<=[a-z]) [A-Z][^\s|]*", "", command[1]).split() if command else []
    return tuple(word for word in words if word.startswith("--"))


def run(bench: Bench, words: list[str]) -> int:
    """Its exit code; it writes to this program's own streams. The package is the one beside this folder."""
    places = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    return subprocess.call([sys.executable, str(FOLDER / f"{bench.name}.py"), *words], env=environment)


def run_all(words: list[str]) -> int:
    """Every bench that can do without an option that is not given; 1 if one failed."""
    said = []
    for bench in benches().values():
        missing = [need for need in bench.needs if not set(need.split("|")).intersection(words)]
        if missing:
            said.append(f"{bench.name}: left out, it needs {' '.join(missing)}")
            continue
        given = [word for word in words if word != "--quick" or bench.quick]
        print(f"== {bench.name}", file=sys.stderr, flush=True)
        begun_s = time.monotonic()
        code = run(bench, given)
        ended = {0: "done", NOT_HERE: "not for this machine"}.get(code, f"failed with {code}")
        said.append(f"{bench.name}: {ended}, {time.monotonic() - begun_s:.0f} s")
    print("\n".join(said), file=sys.stderr)
    return 1 if any(": failed" in line for line in said) else 0


def main(words: list[str]) -> int:
    known = benches()
    if words[:1] == ["--list"]:
        for bench in known.values():
            wanted = f" (needs {' '.join(bench.needs)})" if bench.needs else ""
            print(f"{bench.name:18} {bench.about}{wanted}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    if words[0] == "all":
        return run_all(words[1:])
    if words[0] not in known:
        near = difflib.get_close_matches(words[0], known, 1)
        advice = f"did you mean {near[0]}?" if near else "python -m bench --list names them"
        print(f"error: no bench {words[0]!r}: {advice}", file=sys.stderr)
        return 2
    return run(known[words[0]], words[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
