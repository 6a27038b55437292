"""Names and integers: expressions evaluated lazily, in any order of statements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from attrs import evolve, field

from ucpl.errors import Diagnostic, Label, UcplError, fail
from ucpl.language import nodes, print_expr, worded
from ucpl.language.walk import walk
from ucpl.layout.arithmetic import NUMBER_LIMIT, NotWhole, Value, at, bounded, evaluated, integer, meant_number
from ucpl.layout.name_remedies import for_name, nearest
from ucpl.records import define, frozen
from ucpl.texts import Json

__all__ = ["NUMBER_LIMIT", "Config", "Scope", "UnknownNumber", "Value", "at", "literal"]

Config = Mapping[str, Json]  # a Hugging Face config.json

_CONFIGS = ("cfg", "conf", "self.config", "model_config", "model.config", "hparams", "args", "self.cfg", "hf_config")
STEPS_LIMIT = 1_000_000  # evaluations within the definitions of one file before they count as runaway
NESTING_LIMIT = 100


@frozen
class UnknownNumber:
    """Name of an E101: no number has it."""

    name: str


@define
class Scope:
    """Names known at one place.

    `given` wins over `bindings` (the command line's -D), both over `config`.
    """

    given: dict[str, Value] = field(factory=dict)
    bindings: dict[str, nodes.Expr] = field(factory=dict)
    config: Config = field(factory=dict)
    values: dict[str, Value] = field(factory=dict)  # of bindings, as they were found
    places: dict[str, Label] = field(factory=dict)  # origins of given values
    mesh_axes: tuple[str, ...] = ()  # of the layout, as far as they are known yet
    pending: list[str] = field(factory=list)
    steps: int = 0

    def knows(self, name: str) -> bool:
        return name in self.given or name in self.values or name in self.bindings

    def names(self) -> list[str]:
        return [*self.given, *self.values, *self.bindings]

    def bind(self, items: Iterable[nodes.Record]) -> None:
        """Bind the names of `let` and `dim` statements; the last definition wins."""
        for item in items:
            if isinstance(item, nodes.Let | nodes.Dims):
                for binding in item.bindings:
                    self.bindings[binding.name] = binding.value
                    self.values.pop(binding.name, None)

    def lookup(self, name: str, span: nodes.Span) -> Value:
        """Value of a name.

        Raises E101 for an unknown one, E102 for one that is defined in a circle.
        """
        if name in self.given:
            return self.given[name]
        if name in self.values:
            return self.values[name]
        if name in self.bindings:
            return self._bound(name, span)
        head, _, rest = name.partition(".")
        if head == "config":
            return self._config(rest)
        if name.endswith(".size") and self.knows(name[: -len(".size")]):
            return self.lookup(name[: -len(".size")], span)
        fail(
            "E101",
            f"no number is called `{name}`",
            at(span, "used here"),
            remedy=_absent_word(name)
            or self._instead(name)
            or self._key(name)
            or for_name(name, self.names(), _define(name)),
            about=UnknownNumber(name),
        )

    def _instead(self, name: str) -> str:
        """Remedy for a part of a number, as in `ks.length`."""
        head, _, rest = name.rpartition(".")
        said = self.bindings.get(head)
        if said is None:
            return ""
        if rest in ("length", "len", "size"):
            return f"the number of items is length({head})"
        if isinstance(said, nodes.Name) and not self.knows(said.path):
            return f"`{head}` is `{said.path}`, which nothing defines; a section of the config: let {head} = config.{said.path}"
        return (
            f"`{head}` is {print_expr(said)}: only sections of the config have parts, as in let t = config.text_config"
        )

    def _key(self, name: str) -> str:
        """Remedy for a key of the config without `config.` before it."""
        head, _, last = name.rpartition(".")
        key = last if head in _CONFIGS else name
        known = self._config(key) is not None if self.config else head in _CONFIGS
        return f"a key of the config comes after `config.`: write `config.{key}`" if known else ""

    def _bound(self, name: str, span: nodes.Span) -> Value:
        if name in self.pending:
            cycle = " -> ".join([*self.pending[self.pending.index(name) :], name])
            fail("E102", f"`{name}` is defined in a circle: {cycle}", at(span, "needed here"))
        if len(self.pending) > NESTING_LIMIT:
            fail("E103", "definitions are nested too deep", at(span))
        self.pending.append(name)
        try:
            value = self.evaluate(self.bindings[name])
        except RecursionError:  # deep expressions in each of many definitions
            fail("E103", "definitions are nested too deep", at(span))
        finally:
            self.pending.pop()
        self.values[name] = value
        return value

    def _config(self, path: str) -> Value:
        node: Json = cast(Json, self.config)
        for step in path.split("."):
            if not isinstance(node, dict) or step not in node:
                return None
            node = node[step]
        if isinstance(node, bool):
            return int(node)
        return cast(Value, node) if node is None or isinstance(node, int | str | float | list) else None

    def evaluate(self, expr: nodes.Expr) -> Value:
        """Value of an expression: integers, words, or lists of them.

        None is a config key that is absent.
        """
        self._step(expr.span)
        try:
            return cast(Value, evaluated(expr, self._look))
        except UcplError as error:
            if error.diagnostics[0].code == "E105":
                self._reject_absent(expr)
            raise self._at_definition(expr, error) from None

    def integer(self, expr: nodes.Expr) -> int:
        """Value of an expression that must be an integer. Raises E104 otherwise."""
        self._step(expr.span)
        try:
            return cast(int, integer(expr, self._look))
        except UcplError as error:
            if error.diagnostics[0].code == "E105":
                self._reject_absent(expr)
            raise self._at_definition(expr, error) from None

    def labels_at(self, name: str, here: Label) -> tuple[Label, ...]:
        """Places of a name's value and of its use.

        Only the latter if both are one.
        """
        found, seen = None, set[str]()
        while name not in seen:
            seen.add(name)
            if name in self.given:
                found = self.places.get(name, found)
            elif name in self.bindings and self.bindings[name].span.line:
                value = self.bindings[name]
                found = at(value.span)
                name = value.path if isinstance(value, nodes.Name) else name
        return (here,) if found is None else (found, evolve(here, text=here.text or "needed here"))

    def _at_definition(self, expr: nodes.Expr, error: UcplError) -> UcplError:
        """Move an error to the definition that is no integer."""
        found = error.diagnostics[0]
        names = (n for n in walk(expr) if isinstance(n, nodes.Name) and (at(n.span),) == found.labels)
        name = next(names, None)
        if name is None or not isinstance(found.about, NotWhole):
            return error
        text = f"a whole number is needed, not {found.about.value!r}"
        labels = self.labels_at(name.path, found.labels[0])
        return UcplError(evolve(found, message=text, labels=labels, remedy=self._of_whole(name.path, found)))

    def _of_whole(self, name: str, found: Diagnostic) -> str:
        """Remedy for a name whose value is no integer.

        It depends on the origin of the value.
        """
        value = found.about.value if isinstance(found.about, NotWhole) else None
        if name in self.given and name in self.places and self.places[name].line is None:  # no text says it
            return f"give a whole number: -D {name}=4"
        said = self.bindings.get(name)
        if isinstance(said, nodes.Name) and said.path.startswith("config."):
            return _of_key(said.path, name, value)
        if isinstance(said, nodes.List) or (said is not None and isinstance(value, list)):
            sizes = print_expr(said)
            line = worded(said.span, f"{name} = {sizes} by NAME", f"{name}[NAME] = {sizes}")
            return f"a dim with a size for each index of another names that one: dim {line}"
        return found.remedy

    def holds(self, condition: nodes.Expr | None) -> bool:
        """True if the condition of a statement holds."""
        return condition is None or bool(self.evaluate(condition))

    def size(self, name: str, span: nodes.Span = nodes.NOWHERE) -> int:
        """The number that a name means."""
        return self.integer(nodes.Name(name, span=span))

    def _look(self, name: nodes.Name) -> Value:
        self._step(name.span)
        value = self.lookup(name.path, name.span)
        return cast(int, bounded(value, name.span)) if isinstance(value, int) else value

    def _step(self, span: nodes.Span) -> None:
        self.steps += bool(self.pending)  # questions to statements grow with the text: 200,000 tensors may be listed
        if self.steps > STEPS_LIMIT:
            fail("E103", "expressions of this file take too many steps", at(span))

    def _reject_absent(self, expr: nodes.Expr) -> None:
        """Name the absent key of the config that a number needs.

        The key that may be meant is named, too.
        """
        found = self._absent(expr, "", 0)
        if found is None:
            return
        key, owner = found
        size = f", or the size: -D {owner}=..." if owner else ""
        if not self.config:
            fail(
                "E105",
                f"`{key.path}` has no value: there is no config",
                at(key.span, "asked for here"),
                remedy=f"give the model's config: --config config.json{size}",
            )
        *steps, last = key.path.split(".")[1:]
        node = self.config
        for step in steps:
            inner = node.get(step)
            node = inner if isinstance(inner, dict) else {}
        section = node.get(last)
        if isinstance(section, dict):
            fail(
                "E105",
                f"`{key.path}` is a section of the config, and has no value of its own",
                at(key.span, "asked for here"),
                remedy=_of_section(self.bindings.get(owner, expr), key.path, [*section], owner),
            )
        close = nearest(last, node) or _with_words(last, node)
        path = ".".join(["config", *steps, close or ""])
        joined = nearest("_".join([*steps, last]), self.config) if steps and not node else None
        if joined:
            path, close = f"config.{joined}", joined
        inside = [] if close or last in node else [last] * (last in self.config) or _under(self.config, last)
        if len(inside) == 1:
            path, close = f"config.{inside[0]}", inside[0]
        fail(
            "E105",
            f"`{key.path}` has no value in the config" if last in node else f"the config has no key `{key.path[7:]}`",
            at(key.span, "asked for here"),
            remedy=f"did you mean `{path}`?"
            if path != key.path and (close or inside)
            else f"give a fallback: default({key.path}, ...){size}; or another config",
        )

    def _absent(self, expr: nodes.Expr, owner: str, depth: int) -> tuple[nodes.Name, str] | None:
        """First absent key of the config in an expression, and its binding."""
        match expr:
            case nodes.Name(path=path) if path in self.bindings and path not in self.given and depth < NESTING_LIMIT:
                return self._absent(self.bindings[path], path, depth + 1)
            case nodes.Name(path=path) if path.startswith("config.") and self._config(path[len("config.") :]) is None:
                return expr, owner
            case nodes.Unary(operator="-", operand=operand):
                return self._absent(operand, owner, depth)
            case nodes.Binary(left=left, right=right):
                return self._absent(left, owner, depth) or self._absent(right, owner, depth)
            case nodes.Function(args=args) | nodes.List(items=args):
                return next((f for a in args if (f := self._absent(a, owner, depth)) is not None), None)
            case _:
                return None

    # ---- values that a model's config leaves out ------------------------------------------------------------

    def value(self, name: str) -> Value:
        """Value of a binding; None if this model's config lacks it."""
        expr = self.bindings.get(name)
        if expr is not None and name not in self.given and self.lacks_config(expr):
            return None
        return self.lookup(name, nodes.NOWHERE)

    def lacks_config(self, expr: nodes.Expr, chain: tuple[str, ...] = ()) -> bool:
        """True if an expression needs an absent config key, outside default(...)."""
        match expr:
            case nodes.Name(path=path):
                if path.startswith("config.") or not self.knows(path):
                    return self.lookup(path, expr.span) is None
                inner = self.bindings.get(path)
                if inner is None or path in self.given or path in chain or len(chain) > NESTING_LIMIT:
                    return False  # a circle is refused where its value is asked for
                try:
                    return self.lacks_config(inner, (*chain, path))
                except RecursionError:
                    return False  # refused there, too
            case nodes.Function(name="default"):
                return False
            case nodes.Function(args=args) | nodes.List(items=args):
                return any(self.lacks_config(a, chain) for a in args)
            case nodes.Unary(operator="-", operand=operand):
                return self.lacks_config(operand, chain)
            case nodes.Binary(operator=("and" | "or" | "==" | "!=")):
                return False
            case nodes.Binary(left=left, right=right):
                return self.lacks_config(left, chain) or self.lacks_config(right, chain)
            case _:
                return False


def _with_words(name: str, keys: Iterable[str]) -> str | None:
    """The only key with all words: `num_hidden_layers` of `num_layers`."""
    found = [key for key in keys if {*name.split("_")} <= {*key.split("_")}]
    return found[0] if len(found) == 1 else None


def _absent_word(name: str) -> str:
    """Remedy for `x != none`: the language has no word for an absent value."""
    if name in ("first", "last"):
        return f"the first of several is 0 and the last -1, as in pp[{'0' if name == 'first' else '-1'}]"
    if name != "none":
        return ""
    return "an absent key has no value: a condition is `config.x` if it is there, and `not config.x` if it is absent"


def _of_key(key: str, name: str, value: object) -> str:
    """Remedy for a key of the config whose value is no integer."""
    number = meant_number(value)
    if number is not None:
        return f"write {number} in the config, without quotes or a point; or give -D {name}={number}"
    if isinstance(value, list):
        return f"name a key that has a whole number; how many items `{key}` has is length({key})"
    return f"`{key}` is {value!r}: name a key of the config that has a whole number"


def _of_section(expr: nodes.Expr, key: str, keys: list[str], owner: str) -> str:
    """Remedy for a section of the config as a value."""
    if any(isinstance(n, nodes.Function) and n.name == "length" for n in walk(expr)):
        given = f": -D {owner}={len(keys)}" if owner else ""
        return f"`length` is of a list. A dim without a line has its size from the shapes of the checkpoint, or give it{given}"
    return f"name a key of it: {', '.join(f'{key}.{one}' for one in keys[:2])}"


def literal(value: Value) -> nodes.Expr:
    """A value as it is written."""
    if isinstance(value, str):
        return nodes.Text(value)
    if isinstance(value, list):
        return nodes.List(tuple(map(literal, value)))
    return nodes.Number(int(value or 0))


def _under(config: Mapping[str, object], key: str, depth: int = 3) -> list[str]:
    """Place of a key inside of others of a config, as `text_config.hidden_size`."""
    found = []
    for name, value in config.items():
        if isinstance(value, dict) and depth:
            found += [f"{name}.{key}"] if key in value else []
            found += [f"{name}.{one}" for one in _under(value, key, depth - 1)]
    return found


def _define(name: str) -> str:
    """Remedy for a number without a value.

    A name with a dot is of a model that is used, and no `let` has one.
    """
    if name == "size":
        return "a size is asked by a name: `size(_)` of the dim that is meant, `size(tp)` of a mesh axis"
    if "." not in name:
        return f"define it with `let {name} = ...` or give it with -D {name}=..."
    return (
        f"numbers of the model or layout used as `{name.partition('.')[0]}` are not known in arguments of `use`:"
        f" write the number, a `let` or a parameter of this layout, or give it with -D {name}=..."
    )
