"""DeepSpeed's checkpoints: a folder of torch files a step, read and written without DeepSpeed.

`names` knows files and keys, `order` the orders of parameters, `reading` opens a folder, `writing` lays out a target.
"""

from ucpl.stores.deepspeed.store import DeepSpeed

__all__ = ["DeepSpeed"]
