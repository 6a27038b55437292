"""Vaults: the files of in-memory snapshots, and reading them.

A vault has one folder per domain below ROOT/JOB. Each rank saves the files that its framework would write, end to end
in its *arena*. Parity is computed over arenas. A *generation* is committed after every domain has committed it.
`snapshot_folder` presents a generation as a folder of files. Their bytes are read from the arenas on demand, and
rebuilt if an arena is lost.

Not here: saving, servers and plans (`ucpl.vault`).
"""
