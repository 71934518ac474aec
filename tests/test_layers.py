"""Who may import whom, read from the sources: what decides stays pure, and each heavy library has its door."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pipesd"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# A layer is a folder of the package; "shared" are the modules beside the folders, "root" is `pipesd` itself.
ALLOWED = {
    "root": {"shared", "edge", "cloud", "policy", "sim"},  # by name, on first use
    "shared": {"shared", "root"},
    "_kernels": {"_kernels"},
    "policy": {"policy", "_kernels", "shared"},
    "protocol": {"protocol", "policy", "shared"},
    "edge": {"edge", "protocol", "policy", "shared"},
    "cloud": {"cloud", "protocol", "policy", "shared"},
    "sim": {"sim", "protocol", "policy", "shared"},
}
# What one module takes of another layer beyond that: the simulator drives the edge's own loop, advice simulates.
TAKEN = {
    "pipesd.sim.sim_user": {f"pipesd.edge.{name}" for name in ("connection", "local", "loop", "run")},
    "pipesd.edge.advise": {f"pipesd.sim.{name}" for name in ("advice", "link_model", "trace")},
}
PURE = {"policy", "protocol", "_kernels"}
IMPURE = {"asyncio", "concurrent", "datetime", "multiprocessing", "random", "select", "selectors", "signal", "socket"}
IMPURE |= {"subprocess", "tempfile", "threading", "time", "zmq"}
EXCEPTED = {("pipesd.protocol.quick", "threading")}  # a buffer for each thread

# Library: the modules that may import it at all, at any place in them. Ending in "." means a folder.
DOORS = {
    "gguf": ("pipesd.cloud.gguf_tensor",),
    "jinja2": ("pipesd.edge.chat",),
    "llama_cpp": ("pipesd.edge.llama",),
    "msgpack": ("pipesd.protocol.quick", "pipesd.protocol.wire"),
    "numba": ("pipesd._kernels.",),
    "pynvml": ("pipesd.energy_gpu",),
    "torch": (
        "pipesd.cloud.checkpoint",
        "pipesd.cloud.device_sampling",
        "pipesd.cloud.gguf_tensor",
        "pipesd.cloud.graphs",
        "pipesd.cloud.kv_cache",
        "pipesd.cloud.loading",
        "pipesd.cloud.model",
        "pipesd.cloud.rotary",
        "pipesd.cloud.paged_attention",
        "pipesd.cloud.paged_cache",
        "pipesd.cloud.paged_kernels",
        "pipesd.cloud.pass_batches",
        "pipesd.cloud.placing",
        "pipesd.cloud.safetensors_file",
        "pipesd.cloud.step_kernels",
        "pipesd.cloud.steps",
        "pipesd.cloud.stored_tensor",
        "pipesd.cloud.target",
        "pipesd.cloud.transformers_model",
        "pipesd.cloud.transformers_target",
    ),
    "transformers": ("pipesd.cloud.transformers_model",),
    "safetensors": ("pipesd.cloud.transformers_model",),
    "huggingface_hub": ("pipesd.cloud.transformers_model",),  # what transformers raises for a config is its class
    "triton": ("pipesd.cloud.paged_kernels", "pipesd.cloud.step_kernels"),
    "zmq": ("pipesd.transport", "pipesd.sockets", "pipesd.cloud.front"),
}
ELSEWHERE = {"numpy"}  # may be imported anywhere
HEAVY = {"gguf", "jinja2", "llama_cpp", "numba", "scipy", "torch", "transformers", "triton"}
BANNED = {"marshal", "pickle", "shelve"}  # what comes by a socket or a file is never unpickled


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> str:
    parts = module.split(".")
    if len(parts) == 1:
        return "root"
    return parts[1] if (PACKAGE / parts[1]).is_dir() else "shared"


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of the file, wherever it stands; names taken out of `pipesd` count as modules."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import; write it out"
            assert node.module is not None
            modules = {alias.name for alias in node.names if (PACKAGE / alias.name).with_suffix(".py").exists()}
            modules |= {alias.name for alias in node.names if (PACKAGE / alias.name).is_dir()}
            if node.module == "pipesd" and modules:
                yield from ((node.lineno, f"pipesd.{name}") for name in modules)
            else:
                yield node.lineno, node.module


def everything() -> Iterator[tuple[str, str, str]]:
    """(place, importing module, imported module) over the whole package."""
    for path in SOURCES:
        for line, imported in imports(path):
            yield f"{path.relative_to(ROOT)}:{line}", module_name(path), imported


def test_every_folder_is_a_known_layer() -> None:
    assert {layer(module_name(path)) for path in SOURCES} <= set(ALLOWED)


def test_layers_import_only_what_lies_below() -> None:
    wrong = [
        f"{place} imports {imported}"
        for place, module, imported in everything()
        if imported.split(".")[0] == "pipesd" and layer(imported) not in ALLOWED[layer(module)]
        if imported not in TAKEN.get(module, ())
    ]
    assert not wrong
    used = {(module, imported) for _, module, imported in everything()}
    idle = [(module, name) for module, names in TAKEN.items() for name in names if (module, name) not in used]
    assert not idle, "no exception stands longer than it is needed"


def test_what_decides_has_no_sockets_threads_clocks_or_chance() -> None:
    wrong = [
        f"{place} imports {imported}"
        for place, module, imported in everything()
        if layer(module) in PURE or module == "pipesd.core"
        if imported.split(".")[0] in IMPURE and (module, imported) not in EXCEPTED
    ]
    assert not wrong


def test_libraries_come_in_by_their_doors_only() -> None:
    wrong = []
    for place, module, imported in everything():
        library = imported.split(".")[0]
        if library == "pipesd" or library in sys.stdlib_module_names or library in ELSEWHERE:
            continue
        doors = DOORS.get(library, ())
        if not any(module == door or (door.endswith(".") and f"{module}.".startswith(door)) for door in doors):
            wrong.append(f"{place} imports {library}")
    assert not wrong


def test_every_door_is_used() -> None:
    used = {(module, imported.split(".")[0]) for _, module, imported in everything()}
    idle = [
        f"{door} imports no {library}"
        for library, doors in DOORS.items()
        for door in doors
        if not any(name == library and f"{module}.".startswith(f"{door.rstrip('.')}.") for module, name in used)
    ]
    idle += [f"{module} imports no {name}" for module, name in EXCEPTED if (module, name) not in used]
    assert not idle


def test_nothing_can_unpickle() -> None:
    assert not [f"{place} imports {name}" for place, _, name in everything() if name.split(".")[0] in BANNED]


def run_and_list_heavy(program: str) -> set[str]:
    """The heavy libraries that a fresh interpreter has loaded after `program`."""
    code = f"import sys\n{program}\nprint('loaded', *sorted(set(sys.modules) & {HEAVY!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1].split()
    assert last[0] == "loaded"
    return set(last[1:])


def test_importing_loads_nothing_heavy_but_in_the_torch_doors() -> None:
    modules = [module_name(path) for path in SOURCES]
    light = [module for module in modules if module not in DOORS["torch"] and layer(module) != "_kernels"]
    assert run_and_list_heavy("\n".join(f"import {module}" for module in light)) == set()


def test_public_names_load_nothing_heavy() -> None:
    assert run_and_list_heavy("import pipesd\nfor name in pipesd.__all__: getattr(pipesd, name)") == set()


@pytest.mark.parametrize("side", ["edge", "cloud"])
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_loads_nothing_heavy(side: str, option: str) -> None:
    program = f"from pipesd.{side}.cli import main\ntry: main([{option!r}])\nexcept SystemExit: pass"
    assert run_and_list_heavy(program) == set()
