"""Empty libraries of CUDA for builds of torch that ask for them.

The package index has torch for GPUs alone. It starts without a GPU, but not without some 3 GB of libraries. Each call
of these says that there is no device.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

OURS = "libno_cuda.so"
OF_CUDA = re.compile(r"lib(cu|nccl|nv)")
CALLS = re.compile(r"_*(cu|nccl|nv)")
TEXTS = re.compile("String|Name")  # calls that give a text
HEAD = '.text\nempty: .byte 0\n.section .note.GNU-stack,"",@progbits\n.text\n'


def make(lib: Path) -> None:
    """Make one library under all names that torch's files lack."""
    files = [*lib.glob("*.so*"), *lib.parent.glob("_C.*.so")]
    named = {name for file in files for name in re.findall(r"NEEDED.*\[(.*)\]", _said("readelf", "-d", str(file)))}
    absent = {name for name in named if OF_CUDA.match(name)} - {file.name for file in files}
    if not absent:
        return
    calls: dict[str, set[str]] = defaultdict(set)  # by the version of the library that has them
    for file in files:
        for line in _said("nm", "-D", "--undefined-only", str(file)).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if CALLS.match(name):
                calls[version].add(name)
    source, versions = lib / "no_cuda.s", lib / "no_cuda.map"
    source.write_text(HEAD + "".join(map(_call, sorted(set().union(*calls.values())))))
    versions.write_text("".join(f"{v or 'NONE'} {{ global: {'; '.join(sorted(c))}; }};\n" for v, c in calls.items()))
    _said("gcc", "-shared", "-nostdlib", f"-Wl,--version-script={versions}", "-o", str(lib / OURS), str(source))
    for name in absent:
        (lib / name).symlink_to(OURS)


def _call(name: str) -> str:
    """A function that answers with an empty text, or with cudaErrorNoDevice."""
    does = "lea empty(%rip), %rax" if TEXTS.search(name) else "mov $100, %eax"
    return f".globl {name}\n.type {name}, @function\n{name}: {does}\nret\n"


def _said(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
