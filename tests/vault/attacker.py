"""A process without keys that tries to get access.

It uses the standard library alone and runs as another user.

usage: attacker.py USER WHAT ARGUMENTS, the last as a JSON list. Prints one JSON answer.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import ssl
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

QUESTIONS: list[dict[str, object]] = [
    {"op": "names"},
    {"op": "text", "name": "job.json", "stamp": ""},
    {"op": "bytes", "name": "r1.s0", "low": 0, "high": 1 << 20},
    {"op": "hosts"},
    {"op": "lock", "wait": 0, "by": [1 << 61, 1 << 61, 1 << 61]},
    {"op": "commit", "generation": 9, "text": "{}"},
]


def framed(question: object) -> bytes:
    data = json.dumps(question).encode()
    return struct.pack("!Q", len(data)) + data


def answer_of(channel: socket.socket) -> bytes:
    """All received bytes, until the other side ends or is silent."""
    found = b""
    with suppress(OSError):
        while some := channel.recv(1 << 16):
            found += some
    return found


def questions(port: int) -> list[dict[str, object]]:
    seat: dict[str, object] = {"op": "hosts", "at": [["127.0.0.1", 1]] * 3, "seats": [1 << 61] * 3}
    return [{**one, "domain": n} for one in (*QUESTIONS, seat) for n in range(3)]


def plain(port: int) -> list[str]:
    """Questions without TLS, and bytes that are not TLS."""
    found = []
    for data in (*map(framed, questions(port)), b"GET / HTTP/1.0\r\n\r\n", b"\0" * 4096, b"#CHALLENGE#" + b"x" * 20):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as channel:
            channel.sendall(data)
            found.append(answer_of(channel).hex())
    return found


def tls(port: int, keys: str, highest: str) -> list[str]:
    """Questions over TLS with bad credentials.

    The certificate is of another authority or missing, or the TLS version is old ("older").
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if highest == "older":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    if keys:
        context.load_cert_chain(f"{keys}/tls.crt", f"{keys}/tls.key")
    found = []
    for question in questions(port):
        try:
            with (
                socket.create_connection(("127.0.0.1", port), timeout=5) as under,
                context.wrap_socket(under) as channel,
            ):
                channel.sendall(framed(question))
                found.append(answer_of(channel).hex())
        except OSError as error:
            found.append("" if isinstance(error, ssl.SSLError | ConnectionError) else repr(error))
    return found


def slow(port: int, count: int, most_bytes: int = 16_000) -> int:
    """Strangers that send single bytes.

    They end with standard input, or after so many bytes. Prints "closed" at the first connection that was closed.
    Returns the number of those that were closed before the end.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    channels: list[socket.socket] = []
    gone, is_there, is_closed = 0, False, False
    hello = bytes.fromhex("160301400001")  # as TLS begins: a record of 16 KiB
    for _ in range(most_bytes):
        if select.select([sys.stdin], [], [], 0.05)[0]:
            break
        while len(channels) < count:
            channel = socket.create_connection(("127.0.0.1", port), timeout=5)
            channel.setblocking(False)
            channels.append(channel)
        for channel in list(channels):
            try:
                channel.send(hello)
            except BlockingIOError:
                continue
            except OSError:
                gone += 1
                channels.remove(channel)
                channel.close()
        hello = b"\0"
        if not is_there:
            print(json.dumps("there"), flush=True)
            is_there = True
        if gone and not is_closed:
            print(json.dumps("closed"), flush=True)
            is_closed = True
    return gone


def between(port: int, other: int, seconds: float) -> dict[str, Any]:
    """Listen at the port of a dead host, and relay both directions.

    Afterwards send the same bytes again.
    """
    heard: list[bytes] = []
    calls = 0
    end = time.monotonic() + seconds

    def copy(source: socket.socket, target: socket.socket, kept: list[bytes] | None) -> None:
        with suppress(OSError):
            while some := source.recv(1 << 16):
                if kept is not None:
                    kept.append(some)
                target.sendall(some)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(0.1)
        print(json.dumps("there"), flush=True)
        while time.monotonic() < end:
            try:
                caller, _ = listener.accept()
            except OSError:
                continue
            calls += 1
            heard = []
            callee = socket.create_connection(("127.0.0.1", other), timeout=5)
            caller.settimeout(5)
            ways = [(caller, callee, heard), (callee, caller, None)]
            threads = [threading.Thread(target=copy, args=way, daemon=True) for way in ways]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    with socket.create_connection(("127.0.0.1", other), timeout=2) as channel:
        channel.sendall(b"".join(heard))
        replayed = answer_of(channel)
    return {"calls": calls, "replayed": len(replayed), "answered": b"job.json" in replayed}


def local(name: str) -> str:
    """A socket of ranks on this host."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(5)
        channel.connect(f"\0{name}")
        with suppress(OSError):
            channel.sendall(framed({"name": "a", "low": 0, "high": 100}))
        return answer_of(channel).hex()


def files(home: str) -> list[str]:
    """Names that could be listed, read or made below a folder."""
    found = []
    for top in (home, f"{home}/d0", f"{home}/d1"):
        with suppress(OSError):
            found += os.listdir(top)
        for name in ("hosts.json", "job.json", "r0.s0", "server.lock", "commit.1.json"):
            with suppress(OSError):
                found.append(Path(top, name).read_text()[:20])
        with suppress(OSError):
            Path(top, "commit.7.json").write_text("mine")
            found.append("made")
    return found


def swap(place: str, to: str) -> str:
    """Put a link in the place of a folder."""
    os.rename(place, f"{place}.aside")
    os.symlink(to, place)
    return place


def seen(process: int) -> str:
    """All readable files of a process of another user.

    The files behind its descriptors are among them.
    """
    found = b""
    for top, folders, names in os.walk(f"/proc/{process}"):
        folders[:] = [name for name in folders if name not in ("net", "task")]  # of the host; the same again
        for name in (*names, *folders):
            with suppress(OSError), open(Path(top, name), "rb", buffering=0) as file:
                found += file.read(1 << 20) or b""
    return found.hex()


def squat(shared: str, how: str) -> str:
    """Create the folder first.

    It is a folder for everybody, a link to one, one with an existing inner folder, or no folder.
    """
    os.umask(0)
    mine = Path(shared, "mine")
    mine.mkdir(exist_ok=True)
    root = Path(shared, f"root-{how}")
    if how.startswith("no-"):
        kind, at = how.split("-")[1:]
        if at == "job":
            root.mkdir(mode=0o1777)
        place = root / "job" if at == "job" else root
        if kind == "file":
            place.touch()
        elif kind == "pipe":
            os.mkfifo(place, 0o666)
        elif kind == "socket":
            socket.socket(socket.AF_UNIX).bind(str(place))
        elif kind == "name":
            Path(shared, how).touch()
            os.link(Path(shared, how), place)
        else:
            os.symlink(mine / "nothing", place)
    elif how == "link":
        os.symlink(mine, root)
    elif how in ("folder", "closed"):
        root.mkdir(mode=0o777 if how == "folder" else 0o755)
    elif how == "job":
        (root / "job/d0").mkdir(parents=True)
    else:
        root.mkdir()
        os.symlink(mine, root / "job")
    return str(root)


if __name__ == "__main__":
    "a".encode("idna")  # finishes all imports: that user may have no access to the interpreter's folder
    if user := int(sys.argv[1]):
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    print(json.dumps(globals()[sys.argv[2]](*json.loads(sys.argv[3]))), flush=True)
