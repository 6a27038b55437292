"""Parser of one text with its tables and diagnostics.

It is imported only if no kept tree fits.
"""

from __future__ import annotations

import re
import threading

from attrs import evolve
from lark.exceptions import UnexpectedInput

from ucpl.errors import Diagnostic, UcplError, fail
from ucpl.language.refused_lines import comma_above, standing, standing_call
from ucpl.language.slips import GENERAL, diagnose
from ucpl.language.source import TEXT_CHARACTERS_MAX, Source, version_of
from ucpl.language.suggestions import instead_of
from ucpl.language.tables import Tables, tables
from ucpl.language.words import INSTEAD
from ucpl.resources import VERSIONS

__all__ = ["LOCK", "read", "tables_of", "form_of", "forms"]

LOCK = threading.Lock()  # the recorder knows one text at a time
# Where a line to write is looked for.
_OF_HABIT = frozenset({"E001", "E002", "E004", "E005", "E016", "E017", "E019", "E020", "E023"})


def tables_of(text: str, start: str = "start") -> Tables:
    """The parser of the version that a text states.

    Expressions and calls, which state none, are alike in all versions.
    """
    stated = version_of(text) if start == "start" else VERSIONS[-1]
    return tables(stated if stated in VERSIONS else VERSIONS[0])


def read(source: Source, start: str) -> object:
    """The record of a complete text; `start` is its rule.

    Raises: UcplError, at the first place that cannot be read.
    """
    if len(source.text) > TEXT_CHARACTERS_MAX:
        fail(
            "E011",
            f"a text has {len(source.text)} characters; {TEXT_CHARACTERS_MAX} are allowed",
            source.label(source.span(0, 1)),
        )
    with LOCK:
        parser = tables_of(source.text, start)
        parser.joiner.source = source
        parser.recorder.begin(source, parser.version)
        try:
            # The last line may lack its newline; the grammar asks for one after every statement.
            return parser.lark.parse(source.text + "\n", start=start)
        except UnexpectedInput as error:
            problem = UcplError(_with_the_line(diagnose(error, source, parser.lark), source, start, parser))
        except UcplError as error:
            problem = UcplError(*(_with_the_line(d, source, start, parser) for d in error.diagnostics))
        finally:
            parser.recorder.begin(Source("", ""))  # let the text and its records go
    raise problem from None


def _with_the_line(found: Diagnostic, source: Source, start: str, parser: Tables) -> Diagnostic:
    """The diagnostic with the line to write instead, or the statement's form."""
    found = _of_another_version(found, source, parser.version)
    if found.code not in _OF_HABIT or start not in ("start", "call_text"):
        return found
    label = found.labels[0]
    place = _offset(source.text, label.line or 1, label.column or 1)
    is_call = start == "call_text"
    at = standing_call(source.text, place) if is_call else standing(source.text, place, found.code == "E002")
    if at is None:
        return found
    if not is_call and (comma := comma_above(source.text, place)) is not None:
        line = source.text.count("\n", 0, comma) + 1
        label = source.label(source.span(comma, comma + 1), "the line continues after a comma")
        why = f"take the comma at the end of line {line} out: a statement ends with its line"
        return evolve(found, labels=(label, *found.labels), remedy=why)
    instead = instead_of(at, parser)
    if instead is not None and (found.code != "E016" or found.about is None):
        return evolve(found, remedy=instead.remedy)
    if found.code == "E001" and found.about == GENERAL:
        return evolve(found, remedy=form_of(at.place, (at.before + at.line).strip(), parser.version))
    return found


def _of_another_version(found: Diagnostic, source: Source, version: int) -> Diagnostic:
    """The diagnostic, or E024 at a word that version 2 does without."""
    label = found.labels[0]
    start = _offset(source.text, label.line or 1, label.column or 1)
    word = next(iter(re.findall(r"\A[a-z]+\b", source.text[start : start + 20])), "")
    before = re.search(r"\b(buckets|domain)[ \t]+\Z", source.text[:start])
    if before is not None:  # read as a name: the word behind it is refused
        word, start = before[1], before.start(1)
    if version == 1 or word not in INSTEAD or found.code != "E001":
        return found
    here = source.label(source.span(start, start + len(word)), "here")
    return Diagnostic("E024", f"version {version} has no `{word}`", (here,), remedy=INSTEAD[word])


def _offset(text: str, line: int, column: int) -> int:
    place = 0
    for _ in range(line - 1):
        place = text.find("\n", place) + 1
    return place + column - 1


# ---- forms of statements ---------------------------------------------------------------------------------------------


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
