"""Take pictures of the dashboard while the local stack is under load, for the documentation.

python -m benchmarks.screenshot [--folder docs] [--warm-up 100] [--url http://127.0.0.1:8000]

Needs Playwright (`pip install -e ".[dev]"`) and Debian's `chromium`. Without `--url` it starts a stack of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import aiohttp
from playwright.async_api import Page, async_playwright

from benchmarks.command import call
from benchmarks.local import local_stack

NAMES = ("Mira", "Otto", "Ada", "Boris", "Clara", "Dylan", "Elsa", "Felix", "Greta", "Emil", "Flora", "Gavin")
FACTS = " ".join(f"The code of {name} is {1031 + 613 * index}." for index, name in enumerate(NAMES[:8]))
PICTURES: dict[str, dict[str, Any]] = {
    "dashboard": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"},
    "dashboard-dark": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "dark"},
    "dashboard-phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "has_touch": True},
}
CLIENTS, PAUSE_S = 10, 0.5
"""How many send requests, and how long each waits between them on average: busy on slow and fast machines."""
HOLD_A_BUSY_MOMENT = """() => {
  const runs = [...document.querySelectorAll('.baton')].flatMap((baton) => baton.getAnimations());
  const shares = runs.map((run) => run.effect.getComputedTiming().progress ?? 0);
  if (!shares.some((share) => share > 0.3 && share < 0.7)) return false;
  const seen = (place) => [...document.querySelectorAll(`${place} .runner`)]
    .filter((runner) => runner.getBoundingClientRect().width > 1 && getComputedStyle(runner).opacity > 0.5);
  if (seen('#prefill-workers').length < 1 || seen('#decode-workers').length < 3) return false;
  for (const run of document.getAnimations()) if (run.playState === 'running') run.pause();
  return true;
}"""
"""Freezes the dashboard's animated batons: taking a picture takes longer than a baton's flight."""


@contextmanager
def stack(url: str | None) -> Iterator[str]:
    """A context with the gateway's URL: the given one, or that of a new stack with two workers of each role."""
    if url is not None:
        yield url
        return
    with local_stack(["--prefill", "2", "--decode", "2", "--heartbeat-timeout-s", "10"]) as local:
        yield local.url


async def load(url: str, draw: random.Random) -> None:
    """Send requests of random lengths at random times, until cancelled."""
    async with aiohttp.ClientSession(url) as session:

        async def ask() -> None:
            facts = [
                f"The code of {draw.choice(NAMES)} is {draw.randrange(10000):04d}."
                for _ in range(draw.randrange(40, 150))
            ]
            body = {
                "messages": [{"role": "user", "content": " ".join(facts)}],
                "max_tokens": draw.choice((60, 200, 500, 800)),
                "ignore_eos": True,
                "service_tier": draw.choice(("interactive", "standard")),
            }
            async with session.post("/v1/chat/completions", json=body) as response:
                await response.read()

        async def client() -> None:
            while True:
                await ask()
                await asyncio.sleep(draw.expovariate(1 / PAUSE_S))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(client())


async def take(page: Page, url: str, path: Path) -> None:
    """Chat, wait until the pools are busy, and take the picture."""
    await page.goto(url)
    await page.locator("#feed[data-state=live]").wait_for()
    await page.get_by_label("Message").fill(f"{FACTS} What is the code of Ada?")
    await page.get_by_role("button", name="Send", exact=True).click()
    await page.locator(".turn[data-role=assistant] .stats").wait_for()
    await page.wait_for_function(HOLD_A_BUSY_MOMENT)
    await page.screenshot(path=path, full_page=path.stem.endswith("phone"))
    print(path)


async def shoot(url: str, folder: Path, warm_up_s: float) -> None:
    """Put load on the stack, and take one picture after the other."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium is not installed (apt-get install chromium)")
    loading = asyncio.create_task(load(url, random.Random(7)))
    try:
        await asyncio.sleep(warm_up_s)
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for name, options in PICTURES.items():
                page = await browser.new_page(**options)
                await take(page, url, folder / f"{name}.png")
                await page.close()
            await browser.close()
    finally:
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading


def main(
    *,
    folder: Path = Path("docs"),
    warm_up: Annotated[float, "seconds of load before the first picture"] = 100.0,
    url: Annotated[str | None, "of a gateway that runs already"] = None,
) -> None:
    """Take every picture."""
    with stack(url) as place:
        asyncio.run(shoot(place, folder, warm_up))


if __name__ == "__main__":
    call(main, __doc__)
