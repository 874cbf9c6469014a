"""The page in headless Chromium: a document is dropped, asked about and answered. Needs Playwright and Chromium."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from cli_helpers import make_model
from server_helpers import held_steps, listening
from waiting import eventually

from nanovllm.apps.server.async_llm import AsyncLLM

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'nanovllm[server-test]'")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]
OFFLOADED = {
    "device": "cpu",
    "enable_cpu_offload": True,
    "kvcache_block_size": 16,
    "num_gpu_blocks": 6,
    "num_cpu_blocks": 80,
    "max_num_batched_tokens": 32,
}
DOCUMENT = "The label on the bottle says DRINK ME. " * 10
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'><b>bold</b> & done"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    with AsyncLLM(make_model(tmp_path_factory.mktemp("model"), layers=4), **OFFLOADED) as engine:
        yield engine


@pytest.fixture(scope="module")
def address(engine: AsyncLLM) -> Iterator[str]:
    with listening(engine) as (_, port):
        yield f"http://127.0.0.1:{port}/"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    yield from opened(browser, address)


def opened(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    """The page at this address. Errors of its script fail the test."""
    page = browser.new_page(viewport={"width": 1360, "height": 900}, **options)
    page.set_default_timeout(60_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    yield page
    page.close()
    assert errors == []


def live(page: Any) -> Any:
    page.wait_for_selector("#live.on")
    return page


def drop(page: Any, name: str, content: str | bytes) -> None:
    """Drop a file onto the page, as from a folder."""
    content = list(content.encode() if isinstance(content, str) else content)
    script = """([name, content]) => {
        const moved = new DataTransfer();
        moved.items.add(new File([new Uint8Array(content)], name));
        for (const kind of ["dragover", "drop"])
            document.body.dispatchEvent(new DragEvent(kind, { dataTransfer: moved, bubbles: true, cancelable: true }));
    }"""
    page.evaluate(script, [name, content])


def picture(page: Any) -> str:
    script = "() => [...document.querySelectorAll('.tier canvas')].map(canvas => canvas.toDataURL()).join()"
    return str(page.evaluate(script))


def count(page: Any, state: str, tier: int) -> int:
    """Blocks in a state, as the table says; tier 0 is the device."""
    return int(page.locator(f"#counts tr[data-state={state}] td").nth(tier).inner_text().replace(",", ""))


def ask(page: Any, question: str, longest: int = 12) -> None:
    page.evaluate("longest => { document.querySelector('#max-tokens').value = longest; }", longest)
    page.fill("#question", question)
    page.keyboard.press("Enter")


def answered(page: Any) -> Any:
    page.wait_for_selector(".answer[aria-busy=false]")
    return page.locator(".answer").last


# ---- a document


def test_a_dropped_document_is_asked_about_and_answered(page: Any, engine: AsyncLLM) -> None:
    live(page)
    free = count(page, "free", 0) + count(page, "free", 1)
    before = picture(page)
    drop(page, "bottle.txt", DOCUMENT)
    size = page.locator(".document .number", has_text="% of the context")
    size.wait_for()
    tokens = int(size.inner_text().split()[0])
    assert tokens == len(engine.llm.get_tokenizer().encode(DOCUMENT))
    ask(page, "What does the label say?")
    first = answered(page)
    page.wait_for_selector("#requests:has-text('0 running')")
    assert re.search(r"\d+ tokens read · first token after [\d.]+ s · 12 tokens at", first.inner_text())
    assert "cut at the longest answer" in first.inner_text()
    assert eventually(lambda: picture(page) != before)
    cached = count(page, "cached", 0) + count(page, "cached", 1)
    assert cached >= tokens // 16 and count(page, "free", 0) + count(page, "free", 1) == free - cached
    ask(page, "And the bottle?")  # its document and the first turn are in the prefix cache
    page.locator(".answer").nth(1).get_by_text("of them cached").wait_for()


def test_old_tokens_that_were_computed_again_are_counted(page: Any) -> None:
    live(page)
    page.wait_for_function("() => latest !== null")
    counts = "cached_tokens: 70, cached_tokens_host: 30, cached_tokens_disk: 0, recomputed_tokens"
    for recomputed, again in ((0, ""), (1234, "; 1,234 were no longer there and computed again")):
        page.evaluate(f"() => showSnapshot({{...latest, runs: [], totals: {{{counts}: {recomputed}}}}})")
        assert page.locator("#found").inner_text() == f"40 on the device, 30 on the host, 0 on disk{again}"


def test_a_new_conversation_begins_with_nothing_of_the_answer_that_it_ended(page: Any, engine: AsyncLLM) -> None:
    live(page)
    with held_steps(engine):
        ask(page, "First?", longest=900)
        page.wait_for_function("() => document.querySelector('.answer .words')?.textContent")
        page.click("#new")
        page.wait_for_selector("#stop", state="hidden")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Second?")
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "Second?"}]
    answered(page)


# ---- what the model writes


def chunks(*texts: str) -> str:
    sent = [{"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]} for text in texts]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in sent) + "data: [DONE]\n\n"


def test_what_the_model_writes_stays_text(page: Any) -> None:
    live(page)
    body = chunks(*(HOSTILE[i : i + 7] for i in range(0, len(HOSTILE), 7)))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    drop(page, HOSTILE.replace("/", "") + ".txt", HOSTILE)
    page.locator(".document .number", has_text=re.compile(r"\d tokens")).wait_for()
    ask(page, HOSTILE)
    answer = answered(page)
    assert answer.locator(".words").inner_text() == HOSTILE
    assert page.locator(".question .words").inner_text() == HOSTILE
    assert page.locator("#turns").locator("script, img, b").count() == 0
    assert page.evaluate("() => window.hacked") is None
