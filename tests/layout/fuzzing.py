"""Faulty texts: shipped specs and test layouts, changed by tokens.

    python -m tests.layout.fuzzing 100000        # from the project's folder; prints each internal error once, with its text

Every text is parsed, tidied, resolved and located; the only allowed exception is `UcplError`.
"""

from __future__ import annotations

import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from attrs import define, field

from ucpl.errors import UcplError
from ucpl.language import format_text, nodes, parse, print_file
from ucpl.layout import Library, close, expand, load, resolve
from ucpl.placement import locate

ROOT = Path(__file__).parents[2]
TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|[A-Za-z_]\w*|\d+|\.\.\.|\.\.|->|[=!<>]=|\n|[^\S\n]+|#[^\n]*|.')
BLANK = re.compile(r"[^\S\n]+|#[^\n]*")
SECONDS_MAX = 20  # of the processor, in one text

ODD = [
    "²",
    "\ud800",
    "\0",
    "é",
    "“",
    "\u202e",
    "\x85",
    "\r",
    "0",
    "1",
    "2",
    "3",
    "7",
    "-1",
    "4611686018427387904",
    "9223372036854775807",
    "99999999999999999999",
    "9" * 5000,
    '""',
    '"*"',
    '"{"',
    '"{l}"',
    '"{x:02}"',
    '"{(tp}"',
    '"{name:3d}"',
    '"{tp / 2}"',
    '"a/b"',
    '"' + "k" * 200 + '"',
    "_",
    "...",
    "each",
    "like",
    "none",
    "()",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "@",
    "@dp",
    "@chunk(dp)",
    "@spread(dp, 3)",
    "@dp[1, 2]",
    "pad(",
    "trim(",
    "flat(each)",
    "[..2]",
    "[1..]",
    "[0..9 by 2]",
    "*",
    "+",
    ",",
    "=",
    ":",
    "when 0",
    "when 1",
    "at dp[0]",
    "mean @dp",
    "sum @dp",
    "any @dp",
    "value x - 1",
    "buckets 3",
    "dtype bf16",
    "is buffer",
    "order reversed",
    "order dealt 2",
    "extends",
    "use",
    "config.x",
    "default(config.x, 2)",
    "min(1)",
    "ceil(3, 0)",
    "gcd(0, 0)",
    "lcm(3, 0)",
    "size(dp)",
    "dp.size",
    "l.local",
    "not",
    "and",
    "or",
    "index",
    "group",
    "state",
    "model",
    "layout",
    "mesh",
    "let a = a",
]

TRIAL = """ucpl 1
model trial {
  first : 6 4 dtype f32
  second : 5 dtype f32
  fixed : 7 dtype f32 is frozen
  table : 3 dtype f32 is buffer
  alias tied = first
  group "0" = first, second
  state fp32, exp_avg, exp_avg_sq : f32
  state step : f32 scalar
}
"""


def seeds() -> list[str]:
    """Correct, short texts.

    The fault of a changed text is then its change.
    """
    files = [*sorted((ROOT / "specs").rglob("*.ucpl")), *sorted((ROOT / "tests" / "specs").glob("*.ucpl"))]
    texts = [p.read_text(encoding="utf-8") for p in files]
    cases = [p.read_text(encoding="utf-8") for p in sorted((ROOT / "tests" / "language" / "examples").rglob("*.ucpl"))]
    return [*texts, *cases, *SMALL]


