"""Optimizer states of a layout that is drawn: like the weights, or in flat buffers of groups."""

from __future__ import annotations

from collections.abc import Sequence

from ucpl.records import frozen
from ucpl.syntax import nodes
from ucpl.testing.choices import Draw, booleans, integers, sampled

__all__ = ["States"]


@frozen
class States:
    """axis: the mesh axis that cuts flat buffers, of `ways` ranks; None: there are none."""

    draw: Draw
    model: nodes.Model
    axes: Sequence[str]  # of the mesh
    axis: str | None
    ways: int

    def lines(self) -> list[str]:
        return self.flat_states() if self.axis is not None else self.like_states()

    def like_states(self) -> list[str]:
        key = self.draw(sampled(["{key}.{state}", "state/{state}/{key}"]))
        if self.draw(booleans()):
            return ['  state fp32 = like in optim as "fp32/{key}"', f'  state * = like in optim as "{key}"']
        return [f'  state * = like in optim as "{key}"']

    def flat_states(self) -> list[str]:
        groups = self.groups()
        out = [line for _, line in groups]
        names = [n for n, _ in groups]
        spoken = f" of {', '.join(names)}" if names else ""
        where = "".join(f".{{{a}}}" for a in self.axes)
        for state in ("fp32", "*") if self.draw(booleans()) else ("*",):
            pattern, buckets = self.flat()
            key = ("{state}" if state == "*" else state) + "/{bucket}" + where
            out.append(f'  state {state}{spoken} = {pattern} in optim{buckets} as "{key}"')
        return out

    def groups(self) -> list[tuple[str, str]]:
        if any(isinstance(i, nodes.Group) for i in self.model.items):
            order = self.draw(sampled(["", " order reversed", " order dealt 2"]))
            return [("*", f"  group * = model{order}")] if self.draw(booleans()) else []
        return []

    def flat(self) -> tuple[str, str]:
        axis, ways = self.axis, self.ways
        n, grain = self.draw(integers(1, 4)), self.draw(integers(1, 3))
        kind = self.draw(sampled(["", ", undefined"]))
        even = [
            f"flat(pad(each, {ways * grain}{kind})@{axis})",
            f"flat(pad((each), {ways}{kind})@{axis})",
            f"pad(flat(pad(each, {ways})@{axis}), {n})",
        ]
        outer = [
            f"pad(flat(each), {ways * grain}{kind})@{axis}",
            f"flat(each)@chunk({axis}, {grain})",
            f"flat(each)@spread({axis})",
            f"pad(trim(flat(pad(each, {n}))), {ways})@{axis}",
            f"trim(flat(pad(each, {n})))@chunk({axis})",
            f"pad((flat(pad(each, {n}))), {ways})@{axis}",
            f"(pad(flat(each), {ways}{kind}))@{axis}",
            f"pad(pad(flat(each), {ways})@{axis}, {n}{kind})",
            f"trim(pad(flat(pad(each, {n}))@chunk({axis}), {grain}))",
            f"trim((flat(pad(each, {n}))))@chunk({axis})",
        ]
        inner = [
            f"flat(each@chunk({axis}))",
            f"flat(each@spread({axis}))",
            f"pad(flat(pad(each@chunk({axis}), {n})), {grain})",
        ]
        which = self.draw(integers(0, 2))
        pattern = self.draw(sampled((even, outer, inner)[which]))
        buckets = f" buckets {self.draw(integers(1, 40))}" if which < 2 and self.draw(booleans()) else ""
        return pattern, buckets
