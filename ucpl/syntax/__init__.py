"""Text of the language to frozen records, and back.

`parse` reads a file, `print_file` writes one, `format_text` tidies one without losing its comments.

Not here: what names mean and whether they are known (layout), what templates give (regions).
"""

from ucpl.syntax.parser import parse, parse_call, parse_expr

__all__ = ["parse", "parse_call", "parse_expr"]
