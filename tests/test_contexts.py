"""The context that a config.json states, in any of the ways that families have of saying it."""

from __future__ import annotations

from typing import Any

import pytest

from pipesd.contexts import stated_context, stretched

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, 0),
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 512, "n_ctx": 64}, 512),
        ({"text_config": {"max_position_embeddings": 4096, "rope_scaling": YARN}}, 4096),
        ({"max_position_embeddings": 8, "text_config": {"max_position_embeddings": 4096}}, 8),
        ({"max_position_embeddings": 512, "rope_scaling": YARN}, 2048),
        ({"max_position_embeddings": 512, "rope_parameters": YARN}, 2048),
        ({"max_position_embeddings": 512, "rope_scaling": YARN | {"rope_type": "linear"}}, 512),
        ({"max_position_embeddings": 512, "rope_scaling": YARN, "original_max_position_embeddings": 256}, 1024),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "yarn", "factor": 1.5}}, 768),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "yarn"}}, 512),
        ({"max_position_embeddings": 512, "rope_parameters": {"full_attention": YARN}}, 2048),
        ({"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_scaling": LONG}, 4096),
        ({"max_position_embeddings": 512, "rope_parameters": LONG | {"original_max_position_embeddings": 64}}, 64),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "su"}, "original_max_position_embeddings": 64}, 64),
        ({"max_position_embeddings": 512, "rope_parameters": {"a": YARN, "b": LONG}}, 512),
        ({"max_position_embeddings": 512, "rope_scaling": LONG}, 512),
        *(({"max_position_embeddings": value}, 0) for value in (None, True, 0, 1, -5, "512", [512], 1e300, 10**400)),
        *(({"max_position_embeddings": 512, "rope_scaling": value}, 512) for value in (None, 7, "yarn", [YARN], {})),
        *(
            ({"max_position_embeddings": 512, "rope_scaling": YARN | {"factor": value}}, 512)
            for value in ("4", None, -1, True, 1e9, float("nan"), float("inf"))
        ),
        ({"text_config": 7}, 0),
    ],
)
def test_a_context_is_said_in_many_ways_or_not_at_all(config: dict[str, Any], wanted: int) -> None:
    assert stated_context(config) == wanted


def test_stretching_never_shortens() -> None:
    assert stretched(4096, 512, 4.0) == 4096 and stretched(512, 512, 4.0) == 2048
    assert stretched(512, 1e300, 1e300) > 1 << 60, "absurd, but a number"
