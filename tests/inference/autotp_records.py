"""Classes of transformers as JSON, and cuts of an affine_map.

DeepSpeed wrote the fixture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ucpl.inference.hf.modules import Heads, Module, Network


def recorded(network: Network) -> dict[str, Any]:
    h = network.heads
    return {
        "root": _module(network.root),
        "shapes": {name: list(shape) for name, shape in network.shapes.items()},
        "owners": dict(network.owners),
        "plan": dict(network.plan),
        "origins": dict(network.origins),
        "heads": [h.kv, h.kv_key, h.query, h.hidden],
        "takes_loss": network.takes_loss,
        "inputs": network.inputs,
    }


def network_in(found: dict[str, Any]) -> Network:
    return Network(
        _module_in(found["root"]),
        {name: tuple(shape) for name, shape in found["shapes"].items()},
        found["owners"],
        found["plan"],
        found["origins"],
        Heads(*found["heads"]),
        found["takes_loss"],
        found["inputs"],
    )


def _module(one: Module) -> list[Any]:
    shapes = {name: list(shape) for name, shape in one.shapes.items()}
    return [one.name, one.kind, one.role, shapes, [_module(child) for child in one.children], one.is_plain]


def _module_in(found: list[Any]) -> Module:
    name, kind, role, shapes, children, is_plain = found
    own = {key: tuple(shape) for key, shape in shapes.items()}
    return Module(name, kind, role, own, tuple(map(_module_in, children)), is_plain)


def cuts_in(maps: Mapping[str, Any]) -> dict[str, list[list[Any]]]:
    """{parameter: [first elements and shapes of pieces per rank]}, without copies."""
    out: dict[str, list[list[Any]]] = {}
    for name, one in maps.items():
        ranks = [one["ranks"][rank] for rank in sorted(one["ranks"])]
        pieces = [[[p["source"][0], list(p["shape"])] for p in rank["pieces"]] for rank in ranks]
        if any(rank["shard_shape"] != list(one["logical_shape"]) for rank in ranks):
            out[name] = pieces
    return out
