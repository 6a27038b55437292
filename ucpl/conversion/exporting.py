"""Export: a checkpoint as a folder that from_pretrained loads strictly.

It finds config.json next to the source, and a spec for names of Megatron's. The engine converts as usual.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.conversion.demanded import demand_complete
from ucpl.conversion.dialects import described_as, dialect
from ucpl.conversion.engine import Event, Ready
from ucpl.conversion.opening import open_checkpoint
from ucpl.conversion.requests import Called, Config, Given, config_at, library_of
from ucpl.conversion.ties import framework_of
from ucpl.conversion.weights import open_for_inspection
from ucpl.errors import Label, UcplError, fail
from ucpl.records import frozen
from ucpl.registry import format_named, format_of_models
from ucpl.resources import spec_files

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Checkpoint

__all__ = ["Export", "demand_strict", "folder_config", "request"]

_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_OF_A_MODEL = ("model_type", "architectures", "auto_map", "_class_name")  # keys that a trainer's own config.json lacks
_FOLDERS = ("huggingface", "hf")  # below a folder: of verl and others
_DTYPES = {
    "bf16": "bf16", "bfloat16": "bf16", "f16": "f16", "fp16": "f16", "float16": "f16", "half": "f16",
    "f32": "f32", "fp32": "f32", "float32": "f32", "float": "f32",
}  # fmt: skip
_HUGGING_FACE = {"phi3": "phi3", "mixtral": "mixtral", "qwen2_moe": "qwen_moe", "qwen3_moe": "qwen_moe"}
_NORMS = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")  # with Transformer Engine, and without


@frozen
class Export:
    """The layouts and options of an export, and notes on found files."""

    to: str
    layout: str | None
    given: Given
    notes: tuple[str, ...] = ()


def folder_config(path: str | Path) -> Path:
    """The config.json of a folder, or the file itself."""
    inside = Path(path) / _CONFIG
    return inside if inside.is_file() else Path(path)


def request(source: str | Path, given: Given, *, dtype: str = "", shard: str = "5GB", spec: str = "",
            layout: str | None = None) -> Export:  # fmt: skip
    """The conversion for an export.

    spec: the .ucpl file with the source's names, or the name of a shipped one. layout: the source's own, if given. Raises:
    UcplError E173 for a dtype, E221 without a config.json, E399 for names that no spec has.
    """
    described, names = described_as(layout)
    here = Path(source)
    read = partial(open_checkpoint, here, described)
    opened = open_for_inspection(lambda one: read(given=one), given)
    given, config, notes = _with_config(opened, here, given, _dtype(dtype))
    to = f"safetensors({_arguments(shard=shard, dtype=_dtype(dtype))})"
    if names is not None or (described is not None and not described.is_of_any):
        return Export(to, layout, given, notes)
    found = _names(opened, config, given, spec)
    if found is None:
        return Export(to, layout, given, notes)
    mine, theirs = found
    notes = (*notes, f"names: those of {mine}, as {theirs} has them")
    return Export(f"{to} of {theirs}", f"{layout or ''} of {mine}".strip(), evolve(given, config=config), notes)


def demand_strict(event: Event) -> None:
    """Check a planned export before it is written.

    Raises: UcplError E222 if from_pretrained would invent or ignore a tensor.
    """
    if isinstance(event, Ready) and event.prepared is not None:
        demand_complete(event.plan, event.source)


def _dtype(text: str) -> str:
    """Raises: UcplError E173."""
    sentence = text.lower().removeprefix("torch.")
    if sentence and sentence not in _DTYPES:
        remedy = "write --dtype bf16, f16 or f32; without it each tensor keeps its own"
        fail(
            "E173", f"--dtype {text[:60]}: no dtype of weights", Label("<command line>", where="--dtype"), remedy=remedy
        )
    return _DTYPES.get(sentence, "")


def _arguments(**values: str) -> str:
    from ucpl.language.words import quote as quoted

    return ", ".join(f"{name} = {quoted(value)}" for name, value in values.items() if value)


# ---- config.json -----------------------------------------------------------------------------------------------------


def _with_config(opened: Checkpoint, here: Path, given: Given, dtype: str) -> tuple[Given, Config, tuple[str, ...]]:
    """The options with a config, the config, and its origin.

    Raises: UcplError E221 if there is none.
    """
    if given.config_file is not None and given.config is not None:
        return given, given.config, ()
    own = _own_config(opened)
    if own is not None:
        return given, own, ()
    for path in _near(here):
        if (config := _config_of_a_model(path)) is not None:
            note = f"config: {path}, with the tokenizer and code of its folder"
            return evolve(given, config=config, config_file=path), config, (note,)
    fail(
        "E221",
        f"{here} has no config.json of a model, and none is near it",
        Label(str(here)),
        remedy=f"add --config FOLDER of the base model, or write ucpl convert {quote(str(here))} DST --to safetensors"
        + (f" -D dtype={dtype}" if dtype else ""),
    )


def _own_config(opened: Checkpoint) -> Config | None:
    """The source's own config, in its files or around its shards."""
    from ucpl.files.model_texts import carried_texts, object_of

    texts = carried_texts(opened)
    for name in (_CONFIG, _ADAPTER):
        if name in texts:
            found = object_of(texts[name])
            if found is not None:
                return found
    if opened.container is not None:
        for file in opened.container.files:
            if Path(file.name).name in (_CONFIG, _ADAPTER):
                return config_at(opened.container.where(file))
    return None


