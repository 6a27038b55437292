"""Every construct has a case in the oracle and a law.

The laws are over drawn layouts.

`constructs.py` counts the constructs of a text. A construct that is new makes these tests red until the oracle knows it, and
until a strategy draws it or a line here names its law.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.docs.blocks import Block
from tests.docs.test_language import CELLS
from tests.laws.agreement import check
from tests.laws.constructs import every, used
from tests.laws.test_locate import LAYOUTS, ODD_MODEL, WRITTEN
from ucpl.language import nodes, parse
from ucpl.resources import spec_files
from ucpl.testing import Example, layout_pairs, models

_PACKS = """ucpl 2
model m {
  dim l = 2, n = 2, d = 2
  norm : d
  q, k : l n d
  state s : f32
  group all_of_it = norm, k, q
}
layout x(tp, dp) of m {
  mesh dp tp
  file weights = torch "w{tp}"
  file optim   = torch "o{dp}.{tp}"
  norm  = d                      as "norm"
  qk[l] = (q: n@tp d + k: n d)   as "qk.{l}"
  group own = MEMBERS
  state s for all_of_it = pad(flat(each), dp)@dp  as "{state}.norm"
  state s for own       = pad(flat(each), dp)@dp  as "{state}.packs"
}
"""

# Texts of the language's constructs, each at several degrees, for those without cells in the page.
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "copies, types and second meshes": (
        """ucpl 1
let twice = 2
assert twice == 2, "{twice}"
model m {
  dim r = 4, c = 3
  dtype f32
  w : r c
  v : r dtype bf16
  u : r
  t : c is buffer
  z : c when -twice + 2 == 0
}
layout x(dp, tp = 2) of m {
  mesh dp tp
  mesh other: edp ep
  let ep = tp * dp, edp = 1
  file weights = torch "{rank}" key "in/{key}" when twice > 1
  w = r@ep c  on other  dtype bf16 lossy      as "w"
  v = r  sum @tp same @dp  dtype f32 exact    as "v"
  u = r  max @tp any @dp  value 3 + x - 1     as "u"
  t = c  mean @dp                             as "t"
  z = pad(c, 4, undefined)  when dp == 1      as "z"
  z = pad(c, 2)@dp          when dp != 1      as "z.{dp}"
}
""",
        ("x(dp = 1)", "x(dp = 2)", "x(dp = 1, tp = 1)", "x(dp = 4, tp = 1)"),
    ),
    "bases, groups and buckets": (
        """ucpl 1
model base(n = 2) {
  dim l = n, h = 3
  ln   : l h
  fc   : l[.. by 2] h
  odd  : h
  state m, o : f32
  state count : i64 scalar
}
model m(n = 3) extends base(n = n) {
  odd : none
  top : h
}
layout plain(pp, dp) of m {
  mesh pp dp
  index l = l@pp        when pp == 1
  index l = l@chunk(pp) when pp != 1
  file weights = torch "w{pp}"
  file optim   = torch "o{pp}.{dp}"
  ln[l] = h as "ln.{l}"
  fc[l] = h as "fc.{l}"
  top   = h at pp[0] as "top"
  group body[l] = fc, ln   order reversed
  group rest    = top
  state m of body = pad(flat(each), 2 * dp)@dp    as "m.{l}.{bucket}"
  state o of body = flat(each)@chunk(dp)          as "o.{l}"
  state * of rest = like                          as "{state}.{key}"
}
layout x(pp, dp) of m extends plain(pp = pp, dp = dp) {
  group body = ln, fc
  state m of body = flat(pad(each, dp)@dp)  as "m.{bucket}"  buckets 4
  state o of body = none
  derive o from m
}
""",
        (
            "plain(pp = 1, dp = 2)",
            "plain(pp = 2, dp = 1)",
            "x(pp = 1, dp = 1)",
            "x(pp = 2, dp = 2)",
            "x(pp = 3, dp = 1)",
        ),
    ),
    "lines of layers of several sizes in one flat buffer": (
        """ucpl 2
model m {
  dim l = 4, f[l] = 2 * [1, 2, 1, 1]
  a : l f
  state s : f32
  group all = a
}
layout x() of m {
  file weights = torch "w"
  a[l[1, 2]]     = f                as "a.{l}"
  a[l[not 1, 2]] = f                as "b.{l}"
  state s for all = flat(each)      as "s"
}
""",
        ("x()",),
    ),
    "packs with a group of their own": (_PACKS.replace("MEMBERS", "qk"), ("x(tp = 1, dp = 1)", "x(tp = 2, dp = 3)")),
    "packs with a group of their tensors": (
        _PACKS.replace("MEMBERS", "q, k"),
        ("x(tp = 1, dp = 1)", "x(tp = 2, dp = 3)"),
    ),
    "groups of packed tensors": (
        """ucpl 2
