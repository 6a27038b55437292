"""The folder of one case.

Runs commands there and keeps their results, without paths and times of this machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

from attrs import define, field

from ucpl.cli import main

ROOT = Path(__file__).parents[2]
DATA = ("--workers", "2", "--memory", "64M")  # of verbs that read or write tensors
RUN = (*DATA, "--reflink", "never")  # of verbs that write a target
TEXTS = ("ucpl/manifest.json", "ucpl/layout.ucpl")  # of a target: texts, or made of texts
DIGITS = 12  # of a digest, in the two files
# Keys of `--json` that differ from run to run, or from machine to machine. `content` has the times of the source's files.
VOLATILE = frozenset({"seconds", "product", "free", "bytes_live_max", "content"})
# Parts of a plan that are sentences, or made of sentences or of the text of specs.
SENTENCES = (
    "passes",
    "derived",
    "dropped",
    "changed",
    "filled",
    "account",
    "layout_text",
    "spec_digest",
    "structure_digest",
)
_CODE = re.compile(r'^(?:error|warning)\[([EW]\d{3})\]|"code": "([EW]\d{3})"', re.MULTILINE)
Stamps = tuple[tuple[str, int, int, int], ...]
_TIMES = (
    (re.compile(r" in [\d.e+-]+ s(, [\d.,e+]+ [KMGT]iB/s)?$", re.MULTILINE), " in TIME"),
    (re.compile(r"(\bbuffers +)[^;\n]* at most$", re.MULTILINE), r"\1ROOM at most"),
    (re.compile(r"; [^;]* are free there"), "; ROOM are free there"),
)


@define
class Place:
    """bytes: a line for each command.

    Exit status, codes, digests of its files. texts: digests of its output.
    """

    here: Path
    bytes: list[str] = field(factory=list)
    texts: list[str] = field(factory=list)
    kept: list[tuple[str, str]] = field(factory=list)  # (a name, the text itself)
    copied: dict[str, tuple[Path, Stamps]] = field(factory=dict)  # copies that are there, and their files

    # ---- actions of a case ----------------------------------------------------------------------------------------------

    def copy(self, source: Path, name: str = "source") -> str:
        """A checkpoint of the tree, under a short name.

        The commands say that name, and no path of this machine.
        """
        there = self.here / name
        if self.copied.get(name) == (source, stamps(there)):
            return name
        if there.exists():
            remove(there)
        if source.is_dir():
            shutil.copytree(source, there, symlinks=True)
        else:
            shutil.copyfile(source, there)
        self.copied[name] = (source, stamps(there))
        return name

    def clear(self) -> None:
        """Delete the files of the case before, except its checkpoint."""
        for path in self.here.iterdir():
            if path.name != "source":
                remove(path)
        self.copied = {name: one for name, one in self.copied.items() if name == "source"}

    def ucpl(self, *argv: object) -> int:
        """Run a command in this process, in this folder.

        Note how it ends.
        """
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main([str(a) for a in argv])
        printed = [self.plain(out.getvalue()), self.plain(err.getvalue())]
        if "--json" in argv and printed[0]:
            printed[0] = pruned_text(printed[0])
        codes = dict.fromkeys(one or other for text in printed for one, other in _CODE.findall(text))
        self.note_bytes(" ".join((str(argv[0]), str(status), *codes)))
        self.note_text(f"{argv[0]}{' --json' * ('--json' in argv)}", *printed)
        return status

    def target(self, name: str) -> None:
        """Note a target.

        Its files belong to the bytes, its manifest and its layout to the texts.
        """
        path = self.here / name
        self.bytes[-1] += f" target={tree_digest(path)}"
        for text in TEXTS:
            if (path / text).is_file():
                said = self.plain((path / text).read_text(encoding="utf-8"))
                self.note_text(text, pruned_text(said) if text.endswith(".json") else said)

    def plan(self, name: str) -> None:
        """Note a .plan file: its moves belong to the bytes."""
        self.bytes[-1] += f" plan={plan_digest((self.here / name).read_bytes())}"

    def tensors_of(self, name: str) -> list[str]:
        """The tensors that a .plan file moves."""
        named: list[str] = parts_of((self.here / name).read_bytes())[0]["tensors"]
        return named

    def file(self, name: str) -> None:
        """Note a file that a verb wrote for people.

        A picture, a page, a .ucpl text.
        """
        self.note_text(name, self.plain((self.here / name).read_text(encoding="utf-8")))

    # ---- how it is kept ------------------------------------------------------------------------------------------------

    def note_bytes(self, line: str) -> None:
        self.bytes.append(line)

    def note_text(self, name: str, *texts: str) -> None:
        self.texts.append(" ".join((name, *(digest(text.encode()) if text else "-" for text in texts))))
        self.kept.extend((name, text) for text in texts if text)

    def plain(self, text: str) -> str:
        """A text without this machine.

        Fixed words for the folder of the case, the tree, times and room.
        """
        for path, word in ((self.here.resolve(), "$HERE"), (self.here, "$HERE"), (ROOT, "$ROOT")):
            text = text.replace(str(path), word)
        for pattern, word in _TIMES:
            text = pattern.sub(word, text)
        return text


def stamps(path: Path) -> Stamps:
    """Name, size, time and inode of each file.

    One of them changes if a file does.
    """
    files = sorted(p for p in path.rglob("*") if not p.is_dir()) if path.is_dir() else [path] * path.exists()
    states = ((file, file.lstat()) for file in files)
    return tuple((str(f), s.st_size, s.st_mtime_ns, s.st_ino) for f, s in states)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGITS]


def tree_digest(path: Path) -> str:
    """SHA-256 over path, size and bytes of every non-text file."""
    found = hashlib.sha256()
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        name = file.relative_to(path).as_posix()
        if name not in TEXTS:
            data = file.read_bytes()
            found.update(f"{name}\0{len(data)}\0".encode())
            found.update(data)
    return found.hexdigest()[:DIGITS]


def plan_digest(data: bytes) -> str:
    """SHA-256 over graph, stored tensors and moves of a .plan file.

    Its sentences and its compression are left out.
    """
    said, packed = parts_of(data)
    said["origins"] = [[name, value] for name, value, _ in said["origins"]]
    kept = {key: value for key, value in said.items() if key not in SENTENCES}
    return digest(json.dumps(kept, sort_keys=True).encode() + zlib.decompress(packed))


def parts_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The line of JSON of a .plan file, and its packed columns."""
    header, _, packed = data.partition(b"\n---\n")[2].partition(b"\n")
    return json.loads(header), packed


def pruned(value: Any) -> Any:
    """A value of JSON without its volatile keys."""
    if isinstance(value, dict):
        return {key: pruned(held) for key, held in value.items() if key not in VOLATILE}
    return [pruned(held) for held in value] if isinstance(value, list) else value


def pruned_text(text: str) -> str:
    """A text of JSON in one form.

    Keys sorted, without the volatile ones.
    """
    return json.dumps(pruned(json.loads(text)), sort_keys=True, ensure_ascii=False, indent=1)
