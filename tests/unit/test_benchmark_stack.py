"""What benchmarks read from a worker's metrics."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

from benchmarks.local import counts

NAME = "baton_prompt_tokens_computed_total"


@contextmanager
def exporting(text: str) -> Iterator[str]:
    """A process's metrics, at an address."""

    class Handler(BaseHTTPRequestHandler):
        paths: ClassVar[list[str]] = []

        def do_GET(self) -> None:
            self.paths.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()
    assert Handler.paths == ["/metrics"]


def test_counters_are_summed_over_labels() -> None:
    text = f'# HELP {NAME} tokens\n{NAME}{{role="a b"}} 3.0\n{NAME}{{role="c"}} 4e2\nbaton_other_total 7\n'
    with exporting(text) as address:
        assert counts(address) == {NAME: 403.0, "baton_other_total": 7.0}
