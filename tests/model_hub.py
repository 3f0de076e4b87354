"""A hub with one model, over real HTTP: what `huggingface_hub` asks when it downloads one, and a branch that moves."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HUB_ID = "somebody/some-model"


class ModelHub:
    """`commits` are the folders of the model's commits; `main` is the commit that its branch is at."""

    def __init__(self, commits: Mapping[str, Path], main: str) -> None:
        self.commits = dict(commits)
        self.main = main
        self.url = ""
        self.refusal: Mapping[str, str] | None = None
        """The headers with which it refuses all requests, as long as it does."""
        self.asked: list[str] = []
        """Methods and paths of the requests so far."""
        self.gives_weights = threading.Event()
        """It begins to answer requests for weights, and goes on only when this is set."""
        self.gives_weights.set()

    def variables(self, cache: Path) -> dict[str, str]:
        """The environment of processes that download from here into `cache`."""
        cached = {"HF_HOME": str(cache), "HF_HUB_CACHE": str(cache / "hub"), "HF_HUB_OFFLINE": "0"}
        return cached | {"HF_ENDPOINT": self.url, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}

    def answer(self, path: str) -> tuple[bytes, dict[str, str]] | None:
        """The body and the headers of the answer to a request; None if there is no such thing."""
        match path.partition("?")[0].removeprefix("/api/models/").removeprefix("/").split("/", 4):
            case [owner, name, "revision", revision] if f"{owner}/{name}" == HUB_ID:
                commit = self.main if revision == "main" else revision
                if commit in self.commits:
                    return json.dumps({"id": HUB_ID, "sha": commit, "siblings": []}).encode(), {}
            case [owner, name, "tree", commit] if f"{owner}/{name}" == HUB_ID and commit in self.commits:
                folder = self.commits[commit]
                files = [(each, each.read_bytes()) for each in sorted(folder.rglob("*")) if each.is_file()]
                listed = [
                    {
                        "type": "file",
                        "path": each.relative_to(folder).as_posix(),
                        "size": len(content),
                        "oid": _digest(content),
                    }
                    for each, content in files
                ]
                return json.dumps(listed).encode(), {}
            case [owner, name, "resolve", commit, file] if f"{owner}/{name}" == HUB_ID and commit in self.commits:
                content = (self.commits[commit] / file).read_bytes()
                return content, {"X-Repo-Commit": commit, "ETag": f'"{_digest(content)}"'}
        return None


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@contextmanager
def model_hub(commits: Mapping[str, Path], main: str) -> Iterator[ModelHub]:
    """A hub that serves on loopback."""
    hub = ModelHub(commits, main)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            found = hub.answer(self.path)
            body, headers = (b"", {}) if found is None else found
            status = HTTPStatus.NOT_FOUND if found is None else HTTPStatus.OK
            if hub.refusal is not None:
                status, body, headers = HTTPStatus.UNAUTHORIZED, b"", dict(hub.refusal)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                if self.path.endswith(".safetensors"):
                    hub.gives_weights.wait()
                with suppress(ConnectionError):
                    self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            hub.gives_weights.set()
            server.shutdown()
