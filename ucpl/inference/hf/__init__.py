"""import hf: a first spec of a transformers model.

Its sources are the headers of a folder's safetensors files, or else the tensors that the config's class would save,
made on torch's meta device. The meaning of a size (heads, a head's width, experts) is found, too: the class is built
twice more from a config with other numbers, and a size gets a key's name if it follows the key in all builds. Without
the class, a table of common names is used, and sizes that remain unknown stay numbers.

The parts of fused tensors (q, k, v; gate, up) are data in `recipes.py`, used if the sizes agree.
"""

from ucpl.inference.hf.classes import Class
from ucpl.inference.hf.folding import fold
from ucpl.inference.hf.reading import import_hf
from ucpl.inference.hf.records import FoundTensor

__all__ = ["Class", "FoundTensor", "fold", "import_hf"]
