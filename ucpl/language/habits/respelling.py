"""Replacements of habits that a template of groups cannot express.

Each function takes the match and returns the text in its place, or None if there is nothing to offer.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from re import Match

from ucpl.language.habits.tools import words
from ucpl.language.words import ELEMENT_TYPES

__all__ = [
    "argument",
    "bare_members",
    "binary",
    "cast",
    "compared",
    "computed",
    "cuts",
    "default",
    "digits",
    "digits_of",
    "dtype",
    "entry",
    "grouped",
    "import_path",
    "in_parentheses",
    "inclusive",
    "key",
    "kind",
    "label",
    "labelled",
    "members",
    "mesh",
    "model_dims",
    "none_of",
    "number",
    "of_model",
    "pairs",
    "parts",
    "power",
    "product",
    "ranged",
    "shifted",
    "side_by_side",
    "stepped",
    "stored_in",
    "stripped",
    "template",
    "times",
    "typed",
]

_POWER_MAX = 8  # factors of a power that is written out
_NUMBER_MAX = 1 << 63
_DEVICES = {"cpu", "cuda", "xpu", "hpu", "npu", "mps", "meta", "xla"}
_SHIFT_MAX = 40


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[\s,*×·]+", text) if word]


# ---- numbers ---------------------------------------------------------------------------------------------------------


def power(found: Match[str]) -> str | None:
    """`h ** 2` as `h * h`."""
    base, exponent = found[1], found[2]
    if base.isdigit() and exponent.isdigit() and int(exponent[:9]) > _POWER_MAX:
        value = int(base[:9]) ** min(int(exponent[:9]), 64)
        return str(value) if value < _NUMBER_MAX else None
    if not exponent.isascii() or not exponent.isdigit() or not 1 <= int(exponent) <= _POWER_MAX:
        return None
    return " * ".join([base] * int(exponent))


def digits(found: Match[str]) -> str:
    """`4.0` as `4`."""
    return found[1].replace("_", "")


def grouped(found: Match[str]) -> str:
    """`= 4,096` as `= 4096`."""
    return found[1] + found[2].replace(",", "")


def number(found: Match[str]) -> str | None:
    """`500_000`, `0x10`, `5e8` and `1<<20` in digits."""
    text = found[0].replace("_", "")
    try:
        if "<<" in text or ">>" in text:
            base, _, shift = re.split("(<<|>>)", text)
            value = int(base) << min(int(shift), 64) if "<<" in text else int(base) >> int(shift)
        elif text[:2].lower() in ("0x", "0o", "0b"):
            value = int(text, 0)
        else:
            decimal = Decimal(text)
            value = int(decimal) if decimal < _NUMBER_MAX and decimal == decimal.to_integral_value() else _NUMBER_MAX
    except (ValueError, InvalidOperation):
        return None
    return str(value) if value < _NUMBER_MAX else None


def binary(found: Match[str]) -> str | None:
    """`4Ki` as `4096`."""
    value = int(found[1][:19]) << {"K": 10, "M": 20, "G": 30}[found[0][len(found[1])]]
    return str(value) if value < _NUMBER_MAX else None


def shifted(found: Match[str]) -> str | None:
    """`h >> 1` as `h / 2`."""
    if len(found[3]) > 2 or int(found[3]) > _SHIFT_MAX:
        return None
    return f"{found[1]} {'*' if found[2] == '<<' else '/'} {1 << int(found[3])}"


def key(found: Match[str]) -> str:
    """`config["a"]` as `config.a`."""
    return f"config.{found[1] or found[2]}"


def default(found: Match[str]) -> str:
    """`config.get("a", 4)` as `default(config.a, 4)`."""
    return f"default(config.{found[1] or found[3]}, {(found[2] or found[4]).strip()})"


def pairs(found: Match[str]) -> str | None:
    """`let a, b = 1, 2` as `let a = 1, b = 2`."""
    names, values = _words(found[2]), [v.strip() for v in found[3].split(",")]
    if len(names) != len(values):
        return None
    return f"{found[1]} " + ", ".join(f"{n} = {v}" for n, v in zip(names, values, strict=True))


# ---- names -----------------------------------------------------------------------------------------------------------


def dtype(found: Match[str]) -> str | None:
    """An element type as others call it, or in quotes."""
    name = found[0].strip('"').rpartition(".")[2]
    name = words().dtypes.get(name, name)
    return name if name in ELEMENT_TYPES else None


def import_path(found: Match[str]) -> str:
    """`from gpt import` with the file's name."""
    path = found[1].strip("./").replace(".", "/") if not found[1].endswith(".ucpl") else found[1]
    return f'from "{path}{"" if path.endswith(".ucpl") else ".ucpl"}" import '


