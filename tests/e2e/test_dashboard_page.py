"""The dashboard in a real browser before real workers: the pools move, a worker drains, and everybody can use it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from chromium import Visit, visit
from playwright.async_api import Browser, Page, Route
from stack import Process, Workers

from common.runtime.checkpoint import DEMO_FOLDER

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIRA = "The code of Mira is 4817. The code of Otto is 2093. What is the code of Mira?"
PATIENT = ("--heartbeat-timeout-s", "5")
"""A browser, its driver and four processes share the machine: nobody is taken for lost who is only slow."""
LAPTOP = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}
ANSWER = ".turn[data-role=assistant]"
NOTE_WHAT_MOVES = """() => {
  window.moved = new Set();
  const all = (selector) => [...document.querySelectorAll(selector)];
  const rates = (role) => all(`#${role}-workers .loads div:last-child dd`);
  const rate = (role) => rates(role).some((each) => !'0–'.includes(each.textContent));
  const conditions = {
    'in flight': () => Number(document.getElementById('figure-in-flight').textContent) > 0,
    'runners': () => all('#decode-workers .runner[data-stage=decode]').length > 6,
    'filled': () => all('#decode-workers .fill').some((bar) => parseFloat(bar.style.width) > 0),
    'prefill rate': () => rate('prefill'),
    'decode rate': () => rate('decode'),
  };
  const look = () => {
    for (const [what, holds] of Object.entries(conditions)) if (holds()) window.moved.add(what);
  };
  const everything = {subtree: true, childList: true, characterData: true, attributes: true};
  new MutationObserver(look).observe(document.body, everything);
}"""
LOOK_EACH_FRAME = """() => {
  window.lengths = [];
  const look = () => {
    const length = document.querySelector('.turn[data-role=assistant] .said')?.textContent.length ?? 0;
    if (length !== window.lengths.at(-1)) window.lengths.push(length);
    requestAnimationFrame(look);
  };
  look();
}"""
COUNT_BATONS = """() => {
  window.batons = 0;
  const count = (changes) => { for (const change of changes) window.batons += change.addedNodes.length; };
  new MutationObserver(count).observe(document.getElementById('batons'), {childList: true});
}"""
NARROW = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """A prefill and two decode workers with the demo model, empty after each test."""
    started = Workers.start(DEMO_FOLDER, prefill=1, decode=2, options=PATIENT)
    yield started
    started.signal()
    started.wait()


@pytest.fixture(scope="module")
def gateway(workers: Workers) -> Iterator[Process]:
    """A gateway that hands every prompt over."""
    options = ("--served-model-name", "demo", "--admin-port", "0", "--local-prefill-tokens", "0", *PATIENT)
    with workers.gateway(*options) as process:
        yield process


@pytest.fixture
def open_page(browser: Browser, gateway: Process, workers: Workers) -> Callable[..., Any]:
    """Open the dashboard; afterwards no worker may hold anything."""

    @asynccontextmanager
    async def opened(**options: Any) -> AsyncIterator[Visit]:
        admin = gateway.fact("admin")
        async with visit(browser, gateway.fact("dashboard"), others=[admin], **options) as seen:
            await seen.live()
            yield seen
        workers.wait_for_baseline()

    return opened


async def end_of_answer(page: Page) -> str:
    await page.wait_for_function(f"() => document.querySelector('{ANSWER} .stats')")
    return (await page.locator(f"{ANSWER} .said").last.text_content()) or ""


async def focused(page: Page) -> str:
    """Id, or name, of what has the focus."""
    name: str = await page.evaluate(
        "((it) => it.id || it.getAttribute('aria-label') || it.tagName)(document.activeElement)"
    )
    return name


async def tab_to(page: Page, name: str) -> None:
    """Press Tab until it has the focus; every element on the way must show that it has."""
    for _ in range(40):
        await page.keyboard.press("Tab")
        if await focused(page) == name:
            return
        outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", await focused(page)
    pytest.fail(f"{name} cannot be reached by Tab")


async def test_a_chat_by_keyboard_alone(open_page: Callable[..., Any]) -> None:
    async with open_page() as seen:
        page = seen.page
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        assert await page.locator(".skip").bounding_box() is not None
        await page.keyboard.press("Enter")
        assert await focused(page) == "prompt"
        await page.keyboard.type(MIRA)
        await page.keyboard.press("Enter")
        assert (await end_of_answer(page)).strip() == "4817"
        assert await focused(page) == "prompt"
        assert "TTFT" in (await page.locator(f"{ANSWER} .stats").text_content() or "")
        await tab_to(page, "send")
        await tab_to(page, "Drain Decode 1")
        await page.keyboard.press("Enter")
        assert await focused(page) == "confirm-cancel"
        await page.keyboard.press("Escape")
        assert await focused(page) == "Drain Decode 1"


async def lengthen(route: Route) -> None:
    """Ask for a long answer, so that there is time to look."""
    body = json.loads(route.request.post_data or "{}")
    await route.continue_(post_data=json.dumps(body | {"min_tokens": 400, "max_tokens": 500}))


async def test_an_answer_streams_in_more_than_one_paint(open_page: Callable[..., Any]) -> None:
    """Over a connection on which it takes seconds: a busy machine may paint once in a while."""
    async with open_page() as seen:
        page = seen.page
        network = await page.context.new_cdp_session(page)
        slow = {"offline": False, "latency": 0, "downloadThroughput": 20_000, "uploadThroughput": -1}
        await network.send("Network.emulateNetworkConditions", slow)
        await page.route("**/v1/chat/completions", lengthen)
        await page.evaluate(LOOK_EACH_FRAME)
        await page.get_by_label("Message").fill(MIRA)
        await page.get_by_role("button", name="Send", exact=True).click()
        text = await end_of_answer(page)
        lengths = await page.evaluate("window.lengths")
        assert lengths == sorted(lengths)
        assert lengths[-1] == len(text)
        assert any(0 < length < len(text) for length in lengths), "all of it came at once"


async def test_the_pools_move(open_page: Callable[..., Any], gateway: Process) -> None:
    async with open_page(viewport=LAPTOP) as seen:
        page = seen.page
        await page.route("**/v1/chat/completions", lengthen)
        await page.evaluate(COUNT_BATONS)
        await page.evaluate(NOTE_WHAT_MOVES)
        await page.wait_for_function("() => document.querySelectorAll('.worker[data-state=serving]').length === 3")
        for role, term in (("prefill", "KV"), ("decode", "KV expected")):
            assert await page.locator(f"#{role}-workers .loads dt").first.text_content() == term
        await page.get_by_role("button", name="Send a burst").click()
        await page.get_by_text("All 24 are done.").wait_for()
        await page.wait_for_function("() => window.batons > 0")
        for what in ("in flight", "runners", "filled", "prefill rate", "decode rate"):
            await page.wait_for_function("(what) => window.moved.has(what)", arg=what)
        await page.wait_for_function("() => document.getElementById('figure-in-flight').textContent === '0'")
        await page.wait_for_function(
            "() => document.querySelectorAll('#ttft-plot .median, #itl-plot .median').length >= 2"
        )
        await page.wait_for_function("() => document.querySelector('#goodput-plot rect')")
        for name in ("ttft", "itl", "goodput"):
            label = await page.locator(f"#{name}-plot").get_attribute("aria-label")
            assert "in the last half minute" in (label or "")
        await page.get_by_text("As a table").click()
        requests = "[...document.querySelectorAll('#table-rows tr')].map((row) => Number(row.cells[1].textContent))"
        await page.wait_for_function(f"() => {requests}.reduce((sum, each) => sum + each, 0) >= 3")
    assert gateway.metric("baton_gateway_handoffs_total") >= 24


DRAW_A_STEADY_LOAD = """async () => {
    const { Plots } = await import(new URL('plots.js', document.querySelector('script[type=module]').src));
    const plots = new Plots();
    plots.summary = { goodput_share: 1, goodput_per_s: 6 };
    const slots = Array(59).fill({ met: 30, finished: 30, refused: 0, failed: 0 });
    return [100, 101, 102].map((current) => {
        plots.recent = { current, slot_s: 5, num_slots: 60 };
        plots.drawGoodput(slots);
        return [...document.querySelectorAll('#goodput-plot rect.met')].map((bar) => bar.getAttribute('height'));
    });
}"""


async def test_bars_of_a_steady_load_are_of_one_height(open_page: Callable[..., Any]) -> None:
    """Whichever of the slots of the newest and of the oldest bar are there."""
    async with open_page() as seen:
        drawn = await seen.page.evaluate(DRAW_A_STEADY_LOAD)
        assert [len(heights) for heights in drawn] == [21, 20, 20]
        assert len({height for heights in drawn for height in heights}) == 1


LAUNCH = """async (events) => {
    const { Relay } = await import(new URL('relay.js', document.querySelector('script[type=module]').src));
    const numbers = [];
    const relay = {
        handoffs: new Map(),
        moving: new Set(),
        workers: { get: (id) => id },
        tracks: { launch: (from, to, number) => numbers.push(`${from} ${to} ${number}`) },
    };
    return events.map((handoffs) => {
        numbers.length = 0;
        Relay.prototype.launchBatons.call(relay, { handoffs, requests: [] });
        return numbers.join();
    });
}"""


async def test_each_handoff_is_one_baton_though_several_events_list_it(open_page: Callable[..., Any]) -> None:
    def handoffs(before: int, count: int) -> list[dict[str, str | int]]:
        return [{"prefill": "p", "decode": "d", "before": before, "count": count}]

    async with open_page() as seen:
        events = [[], handoffs(5, 7), handoffs(5, 7), handoffs(5, 8), handoffs(7, 8), [], handoffs(8, 9)]
        launched = await seen.page.evaluate(LAUNCH, events)
        assert launched == ["", "p d 2", "p d 0", "p d 1", "p d 0", "", "p d 1"]


async def test_who_wants_no_motion_gets_none(open_page: Callable[..., Any]) -> None:
    async with open_page(reduced_motion="reduce") as seen:
        page = seen.page
        await page.evaluate(COUNT_BATONS)
        await page.get_by_role("button", name="Send a burst").click()
        runners = "const all = document.querySelectorAll('#decode-workers .runner')"
        seen_to_run = f"() => {{ {runners}; return all.length > 3 && [all[0].getAnimations().length] }}"
        assert await (await page.wait_for_function(seen_to_run)).json_value() == [0]
        await page.get_by_text("All 24 are done.").wait_for()
        assert await page.evaluate("window.batons") == 0


async def test_a_worker_drains_and_resumes(open_page: Callable[..., Any], workers: Workers, gateway: Process) -> None:
    leaving = next(worker["id"] for worker in gateway.get("/pools")["workers"] if worker["role"] == "decode")
    (process,) = [each for each in workers.decode if each.facts["control"] == leaving]
    async with open_page() as seen:
        page = seen.page
        card = page.locator(".worker", has=page.get_by_text("Decode 1", exact=True))
        drain = page.get_by_role("button", name="Drain Decode 1")
        await drain.click()
        dialog = page.get_by_role("dialog")
        assert "moves to other decode workers" in (await dialog.text_content() or "")
        assert await seen.accessibility() == []
        await dialog.get_by_role("button", name="Cancel").click()
        assert not await dialog.is_visible()
        assert process.get("/ready")["phase"] == "serving"
        await drain.click()
        await dialog.get_by_role("button", name="Drain").click()
        await page.get_by_text("Decode 1 was told to drain.").wait_for()
        await page.wait_for_function(
            "() => document.querySelector('#decode-workers .worker').dataset.state === 'drained'"
        )
        assert process.get("/ready")["phase"] == "drained"
        assert "drained" in (await card.locator(".state").text_content() or "")
        await page.get_by_role("button", name="Drain Decode 2").click()
        assert "the only decode worker" in (await dialog.text_content() or "")
        await page.keyboard.press("Escape")
        await page.get_by_role("button", name="Resume Decode 1").click()
        await page.get_by_text("Decode 1 was told to resume.").wait_for()
        await page.wait_for_function(
            "() => document.querySelector('#decode-workers .worker').dataset.state === 'serving'"
        )
        assert process.get("/ready")["phase"] == "serving"


async def test_a_gateway_without_an_admin_port_offers_no_buttons(browser: Browser, workers: Workers) -> None:
    with workers.gateway("--served-model-name", "demo") as process:
        async with visit(browser, process.fact("dashboard")) as seen:
            page = await seen.live()
            assert await page.get_by_text("Prefill 1", exact=True).is_visible()
            assert await page.get_by_role("button", name="Drain").count() == 0


@pytest.mark.parametrize(
    ("viewport", "colours"),
    [(LAPTOP, "light"), (PHONE, "dark"), ({"width": 320, "height": 640}, "light")],
    ids=["laptop-dark", "phone-dark", "narrow-light"],
)
async def test_it_can_be_read_and_used_by_everybody(
    open_page: Callable[..., Any], viewport: dict[str, int], colours: str
) -> None:
    """Names, roles, order and contrast, by axe-core; and nothing is wider than the screen."""
    async with open_page(viewport=viewport, color_scheme=colours) as seen:
        page = seen.page
        assert await seen.accessibility() == []
        assert await page.evaluate(NARROW)
        await page.get_by_role("button", name="Ask about eight facts").click()
        await end_of_answer(page)
        for summary in ("Settings", "As a table"):
            await page.get_by_text(summary).click()
        assert await seen.accessibility() == []
        assert await page.evaluate(NARROW)
        background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(int(part) for part in background[4:-1].split(",")) < 3 * 128) == (colours == "dark")


async def test_a_worker_that_cannot_be_reached_is_shown_as_lost(
    open_page: Callable[..., Any], workers: Workers
) -> None:
    async with open_page(viewport=LAPTOP) as seen:
        page = seen.page
        lost = page.locator("#prefill-workers .worker[data-state=lost]")
        with workers.prefill[0].frozen():
            await lost.wait_for()
            assert await page.get_by_role("button", name="Drain Prefill 1").count() == 0
            assert await seen.accessibility() == []
        await lost.wait_for(state="detached")
        await page.wait_for_function("() => document.querySelectorAll('.worker[data-state=serving]').length === 3")
