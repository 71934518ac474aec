"""PipeSD: a draft model at the edge, a target model in the cloud, and exactly the target's text.

The public names are loaded on first use, so that importing the package stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pipesd.cloud.server import CloudServer
    from pipesd.config import CloudConfig, EdgeConfig, GenerateConfig
    from pipesd.core import Piece
    from pipesd.edge.aio import AsyncEdgeSession
    from pipesd.edge.session import EdgeSession
    from pipesd.errors import PipeSDError
    from pipesd.policy.token_batches import TokenBatchPlan, plan_token_batches
    from pipesd.policy.trigger import DualThreshold
    from pipesd.policy.tuner import Tuner
    from pipesd.sim.simulate import simulate

_PLACES = {
    "AsyncEdgeSession": "pipesd.edge.aio",
    "CloudConfig": "pipesd.config",
    "CloudServer": "pipesd.cloud.server",
    "DualThreshold": "pipesd.policy.trigger",
    "EdgeConfig": "pipesd.config",
    "EdgeSession": "pipesd.edge.session",
    "GenerateConfig": "pipesd.config",
    "Piece": "pipesd.core",
    "PipeSDError": "pipesd.errors",
    "TokenBatchPlan": "pipesd.policy.token_batches",
    "Tuner": "pipesd.policy.tuner",
    "plan_token_batches": "pipesd.policy.token_batches",
    "simulate": "pipesd.sim.simulate",
}

__all__ = [
    "AsyncEdgeSession",
    "CloudConfig",
    "CloudServer",
    "DualThreshold",
    "EdgeConfig",
    "EdgeSession",
    "GenerateConfig",
    "Piece",
    "PipeSDError",
    "TokenBatchPlan",
    "Tuner",
    "__version__",
    "plan_token_batches",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'pipesd' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__
