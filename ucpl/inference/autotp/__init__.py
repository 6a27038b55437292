"""AutoTP's cuts of a model of transformers, without an import of DeepSpeed.

No checkpoint has these cuts. If a class has a plan of tensor parallelism, the plan gives the cuts (`plans`); otherwise
its layers do, as in DeepSpeed (`policies`). Source: deepspeed 0.19.8, runtime/engine.py (`_apply_autotp_partitioning`)
and module_inject/. Only the class itself is imported, on torch's meta device (`inference/hf/networks.py`).
"""

from ucpl.inference.autotp.drawn import AutoTPOptions, Drawn
from ucpl.inference.autotp.making import cuts_of, dealt

__all__ = ["AutoTPOptions", "Drawn", "cuts_of", "dealt"]
