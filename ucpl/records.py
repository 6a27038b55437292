"""attrs' decorators with one `__repr__` for every record.

attrs writes and compiles one for each class, at import: an eighth of a millisecond for every record of every room that a
verb needs, some 50 ms before it does anything, for texts that only debuggers and failed tests show. Type checkers are
shown attrs itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import AttrsInstance, fields

if TYPE_CHECKING:
    from attrs import define, frozen, mutable
else:
    import attrs

    def _showing(decorate):
        def decorator(cls=None, **options):
            def decorated(plain):
                # attrs keeps the methods that a class defines.
                if "__repr__" not in plain.__dict__ and not issubclass(plain, BaseException):
                    plain.__repr__ = _shown
                return decorate(**options)(plain)

            return decorated if cls is None else decorated(cls)

        return decorator

    frozen = _showing(attrs.frozen)
    define = mutable = _showing(attrs.define)

__all__ = ["define", "frozen", "mutable"]


def _shown(self: AttrsInstance) -> str:
    cls = type(self)
    told = ", ".join(f"{a.name}={getattr(self, a.name)!r}" for a in fields(cls) if a.repr)
    return f"{cls.__qualname__}({told})"
