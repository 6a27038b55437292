"""Command lines that nobody would type.

Words of every kind in every place. The result is an answer or our own error.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import torch
from attrs import frozen
from safetensors.torch import save_file

from tests.cli.command import FIXTURES, Done, good, ucpl

SPEC = """ucpl 2
let wide = 4
model own {
  dim l = 3, h = wide, f = config.width
  up   : l f h
  norm : h when config.has_norm
  dtype f32
}
layout whole() of own {
  framework torch()
  file weights = torch "whole.pt"
  up   = l f h  as "up"
  norm = h      as "norm" when config.has_norm
}
layout cut(tp, pp = 1) of own {
  framework torch()
  mesh pp tp
  index l = l@spread(pp)
  file weights = torch "stage_{pp}_{tp:02}.pt"
  up[l] = f@spread(tp) h  as "{l}.up"
  norm  = h  at pp[-1]    as "norm" when config.has_norm
}
plan grow = whole() -> cut(tp = 2)
"""
CONFIGS = [
    "{}",
    "[1]",
    "null",
    "{",
    '{"width": 7, "has_norm": true}',
    '{"width": "7"}',
    '{"width": 1e999}',
    '{"width": [1]}',
    '{"width": -5}',
    '{"width": ' + "9" * 5000 + "}",
    '{"text_config": 5, "num_key_value_heads": true, "architectures": 3, "model_type": ["x"]}',
    '{"architectures": [{}], "model_type": {"a": 1}, "num_hidden_layers": "²"}',
    "[" * 3000 + "]" * 3000,
]
NUMBERS = ["0", "1", "2", "3", "-1", "²", "٣", "1e9", "9" * 30, "9" * 5000, "0x10", "1_000", "inf", "nan", "", " 2 "]
NAMES = [
    "wide",
    "l",
    "h",
    "f",
    "nosuch",
    "²",
    "a" * 300,
    "w" * 5000,
    "\udcff",
    "ä",
    "",
    "-",
    "*",
    "/",
    ".",
    "..",
    "{l}",
]
CALLS = [
    "zero0(dp={n})",
    "zero1(dp={n})",
    "zero2({w}={n})",
    "zero3(dp=2, sub_group_size={n})",
    "zero1({n})",
    "universal(files={n})",
    "plain()",
    "plain(file={t})",
    "plain(has_masters={n})",
    "safetensors(shard={t})",
    "safetensors(shard={n})",
    "zero1(",
    "zero1(dp=2))",
    "{w}()",
    "{w}",
    "{spec}:cut(tp={n})",
    "{spec}:whole()",
    "{spec}:{w}",
    "{spec}:cut(tp=2, pp={n})",
    "own.ucpl:",
    ".ucpl:",
    "nosuch.ucpl:x()",
    "zero1(dp=2, kv_heads={n})",
    "zero1(tp={n})",
    "zero1(pp={n})",
    "zero1(dp=2, stages=[{n}, {n}])",
    "zero1(dp=2, bf16={n})",
    "hf()",
    "megatron(tp=2)",
    "zero1(dp=[{n}])",
    "zero1(dp=dp)",
    "zero1(dp={n} * {n})",
    "a" * 5000 + "()",
]


@frozen
class Place:
    """A folder with each kind of thing that a verb accepts."""

    folder: Path
    things: tuple[str, ...]
    configs: tuple[str, ...]

    @classmethod
    def make(cls, folder: Path) -> Place:
        for name in ("z1_dp4", "tp2_dp2_z1_uneven", "pp2_dp2_z1"):
            shutil.copytree(FIXTURES / name, folder / name)
        (folder / "own.ucpl").write_text(SPEC)
        (folder / "broken.ucpl").write_bytes(b"ucpl 1\nmodel \xff {")
        (folder / "empty").mkdir()
        (folder / "text.txt").write_text("a text")
        os.mkfifo(folder / "fifo")
        configs = []
        for number, text in enumerate(CONFIGS):
            (folder / f"config{number}.json").write_text(text)
            configs.append(f"config{number}.json")
        (folder / "odd").mkdir()
        shutil.copy(folder / "config10.json", folder / "odd" / "config.json")
        (folder / "hf").mkdir()
        odd = {
            n: torch.zeros(2, 3) for n in ("a.²", "a.0.w", "a.1.w", "b." + "9" * 900, "ä", "c.01", "x y", "λ.0", "#")
        }
        save_file(odd, folder / "hf" / "model.safetensors")
        good("plan", "--from", folder / "z1_dp4", "--to", "zero3(dp=3)", "-o", folder / "grow.plan")
        shutil.copy(folder / "config4.json", folder / "hf" / "config.json")
        things = (
            "z1_dp4",
            "tp2_dp2_z1_uneven",
            "pp2_dp2_z1",
            "own.ucpl",
            "broken.ucpl",
            "empty",
            "text.txt",
            "fifo",
            "odd",
            "hf",
        )
        return cls(folder, (*things, "grow.plan", "/dev/full", "nowhere", "made.pt"), tuple(configs))

    def clear(self) -> None:
        """Remove the files of a command under the usual names."""
        for place in (self.folder / "new", self.folder / "new.pt"):
            if place.is_dir():
                shutil.rmtree(place)
            place.unlink(missing_ok=True)


class Writer:
    """One command line from a seed."""

    def __init__(self, place: Place, seed: int) -> None:
        self.place = place
        self.chance = random.Random(seed)
        self.odd = self.chance.choice((0.0, 0.1, 0.3, 1.0))  # share of words that are of no use

    def line(self) -> list[str]:
        pick = self.chance.choice
        verb = pick(sorted(VERBS))
        out = [word for kind in VERBS[verb][0] if self.chance.random() < 0.95 for word in [self.word(kind)]]
        for _ in range(self.chance.choice((0, 0, 1, 1, 2, 3))):
            option, kind = pick(VERBS[verb][1] + COMMON)
            out += [option] + ([self.word(kind)] if kind else [])
        if verb in MUST and self.chance.random() < 0.95:
            out += [MUST[verb], self.word("call")]
        if self.chance.random() < 0.1:
            out.insert(self.chance.randrange(len(out) + 1), self.word("any"))
        return [verb.strip(), *out]

    def word(self, kind: str) -> str:
        """A word for such a place.

        One that may do, or (a share of `odd`) one that hardly can.
        """
        if kind.startswith("="):
            return kind[1:]
        if self.chance.random() >= self.odd and kind in MAY_DO:
            return self.chance.choice(MAY_DO[kind])
        return self.odd_word(kind)

    def odd_word(self, kind: str) -> str:
        pick = self.chance.choice
        if kind == "any" or self.chance.random() < 0.05:
            kind = pick(("call", "number", "name", "thing", "config", "size"))
        match kind:
            case "call":
                return self.call() if self.chance.random() < 0.85 else pick(self.place.things)
            case "number":
                return pick(NUMBERS)
            case "name":
                return pick(NAMES)
            case "checkpoint":
                return (
                    pick(self.place.things[:3])
                    if self.chance.random() < 0.8
                    else pick((*self.place.things, *NAMES[5:8]))
                )
            case "spec":
                return pick(("own.ucpl", "own.ucpl", "broken.ucpl", *self.place.things[-8:], *NAMES[5:8]))
            case "plan":
                return pick(("grow.plan", "grow.plan", "grow.plan", *self.place.things))
            case "target":
                return pick(("new", "new.pt", "a/b", "z1_dp4", ".", "..", "/", *NAMES))
            case "config":
                return pick((*self.place.configs, "/dev/full", "fifo", "empty", "nowhere", "odd"))
            case "import":
                return pick((*self.place.configs, "odd", "hf", "hf/model.safetensors", *self.place.things))
            case "size":
                return pick(("{w}={n}", "{w}", "wide={n}", "=", "wide=", "f={n}", "={n}")).format(
                    w=pick(NAMES), n=pick(NUMBERS)
                )
            case "memory":
                return pick(NUMBERS) + pick(("", "M", "G", "T", "Q", "KiB"))
            case "element":
                form = pick(
                    ("{w}[{n}]", "mix[{n}, {n}]", "mix[d={n}]", "mix", "mix[", "wte.weight[{n},{n}]", "[{n}]", "{w}")
                )
                return form.format(w=pick(NAMES), n=pick(NUMBERS))
            case "code":
                return pick(("E500", "e10{n}", "{n}", "E{n}", "{w}", "E²00")).format(w=pick(NAMES), n=pick(NUMBERS))
            case "stage":
                return pick(("resolve", "locate", "build", "order", "nosuch"))
            case _:
                return pick(self.place.things)

    def call(self) -> str:
        pick = self.chance.choice
        text = pick(CALLS)
        for hole, values in (("{n}", NUMBERS), ("{w}", NAMES), ("{spec}", ("own.ucpl", "broken.ucpl", "/dev/full"))):
            while hole in text:
                text = text.replace(hole, pick(values), 1)
        return text.replace("{t}", json.dumps(pick((*NAMES, *NUMBERS, "5GB", "1B")), ensure_ascii=False))


MAY_DO = {
    "checkpoint": ("z1_dp4", "tp2_dp2_z1_uneven", "pp2_dp2_z1", "hf"),
    "call": (
        "zero0(dp=2)",
        "zero1(dp=3)",
        "zero2(dp=2)",
        "zero3(dp=5)",
        "plain()",
        "safetensors()",
        'safetensors(shard="1KB")',
        "universal()",
        "own.ucpl:cut(tp=2)",
        "own.ucpl:whole()",
        "zero1(dp=1, tp=1)",
        "zero1(dp=2, kv_heads=1)",
        "zero1(pp=1)",
        "z1_dp4",
    ),
    "spec": ("own.ucpl",),
    "plan": ("grow.plan",),
    "target": ("new", "new.pt", "deeper/new"),
    "config": ("config4.json",),
    "size": ("wide=4", "f=7", "wide=8"),
    "memory": ("64M", "1M", "1.5G"),
    "number": ("1", "2", "3"),
    "code": ("e500", "E101"),
    "name": ("grow", "exp_avg", "mix", "wide", "own.ucpl:own"),
    "import": ("hf", "hf/model.safetensors"),
    "element": ("mix", "mix[1, 2]", "wte.weight[3, 4]", "wte.weight"),
    "stage": ("resolve", "locate", "build", "order"),
}
PLANE = [("--memory", "memory"), ("--workers", "number")]
SIZES = [("-D", "size"), ("-D", "size"), ("--config", "config")]
RUN = [*PLANE, ("--resume", ""), ("--force", ""), ("--verify-source", ""), ("--allow-global", "name")]
COMMON = [("--json", ""), ("--nosuch", ""), ("--json", "")]
MUST = {"convert": "--to"}
Option = tuple[str, str]
VERBS: dict[str, tuple[tuple[str, ...], list[Option]]] = {
    "inspect": (("checkpoint",), [("--tensors", ""), ("--html", "target")]),
    "infer": (("checkpoint",), [("-o", "target")]),
    "import": (("=hf", "import"), [("-o", "target")]),
    "check": (("spec", "spec"), SIZES),
    "fmt": (("spec",), [("--check", "")]),
    "show": (
        ("call",),
        [*SIZES, ("--after", "stage"), ("--rank", "number"), ("--to", "call"), ("--model", "name"), ("--each", "")],
    ),
    "show ": (
        ("call",),
        [*SIZES, ("--svg", "target"), ("--html", "target"), ("--rank", "number"), ("--model", "name")],
    ),
    "show  ": (("plan",), [("--svg", "target"), ("--html", "target"), ("--rank", "number")]),
    "plan": (("spec", "name"), [*SIZES, ("--rank", "number"), ("--drop", "name"), ("--prove", ""), ("-o", "target")]),
    "plan ": (
        (),
        [*SIZES, ("--from", "call"), ("--to", "call"), ("--from", "call"), ("--to", "call"), ("--model", "name")],
    ),
    "apply": (("plan", "checkpoint", "target"), RUN),
    "convert": (("checkpoint", "target"), [*SIZES, *RUN, ("--dry-run", ""), ("--from", "call"), ("--drop", "name")]),
    "export": (
        ("checkpoint", "target"),
        [*RUN, ("-D", "size"), ("--config", "config"), ("--from", "call"), ("--dry-run", "")],
    ),
    "resume": (("checkpoint",), [*PLANE, ("--ranks", "number"), ("--to", "call")]),
    "compare": (("checkpoint", "checkpoint"), [*PLANE, ("-q", ""), ("--as", "call"), ("--with", "call")]),
    "verify": (("checkpoint",), [*PLANE, ("--quick", ""), ("--seconds", "number"), ("--from", "call")]),
    "roundtrip": (("spec",), [*SIZES, ("--examples", "number"), ("--seed", "number"), ("--model", "name")]),
    "explain": (("code",), []),
    "formats": (("name",), []),
    "why": (("plan", "element"), [("--state", "name")]),
}


def tried(line: list[str]) -> tuple[Done, str]:
    """The result of the command, and its fault.

    An empty text where nothing is.
    """
    done = ucpl(*line)
    wrong = ""
    if "internal error" in done.err or done.status not in (0, 1, 2, 3, 4, 5):
        wrong = f"status {done.status}: {done.err[-300:]}"
    elif done.status > 1 and not done.err.startswith("error[E"):
        wrong = f"no error is said: {done.err[:300]}"
    elif "--json" in line and "--help" not in line and not isinstance(json.loads(done.out), dict):
        wrong = "no object"
    return done, wrong
