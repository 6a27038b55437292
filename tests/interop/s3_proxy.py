"""A proxy between an S3 client and server that fails on request.

    python s3_proxy.py PORT UPSTREAM

POST /__faults__ takes a list of rules {"kind", "match", "from", "times"}: of the requests that `match` finds ("PUT
/bucket/key?..."), each rule counts its own from 0, and so many from number `from` on go wrong. Kinds: `503` (not passed
on), `503-after` (passed on, and its answer lost), `cut` (the connection is closed, not passed on), `cut-answer` (passed
on, and closed within the answer), `short` (a body of half the bytes, which says so itself), `slow` (an answer a little
late), `stalled` (none for two minutes), `forbidden` (403). GET /__log__ gives the requests, and empties the log.

A requested range is answered with 206, as in S3: rclone sends 200 with the right Content-Range.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

UPSTREAM = int(sys.argv[2]) if len(sys.argv) > 2 else 0
LOCK = threading.Lock()
RULES: list[dict[str, object]] = []
LOG: list[dict[str, object]] = []
HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.startswith("/__"):
            return self.control(body)
        kind = self.fault()
        entry: dict[str, object] = {"method": self.command, "path": self.path, "sent": len(body), "fault": kind}
        with LOCK:
            LOG.append(entry)
        if kind in ("slow", "stalled"):
            time.sleep(0.3 if kind == "slow" else 120)
        if kind == "cut":
            self.close_connection = True
            return None
        if kind in ("503", "forbidden"):
            code, status = ("AccessDenied", 403) if kind == "forbidden" else ("SlowDown", 503)
            return self.answer(status, [], f"<Error><Code>{code}</Code></Error>".encode(), kind)
        status, headers, data = self.passed_on(body)
        entry |= {"status": status, "got": len(data)}
        if kind == "503-after":
            return self.answer(503, [], b"<Error><Code>InternalError</Code></Error>", kind)
        return self.answer(status, headers, data, kind)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

    def fault(self) -> str | None:
        """The kind of the first rule that says so."""
        kind = None
        with LOCK:
            for rule in RULES:
                if re.search(str(rule["match"]), f"{self.command} {self.path}"):
                    n = rule["count"] = int(str(rule.get("count", -1))) + 1
                    low = int(str(rule["from"]))
                    if kind is None and low <= n < low + int(str(rule["times"])):
                        kind = str(rule["kind"])
        return kind

    def passed_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection("127.0.0.1", UPSTREAM, timeout=60)
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("connection", "content-length"):
                upstream.putheader(name, value)
        upstream.putheader("Content-Length", str(len(body)))
        upstream.endheaders(body)
        found = upstream.getresponse()
        data = found.read()
        headers = [(n, v) for n, v in found.getheaders() if n.lower() not in HOP]
        if self.command == "HEAD":
            headers.append(("Content-Length", found.getheader("Content-Length") or "0"))
        status = 206 if found.status == 200 and found.getheader("Content-Range") else found.status
        upstream.close()
        return status, headers, data

    def answer(self, status: int, headers: list[tuple[str, str]], data: bytes, kind: str | None) -> None:
        if kind == "short":
            data = data[: len(data) // 2]
        has_body = self.command != "HEAD" or status >= 400
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if has_body:
            self.send_header("Content-Length", str(len(data)))
        if kind == "cut-answer":
            self.close_connection = True
            if has_body and data:
                self.end_headers()
                self.wfile.write(data[: len(data) // 2])
            self.connection.shutdown(socket.SHUT_RDWR)  # else no header was sent
            return
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def control(self, body: bytes) -> None:
        with LOCK:
            if self.path == "/__faults__":
                RULES[:] = json.loads(body)
                out = b"{}"
            else:
                out = json.dumps(LOG).encode()
                LOG.clear()
        self.answer(200, [], out, None)

    def log_message(self, *_: object) -> None:
        """Nothing."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Clients that were cut off cut us off."""


if __name__ == "__main__":
    server = Server(("127.0.0.1", int(sys.argv[1])), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
