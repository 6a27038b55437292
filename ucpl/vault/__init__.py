"""In-memory snapshots that survive the trainer.

They can be restored into any layout.

    writer = ucpl.vault.Vault.at("/dev/shm/ucpl/job").writer(rank)   # in each rank of the job
    writer.save(step, engine)                                        # copies the state into memory and digests it

One `ucpl vault serve` per failure domain runs next to the trainer. Every verb that reads a checkpoint reads a snapshot
as `vault:/dev/shm/ucpl/job`. `storage.vaults` defines the files of a vault and reads them.
"""

from ucpl.vault.create import Vault
from ucpl.vault.writer import Saved, Writer

__all__ = ["Saved", "Vault", "Writer"]
