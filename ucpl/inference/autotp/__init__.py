"""AutoTP's cuts of a model that no checkpoint tells of: what DeepSpeed does with a class of transformers, without DeepSpeed.

A class with a plan of tensor parallelism is cut by that plan (`plans`), any other by what DeepSpeed finds in its layers
(`policies`). Read in deepspeed 0.19.8, runtime/engine.py (`_apply_autotp_partitioning`) and module_inject/; nothing of either
library is imported here but the class itself, on torch's meta device (`inference/hf/networks.py`).
"""

from ucpl.inference.autotp.drawn import Asked, Drawn
from ucpl.inference.autotp.making import cuts_of, dealt

__all__ = ["Asked", "Drawn", "cuts_of", "dealt"]
