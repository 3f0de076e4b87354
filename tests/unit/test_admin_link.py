"""Which pages are told of the admin port."""

from __future__ import annotations

import pytest

from gateway.dashboard.admin_link import AdminLink


@pytest.mark.parametrize(
    ("bound", "host_header", "origin"),
    [
        ("127.0.0.1", "localhost:8000", "http://localhost:9000"),
        ("127.0.0.1", "127.0.0.1:8000", "http://127.0.0.1:9000"),
        ("localhost", "127.0.0.1", "http://127.0.0.1:9000"),
        ("0.0.0.0", "10.1.2.3:80", "http://10.1.2.3:9000"),
        ("10.1.2.3", "10.1.2.3:80", "http://10.1.2.3:9000"),
        ("127.0.0.1", "10.1.2.3:80", None),
        ("10.1.2.3", "localhost:80", None),
        ("0.0.0.0", "baton.example", None),
        ("0.0.0.0", "localhost.example", None),
        ("0.0.0.0", "[::1]:8000", None),
        ("0.0.0.0", "999.1.1.1", None),
        ("0.0.0.0", "", None),
        ("0.0.0.0", "localhost; script-src *", None),
        ("0.0.0.0", "localhost:8000\n", None),
    ],
)
def test_a_page_is_told_where_it_can_reach_the_port(bound: str, host_header: str, origin: str | None) -> None:
    assert AdminLink(bound, 9000).origin(host_header) == origin