def argument(found: Match[str]) -> str:
    """`(tp: 2` as `(tp = 2`."""
    space = " " if found.start() and found.string[found.start() - 1] == "," else ""
    return f"{space}{found[1]} = "


def of_model(found: Match[str]) -> str:
    """A layout without a model."""
    return f"{found[1]} of any {{"


# ---- patterns --------------------------------------------------------------------------------------------------------


def labelled(found: Match[str]) -> str:
    """`(gate, up): f` as `(gate: f + up: f)`."""
    return f"({' + '.join(f'{name}: {found[2]}' for name in _words(found[1]))})"


def parts(found: Match[str]) -> str:
    """`cat(gate: f, up: f)` as `(gate: f + up: f)`."""
    return f"({' + '.join(one.strip() for one in found[1].rstrip(', ').split(','))})"


def ranged(found: Match[str]) -> str:
    """`[l=0..4]` as `[l[0..4]]`."""
    ends = re.findall(r"\d+", found[2])
    if len(ends) == 1:
        ends = [*ends, ""] if re.search(r"[^\d\s]", found[2]) else ["", *ends]
    return f"[{found[1]}[{'..'.join(ends)}]]"


def side_by_side(found: Match[str]) -> str:
    """`a, b` as `a b`."""
    inner = " ".join(_words(found[1]))
    return f" {inner}" if found.string[: found.start()].endswith("=") else inner


def in_parentheses(found: Match[str]) -> str:
    """`a, b` as one axis."""
    return f"({' '.join(_words(found[1]))})"


def times(found: Match[str]) -> str:
    """`(a * b)` as `(a b)`."""
    return f"({' '.join(_words(found[1]))})"


def product(found: Match[str]) -> str:
    """`= a * b` as `= (a b)`."""
    return f" ({' '.join(_words(found[1]))})"


def cuts(found: Match[str]) -> str:
    """`@(a, b)` as `@a@b`."""
    return "".join(f"@{name}" for name in _words(found[1]))


def label(found: Match[str]) -> str:
    """`(q = ` as `(q: `."""
    return f"{' ' if found.string[: found.start()].endswith('+') else ''}{found[1]}: "


def template(found: Match[str]) -> str:
    """`as "ln.%d" % l`, `as "ln." + str(l)`, `as "ln.{}".format(l)` as one template."""
    text, name, rest = found[1], f"{{{found[2]}}}", found[3] or ""
    put, count = re.subn(r"%0?\d*[ds]|\{\}", name, text, count=1)
    return f'as "{put if count else text + name}{rest}"'


def cast(found: Match[str]) -> str:
    """`.half()` as `dtype f16`."""
    return f" dtype {words().dtypes.get(found[1], 'f32')}"


def stepped(found: Match[str]) -> str:
    """`[l[::2]` as `[l[0.. by 2]`."""
    return f"[{found[1]}[{found[2] or 0}..{found[3]} by {found[4]}]"


def inclusive(found: Match[str]) -> str | None:
    """`[0..=3]` as `[0..4]`."""
    return f"[{found[1]}..{int(found[2]) + 1}]" if len(found[2]) < 10 else None


def compared(found: Match[str]) -> str:
    """`[l < 2]` as `[l[..2]]`, `[l > 2]` as `[l[3..]]`."""
    sign = found[2] or found[3]
    bound = str(int(found[4]) + 1) if sign in ("<=", ">") else found[4]
    return f"[{found[1]}[{f'..{bound}' if sign[0] == '<' else f'{bound}..'}]]"


def listed(found: Match[str]) -> str:
    """`[0 1]` as `[0, 1]`."""
    return f"[{', '.join(found[1].split())}]"


def counted(found: Match[str]) -> str | None:
    """`0..4` as the list of its numbers."""
    if len(found[2]) > 4 or len(found[3]) > 4 or not 0 < int(found[3]) - int(found[2]) <= 16:
        return None
    return f"{found[1]}[{', '.join(map(str, range(int(found[2]), int(found[3]))))}]"


