"""The dashboard's chat in a real browser, with answers from a script: what is shown, kept, stopped and refused."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from chromium import visit
from dashboard_bench import serve_dashboard
from gateway_fixtures import STORY, ScriptedGenerator, byte_level, encode, keyring_of, settings
from playwright.async_api import Browser, Page
from waiting import eventually

from common.contract.errors import Cause
from gateway.serving.generation import GenerationFailed

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANSWER = ".turn[data-role=assistant]"
LOOK_EACH_FRAME = """() => {
  window.lengths = [];
  const look = () => {
    const length = document.querySelector('.turn[data-role=assistant] .said')?.textContent.length ?? 0;
    if (length !== window.lengths.at(-1)) window.lengths.push(length);
    requestAnimationFrame(look);
  };
  look();
}"""


async def say(page: Page, text: str) -> None:
    await page.get_by_label("Message").fill(text)
    await page.get_by_role("button", name="Send", exact=True).click()


async def end_of_answer(page: Page, number: int = 1) -> Any:
    """The answer's element, once it is complete."""
    answer = page.locator(ANSWER).nth(number - 1)
    await page.wait_for_function(f"() => document.querySelectorAll('{ANSWER}:not([data-state])').length === {number}")
    return answer


def asked(generator: ScriptedGenerator, number: int) -> str:
    """The prompt of a generation, in words."""
    text: str = byte_level().decode(list(generator.generations[number].token_ids))
    return text


async def test_an_answer_grows_as_it_comes(browser: Browser) -> None:
    gate = asyncio.Event()
    generator = ScriptedGenerator(text=STORY, num_before=3, gate=gate)
    async with serve_dashboard(generator) as server, visit(browser, server.url) as seen:
        page = await seen.live()
        await page.evaluate(LOOK_EACH_FRAME)
        await say(page, "tell me")
        await page.wait_for_function("() => window.lengths.at(-1) > 0")
        gate.set()
        answer = await end_of_answer(page)
        assert await answer.locator(".said").text_content() == STORY
        lengths = await page.evaluate("window.lengths")
        assert lengths == sorted(lengths)
        assert any(0 < length < len(STORY) for length in lengths), "all of it came at once"
        stats = await answer.locator(".stats").text_content()
        assert "TTFT" in stats
        assert f"{generator.num_deltas} tokens in" in stats
        assert "tokens/s" in stats


async def test_what_the_model_says_is_text(browser: Browser) -> None:
    text = "<img src=x onerror='window.owned=1'><script>window.owned=1</script><b>bold</b> &amp;"
    async with serve_dashboard(ScriptedGenerator(text=text)) as server, visit(browser, server.url) as seen:
        page = await seen.live()
        await say(page, "<b>me too</b>")
        answer = await end_of_answer(page)
        assert await answer.locator(".said").text_content() == text
        assert await page.locator(".turn[data-role=user] .said").text_content() == "<b>me too</b>"
        assert await page.locator(".turn :is(img, script, b)").count() == 0
        assert await page.evaluate("window.owned") is None


async def test_what_the_model_thinks_is_shown_above_its_answer(browser: Browser) -> None:
    """As text, open for as long as there is nothing else, and no part of the conversation."""
    text = "<think>\nHm, <b>what</b> is it?\n</think>\n\nhello"
    num_before = len(encode(text.partition("</think>")[0]))
    generator = ScriptedGenerator(text=text, hang=True, num_before=num_before)
    thinks = dataclasses.replace(settings(), reasoning_parser="think")
    async with serve_dashboard(generator, thinks) as server, visit(browser, server.url) as seen:
        page = await seen.live()
        await say(page, "tell me")
        await generator.hanging.wait()
        thought = page.locator(f"{ANSWER} .thought p")
        await thought.get_by_text("is it?").wait_for()
        assert await seen.accessibility() == []
        await page.get_by_role("button", name="Stop").click()
        answer = await end_of_answer(page)
        assert await answer.locator(".said").text_content() == ""
        stats = await answer.locator(".stats").text_content()
        assert "TTFT" in stats, "its first token is the reader's first, too"
        assert "tokens in" in stats

        await page.get_by_role("button", name="New chat").click()
        generator.hang = False
        await say(page, "tell me")
        answer = await end_of_answer(page)
        assert await thought.text_content() == "Hm, <b>what</b> is it?"
        assert not await thought.is_visible()
        assert await answer.locator(".said").text_content() == "hello"
        assert await page.locator("#answer-live").text_content() == "Answer: hello"
        assert await page.locator(".turn b").count() == 0
        await answer.get_by_text("Reasoning").click()
        assert await thought.is_visible()
        assert await seen.accessibility() == []
        await say(page, "go on")
        await end_of_answer(page, 2)
        assert "assistant: hello\nuser: go on" in asked(generator, 2)


