"""Laws of layouts for your tests: a round trip changes nothing.

    from ucpl.testing import assert_round_trip
    assert_round_trip("my.ucpl:megatron(tp = 2, pp = 2)", "my.ucpl:megatron(tp = 4, pp = 1)")

Every logical element gets a number of its own, is laid out as the source says, carried over by the moves of the plan, and
compared with the target's own numbers: an element in a wrong place names itself. Strategies of Hypothesis
(`models`, `meshes`, `layouts`, `layout_pairs`) make models and layouts that no person would write.

Not here: files and bytes. Nothing is read or written, and torch is never imported.
"""

from ucpl.testing.laws import Example, assert_round_trip
from ucpl.testing.numbers import gather, lay_out, numbered, run
from ucpl.testing.strategies import layout_pairs, layouts, meshes, models
from ucpl.testing.trials import Report, roundtrip

__all__ = [
    "Example",
    "Report",
    "assert_round_trip",
    "gather",
    "lay_out",
    "layout_pairs",
    "layouts",
    "meshes",
    "models",
    "numbered",
    "roundtrip",
    "run",
]
