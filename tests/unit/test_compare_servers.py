"""Servers of a benchmark: started with the right options, found ready, stopped; small scripts stand in for them."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from benchmarks import servers
from benchmarks.servers import GRPC_OFFSET, ServerFailed, find_binary, free_pair, free_ports

STORE = """#!{python}
import http.server, os, sys
assert os.environ["MINIO_ROOT_USER"] == "tierfsbench", "no user"
assert sys.argv[1] == "server"
host, _, port = sys.argv[sys.argv.index("--address") + 1].rpartition(":")
print("listening on", host, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_PUT(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("ETag", '"x"')
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.HTTPServer((host, int(port)), Handler).serve_forever()
"""
METADATA = """#!{python}
import socket, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
assert sys.argv[sys.argv.index("--bind") + 1] == "127.0.0.1"
with socket.create_server(("127.0.0.1", port)) as server:
    while True:
        connection, _ = server.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b"+PONG\\r\\n")
"""


def program(directory: Path, code: str) -> str:
    path = directory / "program"
    path.write_text(code.replace("{python}", sys.executable))
    path.chmod(0o755)
    return str(path)


def refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_minio_is_started_on_loopback_and_stopped(tmp_path: Path) -> None:
    with servers.minio(program(tmp_path, STORE), tmp_path / "store") as server:
        assert server.name == "MinIO"
        assert server.filer is None
        assert server.endpoint_url == f"http://127.0.0.1:{server.port}"
        assert str(tmp_path / "store" / "data") in server.command
    assert refuses(server.port)


def test_redis_is_started_and_stopped(tmp_path: Path) -> None:
    with servers.redis(program(tmp_path, METADATA), tmp_path / "redis") as url:
        port = int(url.removeprefix("redis://127.0.0.1:").removesuffix("/1"))
        assert not refuses(port)
    assert refuses(port)


def test_a_server_that_does_not_start_says_what_it_printed(tmp_path: Path) -> None:
    broken = program(tmp_path, "#!{python}\nimport sys\nsys.exit('the disk is full')\n")
    with pytest.raises(ServerFailed, match=r"program did not start:\s+the disk is full"):
        with servers.redis(broken, tmp_path / "redis"):
            pass


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="nowhere/minio cannot be started: No such file"):
        with servers.minio(str(tmp_path / "nowhere" / "minio"), tmp_path / "store"):
            pass


def test_a_program_in_a_relative_place_is_found_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "#!{python}\n")
    monkeypatch.chdir(tmp_path.parent)
    assert find_binary("program", [Path(tmp_path.name)]) == str(tmp_path / "program")


def test_programs_are_looked_for_in_the_given_places_first(tmp_path: Path) -> None:
    (tmp_path / "cat").write_text("not executable")
    found = find_binary("cat", [tmp_path])
    assert found is not None
    assert found != str(tmp_path / "cat")
    (tmp_path / "cat").chmod(0o755)
    assert find_binary("cat", [tmp_path]) == str(tmp_path / "cat")
    assert find_binary("no-such-program-anywhere") is None


def test_free_ports_are_different_and_a_pair_is_apart() -> None:
    assert len(set(free_ports(5))) == 5
    low, high = free_pair()
    assert high - low == GRPC_OFFSET
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", low))
        second.bind(("127.0.0.1", high))
