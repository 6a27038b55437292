"""A check that each rank's file has its original name.

torch.save names the archive inside a file after the file.
"""

from __future__ import annotations

from pathlib import Path

from ucpl.files.torch_files import TorchFile, read_torch_file
from ucpl.formats.as_written import reject
from ucpl.formats.deepspeed.names import place_in_run


def read_shard(root: Path, name: str) -> TorchFile:
    """The headers of one rank's file.

    Files of ranks have equal keys and shapes. So a file under another rank's name passes for that rank's file, and at
    stage 3 no other check finds it. Files of other kinds have other forms, which readers reject. An archive with a name
    of another kind, such as one that was written to memory, is not checked.

    Raises: UcplError E465 where the file was written as another one, E400-E427.
    """
    file = read_torch_file(root, name)
    written = f"{file.archive}.pt"
    there, here = place_in_run(written), place_in_run(name)
    if there is not None and here is not None and there.kind == here.kind and there.numbers != here.numbers:
        reject(file)
    return file


def read_atom(root: Path, path: Path) -> TorchFile:
    """The headers of one state of a parameter, in the universal format.

    Raises: as `read_shard`, of states.
    """
    file = read_torch_file(root, path.relative_to(root).as_posix())
    if file.archive != path.stem and path.with_name(f"{file.archive}.pt").is_file():
        reject(file)
    return file
