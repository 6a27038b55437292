"""Snapshots in memory that outlive the trainer, protected across failure domains, and restored into any layout.

    writer = ucpl.vault.Vault.at("/dev/shm/ucpl/job").writer(rank)   # in each rank of the job
    writer.save(step, engine)                                        # a copy into memory, and digests

`ucpl vault serve` stands beside the trainer, one for each domain; what is saved is read as `vault:/dev/shm/ucpl/job`, by
every verb that reads a checkpoint. What lies in a vault, and how it is read, is `remotes.vaults`.
"""

from ucpl.vault.making import Vault
from ucpl.vault.writer import Saved, Writer

__all__ = ["Saved", "Vault", "Writer"]
