"""What tests share: the real model pair, where there is one, and how long hypothesis may take."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from provision import has_pair, pair_folder
from workshop import cache_folder

from tests.programs import Models, make_models

# A busy machine must not make a slow example look like a wrong one. Under CI every run tries the same examples.
settings.register_profile(
    "pipesd", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True,
    derandomize=os.environ.get("CI") == "true",
)  # fmt: skip
settings.load_profile("pipesd")

# What tuning learns in tests, of programs too, must not reach the user's own runs.
_state = tempfile.TemporaryDirectory(prefix="pipesd-state-")
os.environ["XDG_STATE_HOME"] = _state.name

# Without a CUDA device kernels run under Triton's interpreter, which must be known before triton is imported at all.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def demo_pair() -> tuple[Path, Path]:
    """The draft and the target model of the demo pair, as files.

    Without them the test is skipped, or fails where PIPESD_REQUIRE_MODEL=1 says that they must be there.
    """
    chosen = os.environ.get("PIPESD_DEMO_DIR")
    folder = Path(chosen) if chosen else pair_folder(cache_folder())
    if not has_pair(folder):
        reason = f"no target.gguf and draft.gguf in {folder}; tools/demo makes them, PIPESD_DEMO_DIR names others"
        if os.environ.get("PIPESD_REQUIRE_MODEL") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return folder / "draft.gguf", folder / "target.gguf"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Tiny models, for the programs to be run with."""
    return make_models(tmp_path_factory.mktemp("models"))
