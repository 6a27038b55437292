"""Archives of small checkpoints, as each release wrote them.

They have digests of the run's own values.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import torch

from tests.releases.environments import ROOT, Release

FOLDER = ROOT / "tests" / "fixtures" / "releases"
TRUTH = "truth.json"
LEFT = {".py"}  # recovery scripts, the framework's own code
States = dict[str, dict[str, str | float]]


def archive(release: Release) -> Path:
    return FOLDER / f"{str(release).replace(' ', '-')}.tar.xz"


def digest(tensor: torch.Tensor) -> str:
    """A short digest of a tensor's type, shape and bytes."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    raw = flat.view(torch.uint8).numpy().tobytes()
    told = f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + raw
    return hashlib.sha256(told).hexdigest()[:16]


def stated(params: dict[str, dict[str, Any]]) -> States:
    """Digests of all tensors of the parameters, and their steps."""
    out: States = {}
    for name, states in params.items():
        out[name] = {k: digest(v) for k, v in states.items() if torch.is_tensor(v) and v.ndim}
        if "step" in states:
            out[name]["step"] = float(states["step"])
    return out


def keep(release: Release, work: Path, sources: list[str]) -> None:
    """Write the archive of a release from the folder of its trials."""
    truths = {}
    sources = [name for name in sources if (work / f"{name}.truth").exists()]
    if not sources:
        return
    FOLDER.mkdir(exist_ok=True)
    with tarfile.open(archive(release), "w:xz", preset=9) as tar:
        for name in sources:
            truth = torch.load(work / f"{name}.truth", weights_only=False)
            truths[name] = stated(truth.get("params", truth))
            top = work / name
            for file in sorted(f for f in (top, *top.rglob("*")) if f.is_file() and f.suffix not in LEFT):
                _add(tar, str(file.relative_to(work)), file.read_bytes())
        _add(tar, TRUTH, json.dumps(truths, sort_keys=True).encode())


def _add(tar: tarfile.TarFile, name: str, held: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(held)
    tar.addfile(info, io.BytesIO(held))


def unpacked(path: Path, folder: Path) -> dict[str, States]:
    """The truths of the checkpoints, which are then in the folder."""
    with tarfile.open(path) as tar:
        tar.extractall(folder, filter="data")
    found: dict[str, States] = json.loads((folder / TRUTH).read_text())
    return found
