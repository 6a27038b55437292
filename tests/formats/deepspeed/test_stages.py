"""The begins of a pipeline's stages, from their known layers."""

from __future__ import annotations

import pytest

from ucpl.formats.deepspeed.stages import _direct


@pytest.mark.parametrize(
    ("own", "stages", "count", "bounds"),
    [
        ({0: 0, 1: 0, 3: 1, 4: 1}, 2, 6, (0, 3, 6)),  # layer 2 has no tensors: it is the stage's before it
        ({4: 1, 3: 1, 0: 0}, 2, 5, (0, 3, 5)),  # the least one, in any order
        ({0: 0, 1: 0, 4: 2}, 3, 5, (0, 2, 4, 5)),  # stage 1 follows the known layers before it
        ({0: 0, 5: 1}, 3, 7, (0, 5, 6, 7)),
        ({}, 3, 4, (0, 1, 2, 4)),  # a layer each, at least
        ({2: 2}, 3, 4, (0, 1, 2, 4)),
        ({1: 0}, 1, 4, (0, 4)),
    ],
)
def test_a_stage_begins_with_its_first_layer_that_is_known(
    own: dict[int, int], stages: int, count: int, bounds: tuple[int, ...]
) -> None:
    assert _direct(own, stages, count) == bounds