MODEL = """model m {
  dim a = 8, b = 3, l = 6, lap = 3, e = 2
  index l = (lap slot)
  dtype f32
  w : l a b
  v : l[1..] a
  q : a b
  k : b
  x : l e b
  alias t = q
  buf : b is buffer
  state s, fp32 : f32
  group g = w, v
  group h = all - g
}
"""
LAYOUT = """layout x(dp, tp = 2) of m {
  mesh dp tp
  index slot = slot@tp
  file weights = torch "f.{tp}" key "module/{key}"
  file optim = torch "o.{dp:02}.{tp + dp * size(tp)}"
  w[l] = pad(a, 4)@tp b as "w.{l}"
  v[l] = a@chunk(tp, 2) as "v.{l.local}"
  qk = (q: a b + k: b)@spread(dp) as "qk.{dp}"
  x[l, e] = b as "x.{l}.{e}"
  buf = b any @dp as "buf"
  group * = model
  state * of * = pad(flat(each), 2 * dp)@dp in optim as "{state}/{bucket}"
  derive fp32 from weight when 0
  blob rng @dp keep in weights as "rng"
}
"""
SMALL = [
    f"ucpl 1\n{MODEL}{LAYOUT}",
    f"""ucpl 1
{MODEL}layout y(dp) of m extends x(dp, 1) {{
  w = l (a b)@dp as "w.{{dp}}"
  assert a % dp == 0, "{{a}} does not divide by {{dp}}"
}}
{LAYOUT}""",
    """ucpl 1
let unit = 2
model m {
  dim a = 4 * unit, b = default(config.b, 3)
  w : a b dtype f32
  state s : f32
}
layout low(dp) of m {
  mesh dp
  file weights = torch "f.{dp}"
  w = (a[..3]@dp[2, 1] + a[3..])@spread(dp) b at dp[0] as "w"
  group own = w
  state s of own = like as "opt/{key}"
}
model outer {
  use m() as inner
  z : 3 dtype f32
}
layout z(dp) of outer {
  mesh dp
  use low(dp) as inner key "in.{key}"
  file weights = torch "z.pt"
  z = _ as "{name}"
}
""",
    """ucpl 1
model m {
  dim d = 6, v = 5
  dtype bf16
  embed : v d
  up : d d2
  dim d2 = d
  bias : d dtype f32 is frozen
  group "0" = embed
  group "1" = all - "0"
  state fp32, m : f32
}
layout any1(dp, alignment = 2) of any {
  mesh dp
  file weights = torch "w.pt"
  file optim = torch "{dp}.pt"
  * = ... as "{name}"
  * of frozen = _ as "ice/{name}"
  * of alias = ... as "{alias}"
  group * = model
  state * of * = pad(flat(pad(each, alignment)), alignment * dp)@dp buckets 12 as "{state}/{bucket}"
}
layout over(dp) of m extends any1(dp, 1) {
  embed = pad(v, 2, live)@dp d as "e.{dp}"
  group * = model order dealt 2
  state fp32 = trim(flat(each))@chunk(dp) as "x.{group}"
}
""",
]


@define
class Fuzzer:
    """Changed texts, the same for one seed."""

    chance: random.Random
    texts: list[str]
    pool: list[str] = field(factory=list)  # tokens of all texts

    @classmethod
    def of(cls, seed: int) -> Fuzzer:
        texts = seeds()
        pool = sorted({t for text in texts for t in TOKEN.findall(text) if not BLANK.fullmatch(t)})
        return cls(random.Random(seed), texts, pool)

    def text(self) -> str:
        # Small texts reach the later rooms more often, and sooner.
        chosen = self.chance.choice(SMALL) if self.chance.random() < 0.9 else self.chance.choice(self.texts)
        for _ in range(self.chance.choice((1, 1, 1, 2, 3, 6))):
            chosen = self.chance.choice(CHANGES)(self, chosen)
        return chosen

    def token(self) -> str:
        return self.chance.choice(ODD) if self.chance.random() < 0.5 else self.chance.choice(self.pool)


def _tokens(text: str) -> list[str]:
    return TOKEN.findall(text)


def _at(chance: random.Random, tokens: list[str]) -> int:
    solid = [i for i, t in enumerate(tokens) if not BLANK.fullmatch(t)]
    return chance.choice(solid) if solid else 0


def replace_token(f: Fuzzer, text: str) -> str:
    tokens = _tokens(text)
    if tokens:
        tokens[_at(f.chance, tokens)] = f.token()
    return "".join(tokens)


def insert_token(f: Fuzzer, text: str) -> str:
    tokens = _tokens(text)
    tokens.insert(_at(f.chance, tokens), f" {f.token()} ")
    return "".join(tokens)


def remove_token(f: Fuzzer, text: str) -> str:
    tokens = _tokens(text)
    if tokens:
        del tokens[_at(f.chance, tokens)]
    return "".join(tokens)


def swap_tokens(f: Fuzzer, text: str) -> str:
    tokens = _tokens(text)
    if tokens:
        a, b = _at(f.chance, tokens), _at(f.chance, tokens)
        tokens[a], tokens[b] = tokens[b], tokens[a]
    return "".join(tokens)


def change_number(f: Fuzzer, text: str) -> str:
    """Replace a number of the text.

    No type check finds this fault.
    """
    tokens = _tokens(text)
    numbers = [i for i, t in enumerate(tokens) if t.isdigit()]
    if numbers:
        tokens[f.chance.choice(numbers)] = f.chance.choice(
            ("0", "1", "2", "3", "5", "64", "1000000", "4294967296", "4611686018427387904", "9" * 30, "(0 - 1)")
        )
    return "".join(tokens)


