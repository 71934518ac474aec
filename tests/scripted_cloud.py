"""A scripted target in the program `pipesd-cloud`: `BEFORE` is to run before it, the environment says what it is."""

from __future__ import annotations

import os

from pipesd.config import CloudConfig
from pipesd.edge.tokeniser import Tokeniser
from pipesd.sim.targets import ScriptedTarget
from pipesd.sim.texts import KeyedText

LAW = KeyedText(9)
BEFORE = (
    "import pipesd.cloud.server, tests.scripted_cloud; "
    "pipesd.cloud.server.load_target = tests.scripted_cloud.load_target; "
)


def load_target(config: CloudConfig) -> ScriptedTarget:
    """Stands in for the loading of `config.model`, of which it takes the vocabulary alone."""
    tokeniser = Tokeniser.open(config.model)
    tokeniser.close()
    return ScriptedTarget(
        LAW,
        tokeniser.vocabulary,
        context=config.context or 2048,
        slots=config.max_sessions,
        pass_s=float(os.environ.get("SCRIPTED_PASS_S", "0")),
        token_s=float(os.environ.get("SCRIPTED_TOKEN_S", "0")),
    )
