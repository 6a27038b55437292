"""A class of transformers as records: modules, parameters, plan, and heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import field

from ucpl.records import frozen

__all__ = ["EMBEDDING", "LINEAR", "LIST", "NORM", "Heads", "Module", "Network"]

Shape = tuple[int, ...]
LINEAR, EMBEDDING, NORM, LIST = "linear", "embedding", "norm", "list"  # kinds of modules


@frozen(eq=False)
class Module:
    """One module, under its name in its parent."""

    name: str
    kind: str  # its class and that one's module: "transformers.models.bloom.modeling_bloom.BloomBlock"
    role: str = ""  # LINEAR, EMBEDDING, NORM or LIST, derived classes too
    shapes: Mapping[str, Shape] = field(factory=dict)  # of parameters of its own
    children: tuple[Module, ...] = ()
    is_plain: bool = True  # an embedding that looks rows up and does nothing that a part of the rows would change

    @property
    def class_name(self) -> str:
        return self.kind.rpartition(".")[2]

    @property
    def is_matrix(self) -> bool:
        return len(self.shapes.get("weight", ())) == 2

    def walk(self, path: str = "") -> Iterator[tuple[str, Module]]:
        """(path, module) of all submodules, in order of registration."""
        for child in self.children:
            here = f"{path}.{child.name}" if path else child.name
            yield here, child
            yield from child.walk(here)

    def lines(self, name: str = "") -> Iterator[str]:
        """Names and classes as torch prints a module: one line each."""
        yield f"({name}): {self.class_name}(" if name else f"{self.class_name}("
        for child in self.children:
            yield from child.lines(child.name)


@frozen
class Heads:
    """A config's numbers for attention, each with its key."""

    kv: int = 0  # key-value heads: query heads where it names no others
    kv_key: str = ""
    query: int = 0
    hidden: int = 0


@frozen(eq=False)
class Network:
    """A model as a class makes it of a config."""

    root: Module
    shapes: Mapping[str, Shape]  # of every parameter, by its first name
    owners: Mapping[str, str] = field(factory=dict)  # another name of a parameter -> its first
    plan: Mapping[str, str] = field(factory=dict)  # patterns of modules -> a style, from the config, class and instance
    origins: Mapping[str, str] = field(factory=dict)  # pattern -> its place
    heads: Heads = Heads()
    takes_loss: bool = True  # its loss can be replaced by one of parts of the vocabulary
    inputs: str = ""  # the module of input embeddings

    def owner(self, name: str) -> str:
        return self.owners.get(name, name)
