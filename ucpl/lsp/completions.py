"""Proposals for a place: words of the grammar, and known names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from ucpl.language.source import version_of
from ucpl.language.words import is_dotted, quote
from ucpl.lsp.context import CursorContext, hole_at, wanted
from ucpl.lsp.definitions import Definition, definitions_of, lefts_of
from ucpl.lsp.files import EditorTexts, shipped_blocks
from ucpl.lsp.names import BlockInFile, KnownName, blocks_known, find_block, model_of, visible
from ucpl.lsp.outline import BLOCKS, TextBlock, continuing_words
from ucpl.lsp.words import FUNCTIONS, TEMPLATE_NAMES, WORDS
from ucpl.records import frozen
from ucpl.resources import VERSIONS, spec_files

__all__ = ["Completion", "completions"]

_AROUND = {"top": "ucpl 1\n", "model": "ucpl 1\nmodel m {\n", "layout": "ucpl 1\nlayout m() of any {\n"}
_WORDS_OF = {  # words that the grammar leaves open, by the word before them
    "is": ("buffer", "frozen", "scale"),
    "framework": ("deepspeed()", "universal()", "huggingface()", "plain()", "torch()"),
}
_FORMS = ("torch", "safetensors")
_FATES = ("keep", "first", "remap", "drop")
_CLASSES = ("parameter", "trainable", "frozen", "buffer", "alias")
_PADS = ("zero", "live", "undefined")


@frozen
class Completion:
    """One proposal. It replaces characters start .. stop."""

    label: str
    kind: str  # "word", or the kind of a definition
    detail: str
    start: int
    stop: int
    text: str = ""  # the inserted text, if it is not the label


def completions(texts: EditorTexts, context: CursorContext) -> list[Completion]:
    """Everything that can stand at a place, each name once."""
    token = context.token
    if token is not None and token.kind == "comment":
        return []
    start, stop = (token.start, token.stop) if token is not None else (context.offset, context.offset)
    made: Iterable[Proposal]
    if token is not None and token.kind == "string":
        made = _in_text(texts, context)
        typed = hole_at(token, context.offset)
        begin = (
            context.offset - len(typed.rpartition(" ")[2].rpartition("(")[2]) if typed is not None else token.start + 1
        )
        start, stop = begin, context.offset if typed is not None else stop - token.is_whole
    elif context.typed.startswith("config."):
        made = _config_keys(texts, context)
    else:
        made = [*_names(texts, context), *_words(context)]
    out: dict[str, Completion] = {}
    for label, kind, detail in made:
        text = label if token is not None and token.kind == "string" else _written(label, kind)
        out.setdefault(label, Completion(label, kind, detail, start, stop, text))
    return list(out.values())


Proposal = tuple[str, str, str]  # label, kind, detail


def _written(label: str, kind: str) -> str:
    """A name as it is written: in quotes where it needs them."""
    return label if kind in ("word", "config") or label.endswith(" = ") or is_dotted(label) else quote(label)


# ---- names -----------------------------------------------------------------------------------------------------------


def _names(texts: EditorTexts, context: CursorContext) -> Iterator[Proposal]:
    kinds = wanted(context)
    if context.statement is None and context.block.kind == "layout":
        yield from _tensors_left(texts, context.place)
    if set(BLOCKS) & set(kinds):
        yield from _blocks(texts, context, kinds)
        return
    yield from _arguments(texts, context)
    known = visible(texts, context.scope) if kinds else []
    if kinds[:1] == ("dim",) and context.word == "entry":
        yield from _dims_of(texts, context, known)
        return
    for kind in kinds:
        yield from ((k.name, kind, _detail(k.definition)) for k in known if k.kind == kind)
    if "dim" in kinds and "let" in kinds:
        from ucpl.layout.arithmetic import (
            FUNCTIONS as known_functions,
        )  # with NumPy, which a server that begins does without

        yield from ((name, "word", FUNCTIONS.get(name, "")) for name in sorted(known_functions))
        yield "config.", "config", "a value of the config.json"


def _arguments(texts: EditorTexts, context: CursorContext) -> Iterator[Proposal]:
    """The parameters of the called layout or model, where an argument begins."""
    if context.previous not in ("(", ",") or context.word not in ("model", "layout", "plan", "use"):
        return
    place = find_block(texts, context.place.path, context.called)
    said = {t.text for t in context.inner}
    for one in definitions_of(place.outline, place.block) if place is not None else ():
        if one.kind == "parameter" and one.name not in said:
            yield f"{one.name} = ", "parameter", f"of {context.called}"


def _blocks(texts: EditorTexts, context: CursorContext, kinds: Iterable[str]) -> Iterator[Proposal]:
    path = context.place.path
    if context.word == "from" and context.statement is not None:
        path = texts.imported(path, context.statement.tokens[1].value) or path
    for _, block in blocks_known(texts, path):
        if block.kind in kinds and block is not context.block:
            yield block.name, block.kind, _headline(block)
    if "model" in kinds and "layout" not in kinds:
        yield "any", "word", "whatever model the checkpoint has"
    if context.word != "from":
        yield from ((b.name, b.kind, f"ships in {os.path.basename(p)}") for p, b in shipped_blocks() if b.kind in kinds)


def _headline(block: TextBlock) -> str:
    return f"{block.kind} of {block.of}" if block.kind == "layout" else block.kind


def _detail(definition: Definition) -> str:
    words = " ".join(t.text for t in definition.statement.tokens)
    return words if len(words) < 80 else f"{words[:78]} …"


def _tensors_left(texts: EditorTexts, place: BlockInFile) -> Iterator[Proposal]:
    """The tensors of the model.

    Those without a line in the layout come first.
    """
    model = model_of(texts, place)
    if model is None:
        return
    stored = {t.value for s in place.block.statements if s.word == "entry" for t in lefts_of(s)}
    tensors = [k for k in visible(texts, model) if k.kind == "tensor"]
    for known in sorted(tensors, key=lambda k: k.name in stored):
        yield known.name, "tensor", _detail(known.definition)


def _dims_of(texts: EditorTexts, context: CursorContext, known: list[KnownName]) -> Iterator[Proposal]:
    """Dims of the entry's tensor that its line lacks.

    For a fused one, all dims, and labels.
    """
    assert context.statement is not None
    path = context.statement.tokens[0].value
    tensor = next((k for k in known if k.kind == "tensor" and k.name == path), None)
    here = {t.value for t in context.statement.tokens if t.is_name and t is not context.token}
    if tensor is not None:
        dims = [t.value for t in tensor.definition.statement.after(":") if t.is_name]
        yield from ((d, "dim", f"of {path}") for d in dims if d not in here and d in {k.name for k in known})
    else:
        for k in known:
            beside = k.kind == "tensor" and k.name.rpartition(".")[0] in (path.rpartition(".")[0], path)
            if beside and context.previous in ("(", "+"):
                yield f"{k.name.rpartition('.')[2]}:", "word", _detail(k.definition)
    yield from ((k.name, "dim", _detail(k.definition)) for k in known if k.kind == "dim" and k.name not in here)


# ---- words -----------------------------------------------------------------------------------------------------------


def _words(context: CursorContext) -> Iterator[Proposal]:
    """Words that the grammar accepts behind the statement so far.

    On a new line, also words that continue the statement above.
    """
    from ucpl.extents.dtypes import DTYPES

    accepted = _accepted(context)
    for word in sorted(accepted):
        if word.isalpha() and word.islower():
            yield word, "word", WORDS.get(word, "")
    if "NAME" not in accepted:
        return
    previous = context.previous
    open_words = _WORDS_OF.get(previous, ()) if context.word != "entry" else ()
    if previous == "dtype" or (previous == ":" and context.word == "state"):
        open_words = tuple(DTYPES)
    elif context.word == "file" and previous == "=":
        open_words = _FORMS
    elif context.word == "blob" and len(context.before) > 1 and not set(_FATES) & {t.text for t in context.before}:
        open_words = _FATES
    elif previous in ("of", "is") and context.word == "entry":
        open_words = _CLASSES
    elif "pad" in [t.text for t in context.before] and previous == ",":
        open_words = _PADS
    yield from ((word, "word", WORDS.get(word, "")) for word in open_words)


def _accepted(context: CursorContext) -> frozenset[str]:
    from ucpl.language.expected import words_after  # with the parser, which a server that begins does without

    statement, block = context.statement, context.block
    outline = context.place.outline
    if statement is None:
        above = [s for s in block.statements if s.stop <= context.offset]
        more = continuing_words() if above and above[-1].word in ("entry", "state") else frozenset[str]()
        more &= words_after(_before(outline.text, block, above[-1].start, above[-1].stop)) if more else frozenset()
        if block.kind == "top" and not outline.top.statements and not outline.blocks:
            return frozenset({"ucpl"})
        return words_after(_around(outline.text, block)) | more
    begin = context.token.start if context.token is not None else context.offset
    if statement.word == "ucpl":
        return frozenset()
    if begin <= statement.start:
        return words_after(_around(outline.text, block))
    return words_after(_before(outline.text, block, statement.start, begin))


def _before(text: str, block: TextBlock, start: int, stop: int) -> str:
    """A statement up to a place, in a block of its kind."""
    return f"{_around(text, block)}{text[start:stop].rstrip()} "


def _around(text: str, block: TextBlock) -> str:
    """The text before a block's first statement, in the same version."""
    version = version_of(text)
    return _AROUND[block.kind].replace("ucpl 1", f"ucpl {version}") if version in VERSIONS else _AROUND[block.kind]