model m {
  dim l = 2, n = 2, d = 2
  norm : d
  q, k : l n d
  bias : d
  state s, t : f32
  group decay = norm, k, q
  group rest  = all - decay
}
layout x(tp, dp) of m {
  mesh dp tp
  file weights = torch "w{tp}"
  file optim   = torch "o{dp}.{tp}"
  norm  = d                      as "norm"
  qk[l] = (q: n@tp d + k: n d)   as "qk.{l}"
  bias  = d                      as "bias"
  group others = all - decay
  group own    = qk, norm
  state s for decay, others = pad(flat(each), dp)@dp  as "{state}.{group}"
  state t for own = like                              as "{state}/{key}"
}
""",
        ("x(tp = 1, dp = 1)", "x(tp = 2, dp = 3)"),
    ),
}
# Constructs without an effect on placement, or that need more than one text, with their tests.
ORACLE_ELSEWHERE = {
    "Blob": "tests/laws/test_blobs.py",
    "Domain": "tests/layout/test_domains.py",
    "Fill": "tests/laws/test_filling.py",
    "FillStates": "tests/laws/test_filling.py",
    "Plan": "tests/cli/test_texts_and_plans.py",
    "glob": "tests/laws/test_globs.py",
    "TypedOf": "tests/laws/test_state_types.py",
}
# Constructs that the common strategies do not draw, and the law (or the cases) over degrees that holds it.
LAW_ELSEWHERE = {
    "Alias": "tests/laws/test_locate.py",
    "Any_": "tests/laws/test_globs.py",
    "Rest": "tests/laws/test_globs.py",
    "glob": "tests/laws/test_globs.py",
    "class of tensors": "tests/laws/test_globs.py",
    "Scaling": "tests/laws/test_scales.py",
    "Blob": "tests/laws/test_blobs.py",
    "Domain": "tests/layout/test_domains.py",
    "Fill": "tests/laws/test_filling.py",
    "FillStates": "tests/laws/test_filling.py",
    "dim by an index": "tests/layout/test_dims_by_index.py",
    "Derive": "tests/laws/test_round_trip.py",
    "clause dtype": "tests/laws/test_scales.py",
    "copies sum": "tests/laws/test_constructs.py",
    "clause lossy": "tests/runtime/test_execute.py",
    "clause exact": "tests/runtime/test_exact.py",
    "clause when": "tests/laws/test_constructs.py",
    "group of an index": "tests/laws/test_constructs.py",
    "Use": "tests/laws/test_locate.py",
    "Import": "tests/laws/test_locate.py",
    "Framework": "tests/laws/test_locate.py",
    "Assert": "tests/laws/test_constructs.py",
    "scalar": "tests/laws/test_locate.py",
    "Without": "tests/laws/test_reduced_states.py",
    "TypedOf": "tests/laws/test_state_types.py",
    "Plan": "tests/cli/test_texts_and_plans.py",
}


@pytest.mark.parametrize(("block", "shown"), CELLS, ids=str)
def test_the_oracle_reads_the_page_as_the_compiler_does(block: Block, shown: Block) -> None:
    """The compiler's placement equals the page's.

    So the oracle agrees with the page.
    """
    assert check(block.text, block.info[2], name="page.ucpl")


@pytest.mark.parametrize("call", [(name, call) for name, (_, calls) in CASES.items() for call in calls], ids=str)
def test_the_oracle_reads_each_construct_as_the_compiler_does(call: tuple[str, str]) -> None:
    assert check(CASES[call[0]][0], call[1])


def in_the_oracle() -> set[str]:
    """The constructs in texts that are compared with the oracle.

    Of files, by models and the layouts that are called.
    """
    found = used(parse(ODD_MODEL, "odd.ucpl"))
    for text in (*(b.text for b, _ in CELLS), *(text for text, _ in CASES.values())):
        found |= used(parse(text, "case.ucpl"))
    for file in {file for file, _, _ in WRITTEN}:
        called = {call.partition("(")[0] for name, call, _ in WRITTEN if name == file}
        found |= _of(parse((LAYOUTS / file).read_text(), file), called)
    for file in ("vlm.ucpl", "any.ucpl"):  # each also has a test of its own
        found |= used(parse((LAYOUTS / file).read_text(), file))
    for name, path in spec_files():
        if name in ("deepspeed.ucpl", "plain.ucpl", "huggingface.ucpl"):
            found |= used(parse(path.read_text(), name))
    return found


def _of(file: nodes.File, called: set[str]) -> set[str]:
    kept = [s for s in file.statements if not isinstance(s, nodes.Layout) or s.name in called]
    return used(nodes.File(file.name, file.version, tuple(kept)))


def missing(found: set[str], elsewhere: dict[str, str]) -> tuple[set[str], set[str], set[str]]:
    """Constructs that nothing holds.

    Lines that are needed no more, or name no construct; files that are not there.
    """
    root = Path(__file__).parents[2]
    idle = {name for name in elsewhere if name in found or name not in every()}
    return every() - found - elsewhere.keys(), idle, {file for file in elsewhere.values() if not (root / file).exists()}


def test_no_construct_is_without_a_case_in_the_oracle() -> None:
    found = in_the_oracle() - {"Blob", "Fill", "FillStates", "Plan"}  # which have no effect on placement
    assert missing(found, ORACLE_ELSEWHERE) == (set(), set(), set())


def test_no_construct_is_without_a_law() -> None:
    found: set[str] = set()

    def drawn(pair: tuple[Example, Example]) -> None:
        for example in pair:
            found.update(used(parse(example.text, example.name)))

    for number in range(40):  # the same draws each time, and no more than it takes
        some = settings(max_examples=15, database=None, suppress_health_check=list(HealthCheck), deadline=None)
        run: Any = seed(number)(some(given(models().flatmap(layout_pairs))(drawn)))
        run()
        if missing(found, LAW_ELSEWHERE) == (set(), set(), set()):
            break
    assert missing(found, LAW_ELSEWHERE) == (set(), set(), set())
