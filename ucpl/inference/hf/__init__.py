"""import hf: a first spec of a transformers model, from its config, its class, or the headers of its files.

Names and shapes are facts: of a folder's safetensors headers where there are any, else of what the class that the config names
would save, made on torch's meta device. What a size *is* (heads, a head's width, experts) is a fact, too: the class is built a
second and a third time of a config with other numbers, and a size has a key's name where it follows the key in all of them.
Where there is no class to ask, a table of well-known names tells, and what neither tells stays a number.

What fused tensors are made of (q, k, v; gate, up) is data in `recipes.py`, taken where the sizes agree.
"""

from ucpl.inference.hf.classes import Class
from ucpl.inference.hf.folding import fold
from ucpl.inference.hf.reading import import_hf
from ucpl.inference.hf.records import Found

__all__ = ["Class", "Found", "fold", "import_hf"]
