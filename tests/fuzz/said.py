"""A user's inputs other than files.

Calls of shipped layouts with odd values, and a config.json given with `--config`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random

from attrs import define, frozen

from tests.fuzz.containers import FIXTURES
from tests.fuzz.damage import damage_bytes, damage_value
from tests.fuzz.lessened import every_kind
from tests.fuzz.plans import json_of
from tests.fuzz.small import stored
from ucpl.conversion.opening import open_checkpoint
from ucpl.conversion.planning import make_plan
from ucpl.conversion.requests import Called, Given, called, config_at
from ucpl.conversion.side import Side, located
from ucpl.conversion.sides import source_side, target_side
from ucpl.files.pickles import dump_pickle
from ucpl.formats.opening import framework
from ucpl.language import nodes, parse, parse_call
from ucpl.layout import Library
from ucpl.planning.files import plan_bytes
from ucpl.resources import spec_files

SPEC = """ucpl 1
let base = default(config.base, 4)
let width = min(config.width, base * 1024)
model own {
  dim l = config.layers, h = width / config.heads, f = default(config.ffn, 4 * h)
  dim e = default(config.moe.experts, 2)
  up   : l f h
  gate : l e h when config.moe
  norm : h     when config.has_norm and not config.tied
  bias : f     when config.kind == "llama"
  dtype f32
  assert config.layers % 1 == 0, "{l}"
}
layout whole() of own {
  framework torch()
  file weights = torch "whole.pt"
  up[l]   = f h  as "{l}.up"
  gate[l] = e h  as "{l}.gate" when config.moe
  norm    = h    as "norm"     when config.has_norm and not config.tied
  bias    = f    as "bias"     when config.kind == "llama"
}
layout cut(tp) of own extends whole() {
  mesh tp
  file weights = torch "{tp}.pt"
  up[l] = f@spread(tp) h  as "{l}.up"
  gate[l] = e@spread(tp) h  as "{l}.gate" when config.moe
}
"""
CONFIG = {
    "base": 4,
    "width": 64,
    "layers": 3,
    "heads": 8,
    "ffn": 20,
    "moe": {"experts": 4, "top_k": 2},
    "has_norm": True,
    "tied": False,
    "kind": "llama",
    "architectures": ["X"],
    "eps": 1e-6,
    "rope": None,
}


@define(eq=False)
class Configs:
    """A bent config.json, and a model that depends on all of it.

    It is read as `--config` reads it.
    """

    path: Path
    library: Library
    damage: str = ""

    @classmethod
    def prepare(cls, folder: Path) -> Configs:
        library = Library()
        library.add(parse(SPEC, "own.ucpl"))
        return cls(folder / "config.json", library)

    def attempt(self, rng: Random) -> str:
        value, self.damage = damage_value(rng, json.loads(json.dumps(CONFIG)))
        raw = json_of(value)
        if rng.random() < 0.1:
            raw = raw.replace(b": 3", b": " + rng.choice(NUMBERS).encode())
        if rng.random() < 0.1:
            raw, how = damage_bytes(rng, raw)
            self.damage += f"; {how}"
        self.path.write_bytes(raw)
        config = config_at(self.path)
        call = parse_call(rng.choice(("whole()", "cut(tp = 2)", "cut(tp = 3)")))
        side = located(Called(self.library, call), Given(config=config))
        if side.layout.ranks <= 64:
            str(side.layout)
        return self.damage


NUMBERS = (
    *("0", "1", "2", "3", "4", "5", "7", "8", "64", "1000", "2147483648", "4611686018427387904"),
    *(
        "-1",
        "1.5",
        "1e9",
        "1e999",
        "9" * 30,
        "9" * 5000,
        "2 * 3",
        "1 - 2",
        "6 / 4",
        "1 / 0",
        "2 - 2",
        "1000000 * 1000000",
    ),
    *(
        '""',
        '"x"',
        '"²"',
        '"auto"',
        '"5GB"',
        '"1KB"',
        '"0"',
        '"-1GB"',
        '"{dp}"',
        '"../x"',
        '"a/b"',
        '"\\ud800"',
        '"/etc/x"',
    ),
    *("[]", "[1]", "[1, 2]", "[2, 2, 2]", "[0, 5]", "[[1]]", '["a"]', "[1, -1]", f"[{', '.join('1' * 400)}]"),
    *("dp", "tp", "x", "config.x", "none", "default(dp, 2)", "max()", "max(1, 2)", "not 1", "1 == 1", "size(dp)"),
)
RANKS_WRITTEN = 64
LIKELY = ("1", "2", "3", "4", "1", "2")
OTHERS = ("stages", "partition", "kv_heads", "ep", "etp", "mp", "dp", "n", "", "²", "layers", "vocab", "sequence", "tp")
SOURCES = (  # and small ones of each, eight times as often
    "z1_dp2_bf16",
    "z0_dp2_bf16",
    "z3_dp2_subgroup",
    "tp2_dp2_z1_uneven",
    "pp2_dp2_z1_functions",
    "moe_ep2_dp2_z1",
)


@frozen(eq=False)
class Shipped:
    """A layout of any model, and its parameters."""

    name: str
    parameters: tuple[str, ...]


@cache
def shipped() -> tuple[Shipped, ...]:
    found = []
    for name, text in spec_files():
        for node in parse(text.read_text(encoding="utf-8"), name).statements:
            if isinstance(node, nodes.Layout) and node.of == "any":
                found.append(Shipped(node.name, tuple(p.name for p in node.parameters)))
    return tuple(found)


@define(eq=False)
class Calls:
    """Calls of shipped layouts as targets of stored checkpoints.

    Resolved, located, planned, and their metadata written.
    """

    sources: list[Side]
    damage: str = ""

    @classmethod
    def prepare(cls, folder: Path) -> Calls:
        every = [*(FIXTURES / "deepspeed" / name for name in SOURCES), *every_kind(folder, *SOURCES)]
        made = [source_side(open_checkpoint(path), None, Given()) for path in every]
        made += made[len(SOURCES) :] * 7
        spec, whole = stored(folder)
        described = called(f"{spec}:whole()")
        made.append(source_side(open_checkpoint(whole, described), described, Given()))
        return cls(made)

    def attempt(self, rng: Random) -> str:
        source = rng.choice(self.sources)
        text = self.damage = call_of(rng)
        self.damage += f" of {source.checkpoint.top if source.checkpoint else ''}"
        target = target_side(called(text), source, Given())
        assert target.layout.ranks < 1 << 40, target.layout.ranks
        if rng.random() < 0.3 and target.layout.ranks <= RANKS_WRITTEN:  # each has a file
            plan = make_plan(source, target)
            plan_bytes(plan)
            assert source.checkpoint is not None
            for file in (
                framework(plan.target.framework).skeleton(plan.target, plan.targets, source.checkpoint, None).files
            ):
                if file.form == "torch":
                    dump_pickle(file.value)
        return self.damage


def call_of(rng: Random) -> str:
    one = rng.choice(shipped())
    arguments = []
    for name in one.parameters:
        if name == "dp" or rng.random() < 0.25:
            arguments.append((name, rng.choice(LIKELY)))
    for _ in range(rng.choice((1, 1, 1, 2))):
        value = rng.choice(NUMBERS)
        if arguments and rng.random() < 0.7:
            at = rng.randrange(len(arguments))
            arguments[at] = (arguments[at][0], value)
        else:
            arguments.append((rng.choice(OTHERS), value))
    words = [f"{name} = {value}" if name and rng.random() < 0.95 else value for name, value in arguments]
    text = f"{one.name}({', '.join(words)})"
    if rng.random() < 0.05:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(("", "(", ")", ",", "=", "\0", "²", "#", "\n", '"')) + text[at + 1 :]
    return text
