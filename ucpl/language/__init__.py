"""Text of the language to frozen records, and back.

`parse` reads a file, `print_file` writes one, `format_text` tidies one without losing its comments, and `upgraded`
gives the text in the newest version of the language.

Not here: the meaning of names, and unknown names (layout), and the results of templates (regions).
"""

from ucpl.language.pages import format_text, print_file, upgraded
from ucpl.language.parser import parse, parse_call, parse_expr
from ucpl.language.printer import print_axis, print_expr, print_item, worded

__all__ = [
    "format_text",
    "parse",
    "parse_call",
    "parse_expr",
    "print_axis",
    "print_expr",
    "print_file",
    "print_item",
    "upgraded",
    "worded",
]
