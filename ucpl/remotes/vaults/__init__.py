"""Vaults: what jobs keep of their state in memory, protected across failure domains, and how it is read once more.

A vault is a folder for each domain below ROOT/JOB. What a rank saves is the files that its framework would write, end to end
in an *arena* of its own; parity is over arenas; a *generation* counts once every domain has committed it. `view` shows a
generation as a folder of files, whose bytes come from arenas as they are read, and are rebuilt where an arena is lost.

Not here: saving, servers and plans (`ucpl.vault`).
"""