def one_of(found: Match[str]) -> str | None:
    """`tp in [2, 4]` as `tp == 2 or tp == 4`; of an index of the line other rows know."""
    if f"[{found[3]}]" in found[1]:
        return None
    return f"{found[1]}{found[2]}{' or '.join(f'{found[3]} == {one}' for one in re.split(r'[ ,]+', found[4]))}"


def none_of(found: Match[str]) -> str:
    """`tp not in [2, 4]` as `tp != 2 and tp != 4`."""
    return f"{found[1]}{found[2]}{' and '.join(f'{found[3]} != {one}' for one in re.split(r'[ ,]+', found[4]))}"


def stripped(found: Match[str]) -> str:
    """The right side of an einops pattern."""
    return found[1].strip()


# ---- statements ------------------------------------------------------------------------------------------------------


def stored_in(found: Match[str]) -> str:
    """A file without its form, its `=` or its quotes."""
    form = found[2] or ("safetensors" if found[3].endswith(".safetensors") else "torch")
    return f'{found[1]} = {form} "{found[3]}"'


def entry(found: Match[str]) -> str:
    """`w(v, h) = "w"` as an entry."""
    return f"{found[1]} = {' '.join(_words(found[2]))} as {found[3]}"


def digits_of(found: Match[str]) -> str:
    """`index d = two * k` with the digits in parentheses."""
    return f"{found[1]}({' '.join(_words(found[2]))})"


def mesh(found: Match[str]) -> str | None:
    """Names of axes in any form: quoted, in a list, with sizes.

    A second mesh keeps its name.
    """
    text = found[0][len("mesh") :]
    second = re.match(r"\s*([A-Za-z_]\w*)\s*:", text)
    text = text[second.end() :] if second else text
    quoted = re.findall(r'"([A-Za-z_]\w*)"', text)
    names = quoted[1:] if "(" in text and quoted[:1] and quoted[0] in _DEVICES else quoted
    names = names or re.findall(r"(?<![\w.])[A-Za-z_]\w*(?!\s*\()", re.sub(r"=\s*\w+", "", text.lstrip(" :=([")))
    names = [] if not quoted and re.search(r"\w\s*\(", text) else names  # a call, with a name that is no axis
    names = [] if names in (["none"], ["None"], ["null"]) else names  # no mesh is no line
    head = f"mesh {second[1]}:" if second else "mesh"
    return f"{head} {' '.join(names)}" if names and len(set(names)) == len(names) else None


def members(found: Match[str]) -> str | None:
    """The members of a group, with a comma between them."""
    names = re.findall(r'"[^"]*"|[\w.]+', found[2])
    if not names or {"order", "model", "from", "all"} & set(names):
        return None
    return f"{found[1].rstrip()} = {', '.join(names)}"


def bare_members(found: Match[str]) -> str | None:
    """`ln[l], embed` as `ln, embed`."""
    return found[1] + re.sub(r"\[[^\]]*\]", "", found[2]) if "[" in found[2] else None


def computed(found: Match[str]) -> str:
    """`f / 128 h / 128` with a name for each quotient.

    It is rounded up if it counts the blocks of a scale.
    """
    scales = "scale" in found[1].lower()
    sizes: dict[str, str] = {}

    def named(one: Match[str]) -> str:
        size, by = one[1], one[2]
        sizes[f"{size}_{by}"] = f"ceil({size}, {by})" if scales else f"{size} / {by}"
        return f"{size}_{by}"

    dims = re.sub(r"(\w+)\s*//?\s*(\w+)", named, found[2])
    return f"dim {', '.join(f'{n} = {v}' for n, v in sizes.items())}\n{found[1]} : {' '.join(dims.split())}"


def typed(found: Match[str]) -> str | None:
    """`: bf16` behind the dims as `dtype bf16`."""
    name = found[1].rpartition(".")[2]
    name = words().dtypes.get(name, name)
    return f" dtype {name}" if name in ELEMENT_TYPES else None


def model_dims(found: Match[str]) -> str | None:
    """A tensor with its dims side by side."""
    words = _words(found[2])
    if any("." in word for word in words):
        return None
    return f"{found[1].rstrip('.')} : {' '.join(words) or '()'}"


def kind(found: Match[str]) -> str:
    """`buffer x : d` as `x : d is buffer`."""
    return f"{found[2]} :{found[3].rstrip()} is {'buffer' if found[1] else 'frozen'}"
