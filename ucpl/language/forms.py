"""Form of each kind of statement, in words and by an example.

It is the hint if no better one is known. Keyed by place (l: a layout, m: a model, t: outside both, h: the first line,
c: a call) and the statement's word; "" is the statement without one. A test reads every example and checks that no word
of the grammar is missing.
"""

from __future__ import annotations

__all__ = ["form_of", "forms"]

_LET = ("`let` gives names to numbers", "let heads = 32, width = heads * 128")
_ASSERT = ("`assert` has a condition, and a text after a comma", 'assert h % 2 == 0, "h = {h} is odd"')
_USE = (
    "`use` has another model or layout with its arguments, and the prefix of its tensors",
    "use vision(h = 4) as eye",
)
_DIM = ("`dim` gives names to sizes", "dim l = 4, h = config.hidden_size")
_INDEX = ("`index` gives the distribution of an index, or its digits", "index l = l@pp")
_GROUP = ("`group` has a name, and its members with commas between them", "group decay = attn.q, mlp.up")

FORMS: dict[tuple[str, str], tuple[str, str]] = {
    ("c", ""): ("a call has the layout's name and, in parentheses, its arguments", "zero1(dp = 4, tp = 2)"),
    ("h", ""): ("a file starts with the version of the language", "ucpl 2"),
    ("t", ""): (
        "a file has `from`, `let`, `assert`, `model`, `layout` and `plan`; "
        "tensors stand inside the braces of a model or a layout",
        "layout halves(tp) of gpt { … }",
    ),
    ("t", "from"): ("`from` has a file in quotes, and the names to take from it", 'from "gpt.ucpl" import gpt, vision'),
    ("t", "let"): _LET,
    ("t", "assert"): _ASSERT,
    ("t", "model"): ("a model has a name and, in braces, its dims and tensors, a line each", "model gpt { … }"),
    ("t", "layout"): (
        "a layout has a name, its parameters in parentheses, the model that it is of, and perhaps a base",
        "layout halves(tp, dp = 1) of gpt extends zero1(dp = dp) { … }",
    ),
    ("t", "plan"): (
        "a plan has a name and two layouts with their arguments",
        "plan grow = zero1(dp = 4) -> plain() drop exp_avg",
    ),
    ("m", ""): (
        "a tensor has its name, `:`, its dims side by side, and perhaps `dtype`, `is buffer`, `is frozen` and `when`",
        "attn.q : l n d h  dtype bf16",
    ),
    ("m", "let"): _LET,
    ("m", "dim"): _DIM,
    ("m", "assert"): _ASSERT,
    ("m", "use"): _USE,
    ("m", "index"): _INDEX,
    ("m", "group"): _GROUP,
    ("m", "dtype"): ("`dtype` has the element type of all tensors that do not say theirs", "dtype bf16"),
    ("m", "alias"): ("an alias has a second name and, behind `=`, the tensor's own", 'alias "lm_head.weight" = embed'),
    ("m", "state"): (
        "a state has its names, `:`, its element type, and perhaps `scalar` and `of` its groups",
        "state exp_avg, exp_avg_sq : f32",
    ),
    ("l", ""): (
        "an entry has the tensor's name, indices in brackets, `=`, its axes side by side, and then clauses "
        "(`as`, `in`, `at`, `dtype`, `when` and others)",
        'attn.q[l] = n@tp d h  as "layers.{l}.q"',
    ),
    ("l", "let"): _LET,
    ("l", "dim"): _DIM,
    ("l", "assert"): _ASSERT,
    ("l", "use"): _USE,
    ("l", "index"): _INDEX,
    ("l", "mesh"): ("a mesh has its axes side by side, major to minor", "mesh pp dp tp"),
    ("l", "domain"): (
        "a domain is a `node` or a `process`, and has the ranks of one, by coordinates as in names of files",
        'domain node = "{pp}.{dp - dp % 4}"',
    ),
    ("l", "file"): (
        "a file has a name, a form, a path in quotes, and perhaps `key` and `when`",
        'file weights = torch "rank_{tp}.pt" key "module/{key}"',
    ),
    ("l", "framework"): ("a framework has its settings in parentheses", "framework deepspeed(stage = 1, dp = dp)"),
    ("l", "group"): _GROUP,
    ("l", "state"): (
        "a state line has states, perhaps `of` groups, `=`, and `like`, `none` or a flat, then clauses",
        'state exp_avg of decay = pad(flat(each), 2 * dp)@dp  in optim as "state/{bucket}"',
    ),
    ("l", "derive"): ("a derivation has a state and the one that it is made from", "derive weight from fp32"),
    ("l", "fill"): (
        "a fill has a tensor, with dims in brackets, or `state` and its names, then `=` and a number",
        "fill embed[v[32000..]] = 0",
    ),
    ("l", "blob"): ("a blob has a name, perhaps axes, and its fate", 'blob rng @dp keep in meta as "rng"'),
}


_NEWER: dict[tuple[str, str], tuple[str, str]] = {  # of version 2, where it differs
    ("h", ""): ("a file starts with the version of the language", "ucpl 2"),
    ("m", "state"): (
        "a state has its names, `:`, its element type, and perhaps `scalar`, `for` with groups, `without` with dims",
        "state exp_avg, exp_avg_sq : f32 for decay",
    ),
    ("l", "state"): (
        "a state line has states, perhaps `for` with groups, `=`, and `like`, `none` or a flat, then clauses",
        'state exp_avg for decay = pad(flat(each), 2 * dp)@dp  in optim as "state/{bucket}"',
    ),
}


def forms(version: int) -> dict[tuple[str, str], tuple[str, str]]:
    """The forms of one version of the language."""
    return FORMS if version == 1 else {key: _NEWER.get(key, form) for key, form in FORMS.items() if key[1] != "domain"}


def form_of(place: str, line: str, version: int) -> str:
    """The form of the statement that a line begins."""
    known = forms(version)
    word = line.split(maxsplit=1)[0] if line.strip() else ""
    form, example = known.get((place, word.strip(":=(")), known[place, ""])
    return f"{form}, as in: {example}"
