"""A real browser for tests: Debian's Chromium, driven by Playwright, with everything that a page complains of."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from axe_playwright_python.async_playwright import Axe
from needs import require
from playwright.async_api import Browser, Page, async_playwright

_PATIENCE_MS = 60_000
"""That a page may take for anything: the machine may be busy."""


def executable() -> str:
    """Where Chromium is: `$CHROMIUM`, or on the path."""
    require("chromium")
    found = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    assert found is not None
    return found


@asynccontextmanager
async def launched() -> AsyncIterator[Browser]:
    """A browser of its own, ended afterwards."""
    path = executable()
    async with async_playwright() as playwright:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # root cannot have one
        browser = await playwright.chromium.launch(executable_path=path, args=sandbox)
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Visit:
    """A page that is open, and what should not have happened there."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    """Errors of scripts, violations of the policy, requests to other hosts."""

    async def live(self) -> Page:
        """The page, once it has shown the pools."""
        await self.page.locator("#feed[data-state=live]").wait_for()
        return self.page

    async def accessibility(self) -> list[str]:
        """What axe-core has against the page as it is now, rule by rule."""
        results = await Axe().run(self.page)
        return [
            f"{violation['id']}: {node['html']} {node['any'][0]['message'] if node['any'] else ''}"
            for violation in results.response["violations"]
            for node in violation["nodes"]
        ]


@asynccontextmanager
async def visit(
    browser: Browser, url: str, *, expected: Sequence[str] = (), others: Sequence[str] = (), **options: Any
) -> AsyncIterator[Visit]:
    """Open `url` in a fresh context with `options`; nothing may have been complained of in the end, but what matches
    one of `expected`. `others` are further origins that the page may send requests to."""
    context = await browser.new_context(**options)
    context.set_default_timeout(_PATIENCE_MS)
    seen = Visit(await context.new_page())
    here = {_origin(url), *others}

    def on_request(request: Any) -> None:
        if _origin(request.url) not in here:
            seen.complaints.append(f"a request to {request.url}")

    context.on("request", on_request)
    seen.page.on("pageerror", lambda error: seen.complaints.append(f"page error: {error}"))
    seen.page.on(
        "console",
        lambda message: (
            seen.complaints.append(f"{message.type}: {message.text}") if message.type in ("error", "warning") else None
        ),
    )
    try:
        await seen.page.goto(url)
        yield seen
    finally:
        await context.close()
    left = [text for text in seen.complaints if not any(re.search(each, text) for each in expected)]
    assert not left, left


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