def _near(here: Path) -> Iterator[Path]:
    """Paths of config.json near a source.

    In its folder, in two folders above, and in usual folders of the first two.
    """
    first = here if here.is_dir() else here.parent
    for level, folder in enumerate((first.absolute(), *first.absolute().parents)[:3]):
        for path in (folder, *(folder / name for name in _FOLDERS if level < 2)):
            if (path / _CONFIG).is_file():
                yield path / _CONFIG


def _config_of_a_model(path: Path) -> Config | None:
    try:
        found = config_at(path)
    except UcplError:
        return None
    return found if any(key in found for key in _OF_A_MODEL) else None


# ---- names ------------------------------------------------------------------------------------------------------------


def _names(opened: Checkpoint, config: Config, given: Given, spec: str) -> tuple[str, str] | None:
    """The calls of both dialects for a source with other names.

    None: the names are those of the class, or no spec is needed. Raises: UcplError E399.
    """
    if format_named(opened.format).has_model_files or not (spec or _are_foreign(opened, config)):
        return None
    tried = [_spec_at(spec)] if spec else [name for name, _ in spec_files()]
    theirs = _HUGGING_FACE.get(str(config.get("model_type")), "hf")
    for file in tried:
        if not spec and theirs not in library_of(file).known:
            continue  # of another architecture, or lines that several specs extend
        for mine in _calls(file, opened, config):
            if _is_of(mine, opened, config, given):
                return mine, f"{file}:{theirs}()"
    if not spec and not format_named(opened.format).is_of_iterations:
        return None  # the check of the plan names the tensors that differ
    first = opened.state.tensors[0].name if opened.state.tensors else ""
    fail(
        "E399",
        f"no layout of {'the shipped specs' if not spec else tried[0]} has the names of {opened.top}, such as `{first}`",
        Label(str(opened.top), where=first),
        remedy="give a spec that has both names: --model FILE.ucpl (docs/TUTORIAL.md)",
    )


def _are_foreign(opened: Checkpoint, config: Config) -> bool:
    """True if the class of a config has none of the names."""
    from ucpl.inference.hf.fitting import fitting

    found = fitting(config, {t.name: t.shape for t in opened.state.tensors})
    if found is None:
        return format_named(opened.format).is_of_iterations
    return not found.common


def _spec_at(text: str) -> str:
    """The .ucpl file of a name such as `llama`. Raises: UcplError E178."""
    shipped = [name for name, _ in spec_files()]
    file = text.partition(".ucpl:")[0] + ".ucpl" if ".ucpl:" in text else text
    if not file.endswith(".ucpl"):
        file += ".ucpl"
    if Path(file).is_file() or file in shipped:
        return file
    from difflib import get_close_matches

    close = get_close_matches(file, shipped, 1)
    remedy = f"write --model {(close or ['llama.ucpl'])[0].removesuffix('.ucpl')}, or the path of a .ucpl file"
    fail(
        "E178",
        f"--model {text[:60]}: no such spec",
        Label("<command line>", where=f"--model {text[:60]}"),
        remedy=remedy,
    )


def _calls(file: str, opened: Checkpoint, config: Config) -> Iterator[str]:
    """Calls of a file's layouts that may have a checkpoint's names."""
    from ucpl.language import nodes
    from ucpl.language.nodes import Call

    library = library_of(file)
    for known in tuple(library.known.values()):  # reading a base of one adds to them
        node = known.node
        if not isinstance(node, nodes.Layout) or node.of == "any" or Path(node.span.file).name != Path(file).name:
            continue
        if framework_of(Called(library, Call(node.name, ()))) == format_of_models().name:
            continue
        names = {p.name for p in node.parameters}
        least = [f"{p.name} = 1" for p in node.parameters if p.default is None]
        rows = [f"divisible = {n}" for n in _rows(opened, config)] if "divisible" in names else [""]
        norms = [f'norm = "{text}"' for text in _NORMS] if "norm" in names else [""]
        for row in rows:
            for norm in norms:
                yield f"{file}:{node.name}({', '.join(filter(None, (*least, row, norm)))})"


def _rows(opened: Checkpoint, config: Config) -> Iterable[int]:
    """Possible values of `divisible`: rows of the padded embedding."""
    words = config.get("vocab_size")
    sizes = {t.shape[0] for t in opened.state.tensors if len(t.shape) == 2 and "embed" in t.name}
    return sorted(n for n in sizes if isinstance(words, int) and n >= words)[:4] or [1]


def _is_of(call: str, opened: Checkpoint, config: Config, given: Given) -> bool:
    """True if a call has a checkpoint's names and shapes."""
    try:
        found = dialect(call, config, given.sizes)
    except UcplError:
        return False
    stored = {t.name: t.shape for t in opened.state.tensors}
    return {name: one.shape for name, one in found.named.items()} == stored
