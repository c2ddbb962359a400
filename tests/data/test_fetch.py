"""Downloads against a server on loopback: whole, resumed, damaged, absent."""

import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from paceline.data.fetch import RemoteFile, fetch
from paceline.errors import MissingError

CONTENT = bytes(range(256)) * 5000
DIGEST = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


class Publisher(BaseHTTPRequestHandler):
    """Serves CONTENT with ranges; `/broken` ends early each time; `/whole` knows no ranges."""

    ranges: list[str | None]

    def do_GET(self):
        asked = self.headers.get("Range")
        self.ranges.append(asked)
        if self.path == "/absent":
            self.send_error(404)
            return
        start = int(re.search(r"\d+", asked)[0]) if asked and self.path != "/whole" else 0
        if start >= len(CONTENT):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        end = start + 500_000 if self.path == "/broken" else len(CONTENT)
        self.wfile.write(CONTENT[start:end])

    def log_message(self, *_):
        """Tests keep quiet."""


@pytest.fixture
def publisher():
    """Address of a running server, and the ranges it was asked for."""
    ranges: list[str | None] = []
    handler = type("Handler", (Publisher,), {"ranges": ranges})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", ranges
        finally:
            server.shutdown()
            thread.join()


def remote(*urls: str, digest: str | None = DIGEST) -> RemoteFile:
    return RemoteFile(name="set.bin", urls=urls, digest=digest)


def test_a_file_is_fetched_once(publisher, tmp_path):
    address, ranges = publisher
    for _ in range(2):
        assert fetch(remote(f"{address}/file"), tmp_path).read_bytes() == CONTENT
    assert ranges == [None]
    assert [path.name for path in tmp_path.iterdir()] == ["set.bin"]


def test_a_broken_download_goes_on_where_it_ended(publisher, tmp_path):
    address, ranges = publisher
    assert fetch(remote(f"{address}/broken"), tmp_path).read_bytes() == CONTENT
    assert ranges == [None, "bytes=500000-", "bytes=1000000-"]


@pytest.mark.parametrize("have", [10, len(CONTENT)])
def test_an_earlier_part_is_used(publisher, tmp_path, have):
    address, ranges = publisher
    (tmp_path / "set.bin.part").write_bytes(CONTENT[:have])
    assert fetch(remote(f"{address}/file"), tmp_path).read_bytes() == CONTENT
    assert ranges == [f"bytes={have}-"]


def test_a_server_without_ranges_starts_over(publisher, tmp_path):
    address, _ = publisher
    (tmp_path / "set.bin.part").write_bytes(b"old")
    assert fetch(remote(f"{address}/whole"), tmp_path).read_bytes() == CONTENT


def test_the_next_address_is_tried(publisher, tmp_path):
    address, _ = publisher
    assert fetch(remote(f"{address}/absent", f"{address}/file"), tmp_path).exists()


def test_a_damaged_file_is_refused_and_deleted(publisher, tmp_path):
    address, _ = publisher
    with pytest.raises(MissingError, match="arrived damaged"):
        fetch(remote(f"{address}/file", digest="md5:" + 32 * "0"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_network_names_the_file_and_its_place(publisher, tmp_path):
    address, _ = publisher
    closed = "http://127.0.0.1:9/set.bin"  # the discard port: nobody listens
    with pytest.raises(MissingError) as caught:
        fetch(remote(closed, f"{address}/absent"), tmp_path, timeout_seconds=5)
    assert closed in str(caught.value)
    assert str(tmp_path / "set.bin") in str(caught.value)
    assert list(tmp_path.iterdir()) == []