async def test_the_policy_holds(browser: Browser) -> None:
    """A script that gets into the page's text all the same is not run, and nothing is sent to another host."""
    blocked = ("TrustedScript", "Content Security Policy", "Refused to", "violates the following")
    async with serve_dashboard() as server, visit(browser, server.url, expected=blocked) as seen:
        page = await seen.live()
        thrown = await page.evaluate(
            """() => { const script = document.createElement('script');
              try { script.textContent = 'window.owned = 1'; } catch (error) { return error.name; }
              document.body.append(script); return null; }"""
        )
        assert thrown == "TypeError"
        assert (
            await page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', (error) => error.message)") != "sent"
        )
        assert await page.evaluate("window.owned") is None
        assert any("127.0.0.1:9" in text and "connect-src" in text for text in seen.complaints), seen.complaints


async def test_a_conversation_is_kept_in_the_page_and_nowhere_else(browser: Browser) -> None:
    generator = ScriptedGenerator(text="hello there")
    async with serve_dashboard(generator) as server, visit(browser, server.url) as seen:
        page = await seen.live()
        await say(page, "the fox")
        await end_of_answer(page)
        await say(page, "the dog")
        await end_of_answer(page, 2)
        assert asked(generator, 0).split("\n") == ["user: the fox", "assistant:"]
        assert asked(generator, 1).split("\n") == [
            "user: the fox",
            "assistant: hello there",
            "user: the dog",
            "assistant:",
        ]
        assert await page.evaluate("localStorage.length + sessionStorage.length") == 0
        await page.get_by_role("button", name="New chat").click()
        assert await page.locator(".turn").count() == 0
        await say(page, "the end")
        await end_of_answer(page)
        assert asked(generator, 2) == "user: the end\nassistant:"


async def test_stop_ends_the_generation(browser: Browser) -> None:
    generator = ScriptedGenerator(text=STORY, hang=True, num_before=3)
    async with serve_dashboard(generator) as server, visit(browser, server.url) as seen:
        page = await seen.live()
        await say(page, "tell me")
        await generator.hanging.wait()
        stop = page.get_by_role("button", name="Stop")
        await stop.click()
        answer = await end_of_answer(page)
        assert "stopped" in await answer.locator(".stats").text_content()
        assert await answer.locator(".failure").count() == 0
        await asyncio.wait_for(generator.closed_early.wait(), 20)
        await eventually(lambda: generator.num_open == 0)
        assert not await stop.is_visible()
        generator.hang = False
        await say(page, "go on")
        await end_of_answer(page, 2)
        partial = await answer.locator(".said").text_content()
        assert partial
        assert STORY.startswith(partial)
        assert f"assistant: {partial}" in asked(generator, 1)


async def test_escape_stops_too_and_a_new_chat_leaves_nothing_running(browser: Browser) -> None:
    generator = ScriptedGenerator(text=STORY, hang=True, num_before=3)
    async with serve_dashboard(generator) as server, visit(browser, server.url) as seen:
        page = await seen.live()
        for way in ("Escape", "New chat"):
            generator.hanging.clear()
            generator.closed_early.clear()
            await page.get_by_label("Message").fill("tell me")
            await page.keyboard.press("Enter")
            await generator.hanging.wait()
            if way == "Escape":
                await page.keyboard.press("Escape")
            else:
                await page.get_by_role("button", name="New chat").click()
            await asyncio.wait_for(generator.closed_early.wait(), 20)
        assert await page.locator(".turn").count() == 0
        generator.hang = False
        await say(page, "the end")
        await end_of_answer(page)
        assert asked(generator, 2) == "user: the end\nassistant:"


async def test_a_stream_that_breaks_off_shows_why_beside_what_has_come(browser: Browser) -> None:
    failure = GenerationFailed(Cause.WORKER_LOST, "no decode worker has been usable")
    generator = ScriptedGenerator(text=STORY, failure=failure, num_before=4)
    async with serve_dashboard(generator) as server, visit(browser, server.url) as seen:
        page = await seen.live()
        await say(page, "tell me")
        answer = await end_of_answer(page)
        said = await answer.locator(".said").text_content()
        assert said
        assert STORY.startswith(said)
        assert await answer.locator(".failure").text_content() == "no decode worker has been usable (worker_lost)."
        assert await page.get_by_label("Message").input_value() == "tell me", "to be sent again"
        assert await seen.accessibility() == []
        generator.failure = None
        await page.get_by_role("button", name="Send", exact=True).click()
        await end_of_answer(page, 2)
        assert asked(generator, 1).count("tell me") == 1, "what failed is no part of the conversation"


async def test_a_refusal_says_when_to_come_again(browser: Browser) -> None:
    async with (
        serve_dashboard(api_settings=settings(max_in_flight=0)) as server,
        visit(browser, server.url, expected=["429"]) as seen,
    ):
        page = await seen.live()
        await say(page, "tell me")
        answer = await end_of_answer(page)
        assert "Try again in 1 s." in (await answer.locator(".failure").text_content() or "")
        assert "Error: 0 requests are in flight" in (await page.locator("#answer-live").text_content() or "")