def change_name(f: Fuzzer, text: str) -> str:
    """A name becomes another one of the same text."""
    tokens = _tokens(text)
    names = [i for i, t in enumerate(tokens) if t[0].isalpha() or t[0] in '_"']
    if names:
        tokens[f.chance.choice(names)] = tokens[f.chance.choice(names)]
    return "".join(tokens)


def move_line(f: Fuzzer, text: str) -> str:
    lines = text.split("\n")
    line = f.chance.choice(lines)
    if f.chance.random() < 0.5:
        lines.remove(line)
    if f.chance.random() < 0.8:
        lines.insert(f.chance.randrange(len(lines) + 1), line)
    return "\n".join(lines)


def borrow_line(f: Fuzzer, text: str) -> str:
    lines = text.split("\n")
    lines.insert(f.chance.randrange(len(lines) + 1), f.chance.choice(f.chance.choice(f.texts).split("\n")))
    return "\n".join(lines)


def cut_short(f: Fuzzer, text: str) -> str:
    return text[: f.chance.randrange(len(text) + 1)]


CHANGES: list[Callable[[Fuzzer, str], str]] = [
    replace_token,
    replace_token,
    insert_token,
    remove_token,
    swap_tokens,
    change_number,
    change_number,
    change_name,
    change_name,
    move_line,
    borrow_line,
    cut_short,
]


# ---- the run of one text -----------------------------------------------------------------------------------------------


def tried(text: str, chance: random.Random) -> Iterator[UcplError]:
    """Carry a text through the packages and yield each refusal.

    Raises every exception that is not a refusal.
    """
    try:
        file = parse(text, "fuzzed.ucpl")
        if chance.random() < 0.2:  # each parses it once more
            assert parse(print_file(file), "printed.ucpl").statements == file.statements
            format_text(text)
        library = Library()
        library.add(file)
        if any(isinstance(s, nodes.Import) for s in file.statements):
            library = load(("fuzzed.ucpl", text), read=BESIDE.get)
    except UcplError as error:
        yield error
        return
    for statement in file.statements:
        if isinstance(statement, nodes.Layout):
            yield from _tried_layout(library, statement, chance)


@cache
def _trial() -> nodes.Model:
    """The model for layouts of any model."""
    model = parse(TRIAL, "trial.ucpl").statements[0]
    assert isinstance(model, nodes.Model)
    return model


def _tried_layout(library: Library, layout: nodes.Layout, chance: random.Random) -> Iterator[UcplError]:
    arguments = tuple(
        nodes.Argument(p.name, nodes.Number(chance.choice((1, 2, 2, 3))))
        for p in layout.parameters
        if p.default is None or chance.random() < 0.2
    )
    call = nodes.Call(layout.name, arguments)
    trial = _trial()
    try:
        if layout.of == "any":
            found = resolve(library, call, model=trial)
            parse(print_file(nodes.File("x", 1, (trial, expand(library, call, trial)))), "x")
        else:
            found = resolve(library, call)
            parse(print_file(close(library, call)), "x")
        str(found)
        locate(found, rank=0)
        if found.ranks <= 64:
            locate(found)
    except UcplError as error:
        yield error


BESIDE = {p.name: p.read_text(encoding="utf-8") for p in sorted((ROOT / "tests" / "specs").glob("*.ucpl"))}


class TooSlow(Exception):
    """A text that takes longer than any of its length should."""


def _alarm(*_: object) -> None:
    raise TooSlow


def main(count: int, seed: int) -> int:
    """The internal errors of `count` texts, each once, with its text."""
    fuzzer = Fuzzer.of(seed)
    codes: dict[str, int] = {}
    bad: dict[str, int] = {}
    signal.signal(signal.SIGPROF, _alarm)
    begin = time.monotonic()
    for number in range(count):
        text = fuzzer.text()
        signal.setitimer(signal.ITIMER_PROF, SECONDS_MAX)
        try:
            for refusal in tried(text, fuzzer.chance):
                code = refusal.diagnostics[0].code
                codes[code] = codes.get(code, 0) + 1
        except Exception as error:
            frame = [f for f in traceback.extract_tb(error.__traceback__) if "/ucpl/" in f.filename][-1:]
            place = f"{frame[0].filename.rpartition('/ucpl/')[2]}:{frame[0].lineno}" if frame else "nowhere"
            where = f"{type(error).__name__} {place}"
            bad[where] = bad.get(where, 0) + 1
            if bad[where] == 1:
                print(f"== {number}: {where}: {str(error)[:200]}\n{text[:6000]!r}\n", flush=True)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if number % 5000 == 4999:
            print(
                f"{number + 1} texts, {time.monotonic() - begin:.0f} s, {len(codes)} codes; internal: {bad}", flush=True
            )
    print(dict(sorted(codes.items())))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
