"""One walk: a folder is converted step by step, and compared.

After each step its plain() must equal the first one, bit for bit.

A step that ucpl refuses must be refused with a code of `LIMITS`, and nothing must have been written.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from attrs import field, frozen

from tests.walk.starts import BOLD, HOME, SPEC, STARTS, Here, Start, autotp, bold
from ucpl import api
from ucpl.errors import UcplError

STEPS = 8  # of one walk, at most: a short run has more, shorter ones
# Allowed refusals: limits that README and the catalogue name. Any other refusal fails the walk.
LIMITS = {
    "E117": "experts where there are none",
    "E471": "a stage that lacks one of the optimizer's groups",
    "E472": "tensor parallelism from a source that does not say how its tensors are cut",
    "E473": "a tensor-parallel rank that would hold nothing",
    "E475": "stages from a source that is no pipeline, or a form without stages",
    "E476": "layers that two methods deal otherwise",
    "E477": "stages of another number of layers",
    "E547": "degrees that Megatron's layers, heads or experts do not divide by",
    "E478": "experts at a degree or a stage of ZeRO that DeepSpeed does not have",
    "E464": "nothing says how tensors are cut",
}


@frozen
class Step:
    """The call, its source, and its result.

    A code, or "" where the state is the same.
    """

    walk: int
    start: str
    call: str
    refused: str = ""
    wrong: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        text = f"refused {self.refused}: {LIMITS.get(self.refused, 'no limit')}" if self.refused else "same"
        return f"walk {self.walk:>3}  {self.start:<22} {self.call:<60} {'; '.join(self.wrong[:3]) or text}"


def held(path: Path, spec: str | None, scratch: Path) -> dict[str, Any]:
    """A checkpoint's complete state, as plain() gives it: tensors, aliases, groups, numbers."""
    target = scratch / "held.pt"
    api.convert(path, target, "plain()", layout=spec)
    found = torch.load(target, weights_only=True)
    target.unlink()
    return {key: found[key] for key in ("params", "buffers", "aliases", "groups", "scalars")}


def differences(a: Any, b: Any, at: str = "") -> Iterator[str]:
    """The differences of two states, types and bits.

    The order of names in a dict is none.
    """
    if type(a) is not type(b):
        yield f"{at}: {type(a).__name__} and {type(b).__name__}"
    elif isinstance(a, dict):
        yield from (f"{at}/{key}: of one side alone" for key in sorted(a.keys() ^ b.keys(), key=str))
        for key in a:
            if key in b:
                yield from differences(a[key], b[key], f"{at}/{key}")
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            yield f"{at}: {len(a)} and {len(b)}"
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from differences(x, y, f"{at}/{i}")
    elif isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(bits(a), bits(b)):
            yield f"{at}: tensors differ"
    elif a != b:
        yield f"{at}: {a!r} and {b!r}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def with_masters(state: dict[str, Any], truth: dict[str, Any]) -> dict[str, Any]:
    """ZeRO-0 in fp32 keeps no masters: there the weights are their masters."""
    for name, mine in state["params"].items():
        if "fp32" in truth["params"].get(name, {}) and "fp32" not in mine and mine["weight"].dtype is torch.float32:
            mine["fp32"] = mine["weight"]
    return state


def told(state: dict[str, Any], start: Start, here: Here) -> dict[str, Any]:
    """A state without the values that a framework's files lack."""
    if start.family == "megatron":
        return {**state, "groups": groups_of(state["groups"], ("is_expert_parallel",) if here.one_rank else ())}
    if start.family == "dcp" and here.one_rank:
        frozen = {name: held["weight"] for name, held in state["params"].items() if held.keys() == {"weight"}}
        trained = {name: held for name, held in state["params"].items() if name not in frozen}
        return {**state, "params": trained, "buffers": state["buffers"] | frozen}
    return state


def groups_of(groups: list[dict[str, Any]], without: tuple[str, ...]) -> list[dict[str, Any]]:
    """Members in no order, which no file of Megatron's has.

    Groups that only `without` distinguishes are one.
    """
    of: dict[str, dict[str, Any]] = {}
    for group in groups:
        hyper = {key: value for key, value in group.items() if key not in ("params", *without)}
        first = of.setdefault(repr(sorted(hyper.items())), {**hyper, "params": []})
        first["params"] = sorted([*first["params"], *group["params"]])
    return list(of.values())


def after(call: str, here: Here, start: Start) -> Here:
    """The folder after a call's target is written."""
    name, axes = call.partition("(")[0], set(here.axes)
    if name.startswith(HOME):
        return start.here
    if not name.startswith(("zero1", SPEC)) or (
        "ep" in axes and "pp=1" in call
    ):  # experts' stages are in no names of files
        axes.discard("pp")
    if start.draw is autotp and not re.search(r"\btp=[2-9]", call):
        axes.discard("tp")
    one_rank = "ep=1)" in call if name == "megatron_legacy" else here.one_rank or "(fsdp=1)" in call
    return Here(frozenset(axes), f"{SPEC}()" if name == SPEC else None, one_rank)


def home_of(start: Start, scratch: Path) -> str:
    """The inferred text of the first folder, as a file for calls."""
    home = scratch / "home.ucpl"
    if not home.exists():
        home.write_text(api.infer(start.path).text(), encoding="utf-8")
    return str(home)


def one_walk(seed: int, number: int, scratch: Path, steps: int = STEPS, start: Start | None = None) -> Iterator[Step]:
    """The walk of that number.

    The same steps for the same seed, whatever other walks there are.
    """
    rng = Random(f"{seed} {number}")
    start = start or STARTS[number % len(STARTS)] if number < len(STARTS) else rng.choice(STARTS)
    here, path = start.here, start.path
    truth = held(path, start.spec, scratch)
    for i in range(steps):
        is_bold = rng.randrange(BOLD) == 0
        call = bold(rng, start.family) if is_bold else start.draw(rng, here)
        target = scratch / f"{number}.{i}"
        try:
            to = call.replace(HOME, home_of(start, scratch)) if HOME in call else call
            api.convert(path, target, to, layout=here.spec)
        except UcplError as error:
            code = error.diagnostics[0].code
            wrong = [] if code in LIMITS else [f"refused: {code} {error.diagnostics[0].message}"]
            wrong += ["it was refused, and is there"] if target.exists() else []
            yield Step(number, start.name, call, code, tuple(wrong))
            continue
        next_ = after(call, here, start)
        found = with_masters(held(target, next_.spec, scratch), truth)
        differs = differences(told(truth, start, next_), told(found, start, next_))
        yield Step(number, start.name, call, wrong=tuple(differs))
        if path != start.path:
            (shutil.rmtree if path.is_dir() else Path.unlink)(path)
        here, path = next_, target
