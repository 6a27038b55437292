"""Law: two constructs in one text are read as the oracle does.

Their numbers are carried to other degrees and back. A text has two tensors, with one form of each slot: dims, brackets, rows,
columns, clause, and lines for layers and states. Two constructs of one slot are those of both tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from random import Random
from typing import NamedTuple

import pytest

from tests.laws.agreement import check
from tests.oracle.names import Refused
from ucpl.errors import UcplError
from ucpl.testing import Example, assert_round_trip

SLOTS: dict[str, dict[str, str]] = {
    "dims": {
        "all layers": "l g d h",
        "a range": "l[1..] g d h",
        "steps": "l[0.. by 2] g d h",
        "all but one": "l[not 0] g d h",
        "sizes by an index": "l g d f",
        "condition": "l g d h  when 1",
        "type": "l g d h  dtype bf16",
        "frozen": "l g d h  is frozen",
        "buffer": "l g d h  is buffer",
    },
    "brackets": {
        "stacked": "",
        "layer": "l",
        "implied": "(l)",  # by the key alone
        "one implied": "g (l)",
        "layers": "l[..1]; l[1..]",
        "two": "l, g",
        "list": "l[where([0, 1, 1, 0], 1)]; l[not 1, 2]",
    },
    "rows": {
        "apart": "{g} d",
        "one axis": "({g} d)",
        "other order": "(d {g})",
        "cut": "({g} d@tp)",
        "chunk": "({g} d)@chunk(tp)",
        "spread": "({g} d)@spread(tp, 2)",
        "sizes": "({g} d@tp[3, 1])",
        "two cuts": "({g} d)@chunk(tp)@spread(ep)",
        "pad": "pad(({g} d), 3 * tp)@tp",
        "undefined": "pad(({g} d), 5, undefined)",
        "trim": "trim(pad(({g} d), 5))@chunk(tp)",
        "copies": "({g} copies(2) d)",
        "cut copies": "({g} copies(tp) d)@tp",
        "parts": "({g} (d[..2]@tp + d[2..]@tp))",
        "digits": "({g} k two)",
        "pack": "(NAME: {g} d@tp + NAME2: {g} d)",
        "cut pack": "({g} (NAME: d + NAME2: d))@chunk(tp)",
    },
    "columns": {
        "plain": "f",
        "equal": "f@dp",
        "chunked": "f@chunk(dp)",
        "live": "pad(f, 5, live)",
        "padded": "pad(f, 2 * dp)@dp",
        "rest": "_",
    },
    "clause": {
        "none": "",
        "file": "in more",
        "type that is stored": "dtype f32",
        "value": "value x - 1",
        "mean": "mean @cp",
        "any": "any @cp",
        "second mesh": "on other",
        "homes": "at cp[0]; at cp[-1]",
    },
    "layers": {
        "everywhere": "",
        "runs": "index l = l@chunk(pp)",
        "spread layers": "index l = l@spread(pp)",
        "laps": "index l = (lap stage@pp slot)",
        "a condition": "index l = l@chunk(pp) when pp > 1",
    },
    "state": {
        "no state": "state * = none",
        "like": 'state s = like  as "{key}.s"',
        "flat": 'state s for all = flat(each)  in optim as "s"',
        "cut flat": 'state s for all = pad(flat(each), 2 * zp)@zp  in optim as "s"',
        "each padded": 'state s for all = flat(pad(each, zp)@zp)  in optim as "s"',
        "trimmed": 'state s for all = trim(flat(pad(each, 4)))@chunk(zp, 2)  in optim as "s"',
        "buckets": 'state s for all = flat(each, 9)  in optim as "s.{bucket}"',
        "reversed": 'group rev = a, b  order reversed\n  state s for rev = flat(each)  in optim as "s"',
        "dealt": 'group hands = a, b  order dealt zp\n  state s for hands = pad(flat(each), zp)@zp  in optim as "s"',
        "of the model": 'state s for own, rest = flat(each)  in optim as "s.{group}"',
        "row": 'state r = like(1)  as "{key}.r"\n  state s = none',
        "derived": "derive s from weight",
    },
}
OPTIONS = [(slot, name) for slot, names in SLOTS.items() for name in names]
Pair = tuple[tuple[str, str], tuple[str, str]]
Choice = dict[str, str]  # of each slot, the name of a form
SHARED = {"layers", "state"}  # of the layout: both tensors have them
PAIRS = [(a, b) for a, b in combinations(OPTIONS, 2) if a[0] != b[0] or a[0] not in SHARED]
TRIES = 200  # texts of a pair; most need a few
PARTS = 24  # of all pairs, a test each
# Pairs that no text has, each with the code of its refusal: layers of several sizes are no stacked tensor.
REFUSED: dict[Pair, str] = {(("dims", "sizes by an index"), ("brackets", "stacked")): "E199"}
AXES = ("tp", "dp", "pp", "cp", "zp", "ep")


class Drawn(NamedTuple):
    text: str
    calls: tuple[str, str]
    pairs: frozenset[Pair]  # that are in the text


def lines_of(name: str, chosen: Choice) -> list[str]:
    """The entries of a tensor; some forms pack two."""
    rows, columns = SLOTS["rows"][chosen["rows"]], SLOTS["columns"][chosen["columns"]]
    rows = rows.replace("NAME2", f"{name}2").replace("NAME", name)
    columns = columns.replace("f", "h") if chosen["dims"] != "sizes by an index" else columns
    is_pack = "pack" in chosen["rows"]
    path = f"{name}s" if is_pack else name
    columns = columns.replace("_", "h" if chosen["dims"] != "sizes by an index" else "f") if is_pack else columns
    out = []
    for one, brackets in enumerate(SLOTS["brackets"][chosen["brackets"]].split("; ")):
        for two, clause in enumerate(SLOTS["clause"][chosen["clause"]].split("; ")):
            of_g = brackets in ("l, g", "g (l)")
            shape = rows.replace("{g}", "" if of_g else "g")
            key = f"{name}{one}{two}" + ".{l}" * bool(brackets) + ".{g}" * of_g + ".{cp}" * two
            said = brackets.removesuffix("(l)").strip()
            left = f"{path}[{said}]" if said else path
            lead = "" if brackets else "l "
            out.append(f'  {left} = {lead}{shape} {columns}  {clause}  as "{key}"')
    return out


def written(a: Choice, b: Choice, degrees: tuple[Sequence[int], Sequence[int]]) -> Drawn:
    model = [
        "ucpl 2",
        "model m {",
        "  dim l = 4, g = 2, d = 4, h = 4, f[l] = 2 * [1, 2, 1, 1], two = 2, k = 2",
        "  index d = (two k)",
    ]
    members = []
    for name, chosen in (("a", a), ("b", b)):
        names = [name, f"{name}2"] if "pack" in chosen["rows"] else [name]
        model.append(f"  {', '.join(names)} : {SLOTS['dims'][chosen['dims']]}")
        members.append(names if chosen["dims"] not in ("frozen", "buffer") else [])
    own, rest = members
    state = SLOTS["state"][a["state"] if own or rest else "no state"]
    model += ["  state s : f32"]
    if "state r" in state:
        model += [f"  state r : f32  without g for {', '.join([*own, *rest])}"]
    if "for own" in state:
        model += [f"  group own = {', '.join(own or rest)}", "  group rest = all - own"]
    model += [
        "}",
        "layout x(tp, dp, pp, cp, zp, ep) of m {",
        "  mesh zp ep cp pp dp tp",
        "  mesh other: zp ep cp pp dp tp",
    ]
    lines = [*lines_of("a", a), *lines_of("b", b)]
    path = {name: f"{name}s" if "pack" in chosen["rows"] else name for name, chosen in (("a", a), ("b", b))}
    state = state.replace("= a, b", f"= {', '.join(path[n] for n, of in (('a', own), ('b', rest)) if of)}")
    if "for all" in state:
        state = f"group all = {', '.join(path[n] for n, of in (('a', own), ('b', rest)) if of)}\n  {state}"
    model += [
        "  dim lap = 1, stage = pp",
        f"  {SLOTS['layers'][a['layers']]}",
        '  file weights = torch "{pp}.{cp}.{dp}.{tp}.{ep}"',
        '  file more    = torch "more {pp}.{cp}.{dp}.{tp}.{ep}"',
        '  file optim   = torch "o {pp}.{cp}.{dp}.{tp}.{ep}.{zp}"',
        *lines,
        f"  {state}",
        "}",
        "",
    ]
    text = "\n".join(line for line in model if line.strip())
    if "sizes" in (a["rows"], b["rows"]):
        degrees = (2, *degrees[0][1:]), (2, *degrees[1][1:])
    calls = [f"x({', '.join(f'{axis} = {n}' for axis, n in zip(AXES, one, strict=True))})" for one in degrees]
    of_both = [(p, q) for slot in SLOTS if slot not in SHARED for p, q in [((slot, a[slot]), (slot, b[slot]))]]
    of_one = combinations(a.items(), 2)
    return Drawn(text, (calls[0], calls[1]), frozenset((*of_one, *of_both, *((q, p) for p, q in of_both))))


def drawn(random: Random, pair: Pair) -> Drawn:
    """A text with both constructs, and drawn forms of the others."""
    chosen = [{slot: random.choice(sorted(names)) for slot, names in SLOTS.items()} for _ in range(2)]
    (slot, name), (other, second) = pair
    chosen[0][slot] = name
    chosen[1 if slot == other else 0][other] = second
    first, last = ([2 if axis in random.sample(AXES, 3) else 1 for axis in AXES] for _ in range(2))
    return written(chosen[0], chosen[1], (first, last))


def refusal(case: Drawn) -> str:
    """The code with which a text is refused.

    Empty: the text can be read, and the oracle and the numbers agree with it.
    """
    try:
        homes = [check(case.text, call) for call in case.calls]
        assert all(homes)
        assert_round_trip(*(Example(case.text, call) for call in case.calls))
    except UcplError as error:
        return error.diagnostics[0].code
    except Refused:
        return "refused by the oracle"
    return ""


@pytest.mark.parametrize("part", range(PARTS))
def test_two_constructs_together(part: int) -> None:
    """Each pair has a text, or the code of its refusal."""
    random, seen, pairs = Random(part), set[Pair](), PAIRS[part::PARTS]
    for pair in pairs:
        if pair in REFUSED:
            assert {refusal(drawn(random, pair)) for _ in range(TRIES // 10)} == {REFUSED[pair]}
        for _ in range(0 if pair in seen or pair in REFUSED else TRIES):
            case = drawn(random, pair)
            if not refusal(case):
                seen |= case.pairs
                break
    assert [pair for pair in pairs if pair not in seen and pair not in REFUSED] == []
