"""A config's class on torch's meta device.

Tensors of this and varied configs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NoReturn, Protocol

from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents import BY_TORCH
from ucpl.inference.hf.families import HEAD, KINDS, LAYERS_MAX, WORDS, shapes_of
from ucpl.inference.hf.folding import Form, form_of, joined
from ucpl.inference.hf.offline import offline
from ucpl.inference.hf.records import Config, FoundTensor, Version
from ucpl.inference.hf.splits import OutputSplit, split_of
from ucpl.inference.hf.varying import COUNTED, Other, few_experts, items_of, lists_of, numbers_of, singles, varied
from ucpl.records import frozen

__all__ = ["Class", "ClassTensors", "built_of", "class_of", "saved_of"]

_VARIATIONS = 2


@frozen
class Class:
    """Facts of a class.

    `versions`: the config's own first. `absent`: keys that only the class has.
    """

    versions: tuple[Version, ...]
    aliases: dict[str, str] = field(factory=dict)
    cuts: dict[str, str] = field(factory=dict)
    absent: dict[str, int] = field(factory=dict)
    origin: str = "its transformers class"
    dropped: tuple[str, ...] = ()  # patterns of keys that it does not take from files
    splits: dict[str, OutputSplit] = field(factory=dict)  # of fused tensors, by the name with * for numbers


class _Tensor(Protocol):
    """As much of a torch tensor as is asked."""

    @property
    def dtype(self) -> _TorchDtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def numel(self) -> int: ...
    def to(self, dtype: object) -> _Tensor: ...


class _TorchDtype(Protocol):
    @property
    def is_floating_point(self) -> bool: ...


class _Model(Protocol):
    """As much of a model as is asked."""

    def state_dict(self, keep_vars: bool) -> Mapping[str, _Tensor]: ...
    def _get_dtype_plan(self, dtype: object) -> Mapping[str, object]: ...


def _library() -> _Library:
    """Both libraries, or an ImportError.

    Without transformers, torch is not imported: that costs a second and 200 MB.
    """
    if "transformers" not in sys.modules and find_spec("transformers") is None:
        raise ImportError("transformers")
    return _Library(import_module("torch"), import_module("transformers"))


def class_of(config: Config, file: Path, *, needed: bool, notes: list[str]) -> Class | None:
    """The class of a config on the meta device; None without transformers.

    None also if it fails, unless it is needed.
    """
    try:
        library = _library()
    except ImportError:
        if needed:
            _reject_without_names(file)
        notes.append(
            "transformers is not installed: no plan of tensor parallelism, no aliases, no buffers were looked up."
        )
        return None
    _check_built(config, file)
    try:
        with offline():
            return _asked(library, config, str(file.parent if file.name == "config.json" else file))
    except Exception as error:  # a class of transformers raises whatever it likes of a config that it does not expect
        said = f"{type(error).__name__}: {error}"
        if needed:
            fail("E396", f"transformers cannot build {file.name}: {said}", Label(str(file)))
        notes.append(f"transformers could not build the class ({said[:200]}): only headers were read.")
        return None


def _reject_without_names(file: Path) -> NoReturn:
    """The error where headers and transformers give no names. Raises: UcplError E396."""
    pickled = next((n for n in sorted(os.listdir(file.parent)) if n.endswith((".bin", ".pt", ".pth"))), None)
    if pickled is None:
        fail("E396", "transformers is not installed: a config alone has no names", Label(str(file)))
    fail(
        "E396",
        f"the weights are in {pickled}: names are read from .safetensors files and pytorch_model.bin alone,"
        " or asked of transformers, which is not installed",
        Label(str(file.parent / pickled), "is no .safetensors file"),
        Label(str(file), "has no names"),
        remedy="save the model as .safetensors (save_pretrained does so), or install a transformers that knows the model type",
    )


def built_of(config: Config) -> tuple[object, object]:
    """(model, config as transformers reads it), on the meta device.

    Raises: UcplError E396.
    """
    place = Path("config.json")
    kind = config.get("model_type")
    try:
        library = _library()
    except ImportError:
        fail(
            "E396",
            "transformers is not installed: a config alone does not list the modules",
            Label(place.name),
        )
    _check_built(config, place)
    known = library.transformers.CONFIG_MAPPING
    if not isinstance(kind, str) or kind not in known:
        fail("E396", f"model_type is {kind!r}, which transformers does not know", Label(place.name, where="model_type"))
    try:
        with offline(), library.silent():
            made = known[kind].from_dict(dict(config))
            return library.built(config, made), made
    except Exception as error:  # as above
        fail("E396", f"transformers cannot build it: {type(error).__name__}: {error}"[:600], Label(place.name))


def _check_built(config: Config, file: Path) -> None:
    """Check that a config does not request too many layers or experts.

    A class makes objects for each. Raises: UcplError E396.
    """
    for path, value in numbers_of(config).items():
        if value > LAYERS_MAX and COUNTED.search(path.rpartition(".")[2]):
            fail(
                "E396",
                f"{path} = {value}: no class of more than {LAYERS_MAX} of a kind is made",
                Label(str(file), where=path),
                remedy="correct the config, or import the .safetensors files without it",
            )


def _asked(library: _Library, config: Config, place: str) -> Class:
    """All facts of the class.

    place: the config's file, or its folder.
    """
    made = library.transformers.AutoConfig.from_pretrained(place, trust_remote_code=False)
    model = library.built(config, made)
    own = Version(library.saved(model, config))
    as_read, _ = made.get_config_dict(place) if hasattr(made, "get_config_dict") else (config, {})
    with library.silent():
        absent, variations = _variations(library, as_read, made)
    numbers = numbers_of(config) | absent
    ties = library.on_disk(model, library.ties(model))
    names = {t.name for t in own.tensors}
    plan = getattr(model, "_tp_plan", None) or {}
    return Class(
        (evolve(own, numbers=numbers, lists=lists_of(config), items=items_of(config)), *variations),
        {a: o for a, o in ties.items() if o in names and a not in names},
        {str(k): str(v) for k, v in plan.items()},
        absent,
        f"tensors that {type(model).__name__} of transformers saves",
        tuple(map(str, getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())),
        library.splits(model),
    )


def _variations(library: _Library, config: Config, made: object) -> tuple[dict[str, int], list[Version]]:
    """Keys that only the class has, and the class with varied numbers.

    Each key gets its own number. A class that rejects them is built with its layers in their order, then with the same
    number of layers; if it still fails, nothing is known of its sizes.
    """
    from_dict = getattr(type(made), "from_dict", None)
    if from_dict is None:
        return {}, []
    for what in (Other(True, True), Other(True, False), Other(False, False)):
        try:
            absent = _absent(from_dict, config, made, what)
            out = []
            for seed in range(_VARIATIONS):
                other = varied(config, absent, seed, what)
                model = library.built(config, from_dict(other))
                out.append(Version(library.saved(model, config), numbers_of(other), lists_of(other), items_of(other)))
        except Exception:  # whatever a class does of numbers that it does not expect
            continue
        return absent, [*out, *_singles(library, config, from_dict, absent)]
    return {}, _singles(library, config, from_dict, {})


def _singles(
    library: _Library, config: Config, from_dict: Callable[[Config], object], absent: dict[str, int]
) -> list[Version]:
    """The class with one number changed at a time.

    Versions that the class does not accept are absent.
    """
    base = few_experts(config)
    out = []
    for path, tries in (("", [base] if base != config else []), *singles(base, absent)):
        for other in tries:
            try:
                model = library.built(config, from_dict(other))
                numbers = absent | numbers_of(other)
                out.append(Version(library.saved(model, config), numbers, lists_of(other), items_of(other), path))
            except Exception:  # as above
                continue
            break
    return out


def _absent(from_dict: object, config: Config, made: object, what: Other) -> dict[str, int]:
    """Keys that the config lacks with the class's defaults.

    No other key changes such a number.
    """
    assert callable(from_dict)
    ours = numbers_of(config)
    here = numbers_of(made.to_dict())  # type: ignore[attr-defined]
    there = numbers_of(from_dict(varied(config, {}, 0, what)).to_dict())
    return {key: value for key, value in here.items() if key not in ours and there.get(key) == value}


@frozen
class _Library:
    """torch and transformers, as this process has them."""

    torch: ModuleType
    transformers: ModuleType

    def built(self, config: Config, made: object) -> _Model:
        """The config's class, without memory and without initialised weights."""
        kind = _model_class(self.transformers, config)
        with _uninitialised(), self.typed(config), self.torch.device("meta"):
            if kind is not None:
                model: _Model = kind(made)
            else:
                model = self.transformers.AutoModel.from_config(made, trust_remote_code=False)
        return model

    def saved(self, model: _Model, config: Config) -> tuple[FoundTensor, ...]:
        """The tensors that `save_pretrained` writes, under their names on disk."""
        left_out = {*self.ties(model), *(getattr(model, "_keys_to_ignore_on_save", None) or ())}
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}  # type: ignore[attr-defined]
        kept = {name: t for name, t in model.state_dict(keep_vars=True).items() if name not in left_out}
        kept |= {name: kept[name].to(self.torch.float32) for name in self.kept_in_fp32(model, config) & kept.keys()}
        buffers = {
            id(t) for name, t in kept.items() if name not in parameters
        }  # they are renamed, and never joined or cut
        return tuple(
            FoundTensor(name, tuple(t.shape), BY_TORCH[str(t.dtype).removeprefix("torch.")].name, id(t) in buffers)
            for name, t in _reverted(model, kept).items()
            if t.numel()
        )

    def kept_in_fp32(self, model: _Model, config: Config) -> set[str]:
        """Names of tensors that the class always loads as fp32.

        A router's bias.
        """
        try:
            found = import_module("transformers.core_model_loading").build_glob_alternation
            plan = model._get_dtype_plan(getattr(self.torch, _stated_dtype(config)))
        except (ImportError, AttributeError):  # another release: it has no such plan
            return set()
        if not plan:
            return set()
        pattern, *_ = found(list(plan))
        return {
            name
            for name, t in model.state_dict(keep_vars=True).items()
            if pattern.search(name) and t.dtype.is_floating_point
        }

    @contextmanager
    def typed(self, config: Config) -> Iterator[None]:
        """Make the config's dtype torch's default, which the class may override."""
        before = self.torch.get_default_dtype()
        self.torch.set_default_dtype(getattr(self.torch, _stated_dtype(config)))
        try:
            yield
        finally:
            self.torch.set_default_dtype(before)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Silence the class's messages about varied numbers."""
        logging = getattr(self.transformers, "logging", None)
        if logging is None:
            yield
            return
        before = logging.get_verbosity()
        logging.set_verbosity(logging.CRITICAL)
        try:
            yield
        finally:
            logging.set_verbosity(before)

    def ties(self, model: _Model) -> dict[str, str]:
        """Second names of tensors, each with the name that is saved."""
        tied = getattr(model, "all_tied_weights_keys", None)
        return dict(tied) if isinstance(tied, dict) else {}

    def splits(self, model: _Model) -> dict[str, OutputSplit]:
        """The splits of fused tensors by the class's source.

        There is one for all layers, by the tensors' names on disk.
        """
        out: dict[str, OutputSplit] = {}
        seen: set[Form] = set()
        submodule = getattr(model, "get_submodule", None)
        if submodule is None:
            return {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            form, _ = form_of(name)
            if form in seen:
                continue
            seen.add(form)
            module, _, leaf = name.rpartition(".")
            if leaf in ("weight", "bias"):
                module, _, leaf = module.rpartition(".")
            found = split_of(type(submodule(module)), leaf)
            disk = [*_reverted(model, {name: tensor})] if found is not None else []
            if found is not None and len(disk) == 1:
                out[joined(form_of(disk[0])[0], "*")] = found
        return out

    def on_disk(self, model: _Model, ties: dict[str, str]) -> dict[str, str]:
        """The same, by the names of files."""
        tensors = model.state_dict(keep_vars=True)

        def disk(name: str) -> str:
            made = _reverted(model, {name: tensors[name]})
            return next(iter(made)) if len(made) == 1 else name

        return {disk(a): disk(o) for a, o in ties.items() if a in tensors and o in tensors}


@contextmanager
def _uninitialised() -> Iterator[None]:
    """Skip the initialisation of weights, which is slow on the meta device."""
    try:
        without = import_module("transformers.initialization").no_init_weights
    except (ImportError, AttributeError):
        yield
        return
    with without():
        yield


def _reverted(model: _Model, tensors: dict[str, _Tensor]) -> dict[str, _Tensor]:
    """The tensors under the names that transformers writes.

    Its conversion restores old names, and experts one by one.
    """
    if not tensors:
        return {}
    try:
        revert = import_module("transformers.core_model_loading").revert_weight_conversion
    except (ImportError, AttributeError):
        return tensors
    made: dict[str, _Tensor] = revert(model, dict(tensors))
    return made


def _model_class(transformers: ModuleType, config: Config) -> type | None:
    """The class of a model that a config names.

    No other object of transformers is called by a config.
    """
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    return kind if is_model else None


def _stated_dtype(config: Config) -> str:
    """The dtype of a config, or float32 if torch rejects it."""
    said = config.get("dtype") or config.get("torch_dtype")
    return said if isinstance(said, str) and said in ("bfloat16", "float16", "float64") else "float32"


@frozen
class Loaded:
    """The model's tensor that from_pretrained makes of a folder's tensor.

    is_part: of several, or changed.
    """

    module: str
    is_part: bool = False


@frozen
class ClassTensors:
    """Tensors that a class saves to a folder, by name.

    `tied`: second names; `dropped`: patterns of names that it ignores. A class may read other names, too, such as those
    of earlier releases: `loaded` gives the tensor of the model that a folder's tensor becomes, `places` that of a
    tensor that is saved, and `modules` the shapes of the model's own tensors.
    """

    name: str
    shapes: dict[str, tuple[int, ...]]
    tied: frozenset[str] = frozenset()
    dropped: tuple[str, ...] = ()
    prefix: str = ""  # of the base model: names of a folder may have it, or lack it
    modules: Mapping[str, tuple[int, ...]] = field(factory=dict)
    places: Mapping[str, str] = field(factory=dict)
    loaded: Callable[[str], Loaded] = field(default=Loaded)


def saved_of(config: Config) -> ClassTensors | None:
    """The tensors of the config's class, or None.

    None: the class is of no known family, and transformers cannot make it.
    """
    if (known := _of_family(config)) is not None:
        return known
    if config.get("auto_map") and _custom(config):
        return None
    try:
        model, _ = built_of(config)
        library = _library()
        with offline(), library.silent():
            tensors = library.saved(model, config)  # type: ignore[arg-type]
            tied = library.on_disk(model, library.ties(model))  # type: ignore[arg-type]
            places, loaded = _read_as(model)  # type: ignore[arg-type]
            modules = {name: tuple(t.shape) for name, t in model.state_dict().items()}  # type: ignore[attr-defined]
    except Exception:  # a class raises whatever it likes of a config that it does not expect
        return None
    return ClassTensors(
        type(model).__name__,
        {t.name: t.shape for t in tensors},
        frozenset((*tied, *tied.values())),
        tuple(map(str, getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())),
        str(getattr(model, "base_model_prefix", "") or ""),
        modules,
        places,
        loaded,
    )


def _of_family(config: Config) -> ClassTensors | None:
    """The tensors of a common class, without an import of transformers."""
    shapes = shapes_of(config)
    if shapes is None:
        return None
    is_tied = bool(config.get("tie_word_embeddings"))
    own = {name: shape for name, shape in shapes.items() if name != HEAD or not is_tied}
    tied = frozenset((WORDS, HEAD)) if is_tied else frozenset[str]()
    kind = KINDS[str(config["model_type"])]
    return ClassTensors(kind, own, tied, prefix="model", modules=shapes, places={name: name for name in shapes})


def _read_as(model: _Model) -> tuple[dict[str, str], Callable[[str], Loaded]]:
    """Names of tensors in the model and in files.

    Returns the model's tensors by saved name, and from_pretrained's renaming of a folder's tensors.
    """
    own = model.state_dict(keep_vars=True)
    try:
        loading = import_module("transformers.core_model_loading")
        rename, renaming = loading.rename_source_key, loading.WeightRenaming
        found = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    except (ImportError, AttributeError):  # another release, which renames nothing
        return {}, Loaded
    first = [one for one in found if isinstance(one, renaming)]
    then = [one for one in found if not isinstance(one, renaming)]
    prefix = getattr(model, "base_model_prefix", None)

    def loaded(name: str) -> Loaded:
        module, converter = rename(name, first, then, prefix, own)
        return Loaded(str(module), converter is not None)

    return {disk: name for name, tensor in own.items() for disk in _reverted(model, {name: tensor})}, loaded


def _custom(config: Config) -> bool:
    """Test whether the folder itself contains the class."""
    named, mapped = config.get("architectures"), config.get("auto_map")
    name = named[0] if isinstance(named, list) and named else None
    values = mapped.values() if isinstance(mapped, dict) else ()
    return any(isinstance(value, str) and value.rpartition(".")[2] == name for value in values)
