"""DeepSpeed's checkpoints: a folder of torch files a step, read and written without DeepSpeed.

`names` knows files and keys, `topology` which ranks wrote them, `order` the orders of parameters. `step` opens a folder: it
sends dense model states, layers and experts to who reads them, and `gathered` makes up the Checkpoint. `writing` lays out
a target.
"""

from ucpl.stores.deepspeed.store import DeepSpeed

__all__ = ["DeepSpeed"]
