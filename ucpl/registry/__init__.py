"""Records of formats of checkpoints (`format`), and their list (`entries`).

Formats are in `ucpl.formats`, one folder each, and in other packages. No other room has a format's name in its code.
"""

from ucpl.registry.entries import GROUP, format_named, format_of_layout, format_of_models, formats
from ucpl.registry.format import Format, degree_of

__all__ = ["GROUP", "Format", "degree_of", "format_named", "format_of_layout", "format_of_models", "formats"]