# ---- in quotes -------------------------------------------------------------------------------------------------------


def _in_text(texts: EditorTexts, context: CursorContext) -> Iterator[Proposal]:
    token = context.token
    assert token is not None
    if context.word == "from":
        yield from _files_of_folder(texts, context.place.path)
    elif hole_at(token, context.offset) is not None and context.block.kind == "layout":
        yield from ((name, "word", text) for name, text in TEMPLATE_NAMES.items())
        statement = context.statement
        left = (
            statement.tokens[: next((i for i, t in enumerate(statement.tokens) if t.text == "="), 0)]
            if statement
            else ()
        )
        yield from ((t.text, "index", "index of this line") for t in left[1:] if t.kind == "name")
        for known in visible(texts, context.place):
            if known.kind in ("axis", "parameter", "let", "dim"):
                yield known.name, known.kind, _detail(known.definition)


def _files_of_folder(texts: EditorTexts, path: str) -> Iterator[Proposal]:
    folder = os.path.dirname(path)
    try:
        beside = sorted(n for n in os.listdir(folder) if n.endswith(".ucpl") and n != os.path.basename(path))
    except OSError:
        beside = []
    yield from ((name, "file", "in this folder") for name in beside)
    yield from ((name, "file", "shipped") for name, _ in spec_files())


def _config_keys(texts: EditorTexts, context: CursorContext) -> Iterator[Proposal]:
    """The keys of the config.json below the typed path."""
    config = texts.config(context.place.path)
    steps = context.typed.split(".")[1:-1]
    value: object = config.values if config is not None else {}
    for step in steps:
        value = value.get(step) if isinstance(value, dict) else None
    for key, inner in value.items() if isinstance(value, dict) else ():
        if is_dotted(key):
            yield ".".join(["config", *steps, key]), "config", f"{inner!r}"[:80]