async def test_a_gateway_that_asks_for_a_key_gets_it(browser: Browser) -> None:
    async with (
        serve_dashboard(keyring=keyring_of("sesame")) as server,
        visit(browser, server.url, expected=["401"]) as seen,
    ):
        page = seen.page
        await page.locator("#feed[data-state=locked]").wait_for()
        key = page.get_by_label("API key")
        assert await key.is_visible()
        await key.fill("sesame")
        await key.press("Tab")
        await seen.live()
        await say(page, "tell me")
        assert await (await end_of_answer(page)).locator(".said").text_content() == "hello world"
        assert await page.evaluate("[localStorage.length, Object.values(sessionStorage)]") == [0, ["sesame"]]
        await page.reload()
        await seen.live()
        assert "sesame" not in page.url


async def test_the_settings_are_sent(browser: Browser) -> None:
    generator = ScriptedGenerator(text=STORY)
    async with serve_dashboard(generator) as server, visit(browser, server.url) as seen:
        page = await seen.live()
        await page.get_by_text("Settings").click()
        await page.get_by_label("Temperature").fill("0.25")
        await page.get_by_label("Max tokens").fill("3")
        await say(page, "tell me")
        answer = await end_of_answer(page)
        assert "cut at max tokens" in await answer.locator(".stats").text_content()
        sampling = generator.generations[0].sampling
        assert (sampling.temperature, sampling.max_tokens) == (0.25, 3)
        assert generator.generations[0].tier == "interactive"
        await page.get_by_label("Tier").select_option("batch")
        await say(page, "tell me more")
        await end_of_answer(page, 2)
        assert generator.generations[1].tier == "batch"


async def test_a_screen_reader_hears_an_answer_once(browser: Browser) -> None:
    """What it reads aloud changes when the question is sent and when the answer is there, not with each token."""
    generator = ScriptedGenerator(text=STORY, pause_s=0.01)
    async with serve_dashboard(generator) as server, visit(browser, server.url) as seen:
        page = await seen.live()
        await page.evaluate(
            """() => { window.heard = []; const live = document.getElementById('answer-live');
              new MutationObserver(() => window.heard.push(live.textContent)).observe(live, {childList: true}); }"""
        )
        await say(page, "tell me")
        await end_of_answer(page)
        await page.wait_for_function("() => window.heard.length >= 2")
        assert await page.evaluate("window.heard") == ["Waiting for the answer", f"Answer: {STORY}"]
        assert await page.locator("[aria-live] .turn, [role=log]").count() == 0


@pytest.mark.parametrize("width", [390, 1440])
async def test_a_crowd_at_a_worker_stays_in_its_card(browser: Browser, width: int) -> None:
    """However many requests there are, and however long their answers."""
    viewport = {"width": width, "height": 900}
    async with serve_dashboard() as server, visit(browser, server.url, viewport=viewport) as seen:
        page = await seen.live()
        card = page.locator("#decode-workers .worker")
        before = await card.bounding_box()
        for _ in range(80):
            key, _ = await server.bench.request()
            server.bench.tokens("d:1", key, 0, *range(10, 510))
        await page.locator("#decode-workers .track[data-more='+40']").wait_for()
        await page.get_by_text("16 more not drawn").wait_for()
        assert await card.bounding_box() == before
        assert await page.evaluate("document.documentElement.scrollWidth") == width
        assert await seen.accessibility() == []


async def test_a_worker_that_was_restarted_says_so(browser: Browser) -> None:
    async with serve_dashboard() as server, visit(browser, server.url) as seen:
        page = await seen.live()
        decode, prefill = (page.locator(f"#{role}-workers .address") for role in ("decode", "prefill"))
        assert await decode.text_content() == "d:1 · zmq"
        for _ in range(2):
            server.bench.lose("d:1")
            server.bench.open("d:1", restarted=True)
        await page.get_by_text("d:1 · zmq · restarted 2×").wait_for()
        assert await prefill.text_content() == "p:1 · zmq"
        assert await seen.accessibility() == []


async def test_without_prefill_workers_there_is_one_pool(browser: Browser) -> None:
    async with serve_dashboard(prefill=()) as server, visit(browser, server.url) as seen:
        page = await seen.live()
        assert not await page.locator("#prefill-lane").is_visible()
        await page.locator("#decode-workers .worker").wait_for()
        assert await page.locator("#lines path").count() == 0
        await server.bench.request()
        await page.locator("#decode-workers .runner[data-stage=prefill]").wait_for()
        assert await seen.accessibility() == []


async def test_a_single_spike_leaves_the_rest_of_a_plot_readable(browser: Browser) -> None:
    """It is cut off, and said to be."""
    now = 1000.0
    async with serve_dashboard(clock=lambda: now) as server:
        for second in range(200):
            server.metrics.recent.first_token(50.0 if second == 100 else 0.1, now)
            now += 1.0
        async with visit(browser, server.url) as seen:
            page = await seen.live()
            await page.wait_for_function("() => document.querySelector('#ttft-plot .median')")
            words = await page.locator("#ttft-plot text").all_text_contents()
            label = await page.locator("#ttft-plot").get_attribute("aria-label") or ""
        assert words[:2] == ["200 ms", "400 ms"], words
        assert words[-1].startswith("highest ")
        assert "highest 95th percentile" in label
