"""The page of dev/serve.py in a real Chromium without a window, driven by its DevTools protocol: talks, stops,
completes, shows markup as text, loads nothing from elsewhere, and fits a telephone."""

import base64
import itertools
import json
import os
import re
import shutil
import subprocess
import time

import pytest

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("openai")

import asyncio  # noqa: E402

from test_serve import Server  # noqa: E402

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt install chromium)")


class Page:
    """A tab. Every call runs the event loop until it is answered."""

    def __init__(self, folder):
        self.loop, self.numbers, self.events = asyncio.new_event_loop(), itertools.count(1), []
        self.browser = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-background-networking", "--disable-quic", "--remote-debugging-port=0",
             f"--user-data-dir={folder}"],
            stderr=subprocess.PIPE, text=True, env=os.environ | {"HOME": str(folder)},
        )  # fmt: skip
        said = ""
        while not (found := re.search(r"listening on ws://([\d.:]+)/", said)):
            line = self.browser.stderr.readline()
            assert line, said
            said += line
        self.run(self.connect(found[1]))
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(domain + ".enable")

    def run(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 60))

    async def connect(self, address):
        self.session = aiohttp.ClientSession()
        async with self.session.get(f"http://{address}/json/list") as answer:
            tab = next(t for t in await answer.json() if t["type"] == "page")
        self.socket = await self.session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)

    def call(self, method, **parameters):
        number = next(self.numbers)

        async def answer():
            await self.socket.send_json({"id": number, "method": method, "params": parameters})
            while (message := await self.socket.receive_json()).get("id") != number:
                self.events.append(message)
            return message

        message = self.run(answer())
        assert "error" not in message, message
        return message["result"]

    def js(self, code):
        result = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, code):
        end = time.time() + 60
        while not self.js(code):
            assert time.time() < end, (code, self.js("document.body.innerText"))
            time.sleep(0.02)

    def open(self, server):
        self.events.clear()
        self.call("Page.navigate", url=f"http://127.0.0.1:{server.port}/")
        self.wait("document.readyState == 'complete' && at('name').textContent != 'llm.cu'")

    def type(self, text):
        self.call("Input.insertText", text=text)

    def press(self, key, **more):
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=13, text="\r", **more
            )

    def click(self, id):
        box = self.js(f"JSON.stringify(at('{id}').getBoundingClientRect())")
        x, y, width, height = (json.loads(box)[k] for k in ("x", "y", "width", "height"))
        assert width and height, id
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=x + width / 2, y=y + height / 2, button="left", clickCount=1
            )

    def ask(self, text):
        self.click("say")
        self.type(text)
        self.press("Enter")

    def bubbles(self):
        return self.js("[...at('talk').children].map(e => [e.className, e.textContent])")

    def screen(self, width, height, dark):
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])  # fmt: skip

    def picture(self):
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self):
        self.run(self.session.close())
        self.browser.terminate()
        self.browser.wait(30)
        self.loop.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    page = Page(tmp_path_factory.mktemp("chromium"))
    page.screen(1000, 700, False)
    yield page
    page.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("serve"), "--name", "tiny") as s:
        yield s


IDLE = "!running && at('state').textContent != ''"


def test_a_conversation(page, server):
    page.open(server)
    assert page.js("document.title") == "tiny" and page.js("at('mode').value") == "chat"
    page.ask("say héllo 🙂")
    page.wait(IDLE)
    assert page.bubbles() == [["user", "say héllo 🙂"], ["assistant", "héllo 🙂"]]
    assert re.fullmatch(r"11 tokens, [\d.]+ tokens/s", page.js("at('state').textContent"))
    page.click("say")
    page.type("say two")
    page.press("Enter", modifiers=8)  # Shift: a new line
    page.type("lines")
    page.press("Enter")
    page.wait("at('talk').children.length == 4 && " + IDLE)
    assert page.bubbles()[2:] == [["user", "say two\nlines"], ["assistant", "two\nlines"]]
    prompt = server.requests()[-1]["prompt"]  # the whole conversation
    assert prompt == "<|user|>say héllo 🙂<|end|><|assistant|>héllo 🙂<|end|><|user|>say two\nlines<|end|><|assistant|>"
    page.click("clear")
    assert page.bubbles() == []
    page.ask("say anew")
    page.wait(IDLE)
    assert server.requests()[-1]["prompt"] == "<|user|>say anew<|end|><|assistant|>"


def test_a_conversation_that_fills_the_context(page, server, tmp_path):
    """The oldest turns are forgotten, and the page says so; the system prompt stays."""
    page.open(server)
    page.click("systemed")
    page.wait("at('systemed').open")
    page.click("system")
    page.type("Be brief.")
    page.js("at('tokens').value = 100")
    for i in range(9):
        page.ask(f"say {i} " + "word " * 14)
        page.wait(f"document.querySelectorAll('#talk > .assistant').length == {i + 1} && " + IDLE)
        assert page.js("at('state').className") != "bad"
        asked = server.requests()[-1]["prompt"]
        assert asked.startswith("<|system|>Be brief.<|end|><|user|>") and f"<|user|>say {i} " in asked
    assert "<|user|>say 0 " not in asked and "<|user|>say 7 " in asked
    notes = [text for kind, text in page.bubbles() if kind == "note"]
    assert len(notes) == 1 and "context of 512 tokens is full" in notes[0]
    (tmp_path / "full.png").write_bytes(page.picture())
    page.ask("say " + "long " * 40)  # only after several refusals
    page.wait("document.querySelectorAll('#talk > .assistant').length == 10 && " + IDLE)
    assert page.js("at('state').className") != "bad" and page.js("messages.length") == 2
    page.click("clear")
    page.ask("say anew")
    page.wait(IDLE)
    assert server.requests()[-1]["prompt"] == "<|system|>Be brief.<|end|><|user|>say anew<|end|><|assistant|>"


def test_markup_is_text(page, server):
    page.open(server)
    markup = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>&amp;"
    page.ask("say " + markup)
    page.wait(IDLE)
    assert page.bubbles() == [["user", "say " + markup], ["assistant", markup]]
    assert page.js("document.querySelectorAll('#talk img, #talk script').length") == 0
    assert page.js("document.title") == "tiny"


def test_nothing_is_loaded_from_elsewhere(page, server):
    page.open(server)
    page.ask("say hi")
    page.wait(IDLE)
    urls = [e["params"]["request"]["url"] for e in page.events if e.get("method") == "Network.requestWillBeSent"]
    urls = [u for u in urls if not u.startswith("data:")]
    home = f"http://127.0.0.1:{server.port}/"
    assert set(urls) == {home, home + "v1/models", home + "v1/chat/completions"}
    entries = [e["params"]["entry"] for e in page.events if e.get("method") == "Log.entryAdded"]
    assert not [e for e in entries if e["level"] in ("error", "warning")]
    assert not [e for e in page.events if e.get("method") == "Runtime.exceptionThrown"]
    # the policy of the page holds
    assert page.js("fetch('http://127.0.0.2:1/').then(() => 'sent', e => e.message)") == "Failed to fetch"
    page.js("new Promise(r => setTimeout(r, 50))")
    assert any("Content Security Policy" in json.dumps(e) for e in page.events)


def test_stop_and_the_settings(page, server):
    page.open(server)
    page.js(
        "at('tokens').value = 400; at('temperature').value = 0.35; at('temperature').dispatchEvent(new Event('input'))"
    )
    assert page.js("at('shown').textContent") == "0.35"
    page.ask("slow please")
    page.wait("at('talk').children[1]?.textContent.length > 5")  # while it is written
    assert page.js("!!running && at('go').hidden && !at('stop').hidden && at('mode').disabled")
    before = len(server.requests())
    asked = server.requests()[-1]
    assert asked["temperature"] == 0.35 and asked["max_tokens"] == 400
    page.click("stop")
    page.wait("!running && at('state').textContent == 'stopped'")
    server.wait(lambda: len(server.requests()) > before)
    assert server.requests()[-1] == {"id": asked["id"], "cancel": True}
    assert 5 < len(page.bubbles()[1][1]) < 400 and not page.js("at('go').hidden")
    page.ask("say on")  # what was written before the stop belongs to the conversation
    page.wait(IDLE + " && at('state').textContent != 'stopped'")
    assert page.bubbles()[1][1] in server.requests()[-1]["prompt"]


def test_errors_are_shown(page, server):
    page.open(server)
    page.ask("x" * 600)
    page.wait(IDLE)
    assert page.js("at('state').className") == "bad" and "hint: shorten it" in page.js("at('state').textContent")
    assert page.bubbles() == [] and page.js("at('say').value") == "x" * 600
    page.js("at('say').value = ''")
    page.ask("die")
    page.wait(IDLE)
    assert "the model's program ended" in page.js("at('state').textContent")
    server.wait(lambda: server.post("completions", {"prompt": "say hi"})[0] == 200)


def test_completion(page, tmp_path):
    """A model without a chat template, behind a key."""
    with Server(tmp_path, "--api-key", "open sesame", chat=False) as s:
        page.events.clear()
        page.call("Page.navigate", url=f"http://127.0.0.1:{s.port}/")
        page.wait("document.readyState == 'complete' && !at('keyed').hidden")
        page.wait("at('state').textContent.includes('the API key is missing or wrong')")
        page.click("key")
        page.type("open sesame")
        page.press("Enter")
        page.wait("at('name').textContent == 'model' && at('mode').value == 'text'")
        assert page.js("at('mode').options[0].disabled && at('talk').hidden && at('go').textContent == 'Continue'")
        page.click("text")
        page.type("Once: say upon <b>a</b> time")
        page.click("go")
        page.wait(IDLE)
        assert page.js("at('text').value") == "Once: say upon <b>a</b> timeupon <b>a</b> time"
        assert s.requests()[-1]["prompt"] == "Once: say upon <b>a</b> time"


@pytest.mark.parametrize("width, height, dark", [(360, 640, False), (360, 640, True), (1000, 700, True)])
def test_how_it_looks(page, server, width, height, dark, tmp_path):
    page.screen(width, height, dark)
    page.open(server)
    page.ask("say a" + "b" * 200 + "\n" + "word " * 40)  # longer than any line
    page.wait(IDLE)
    assert page.js("document.documentElement.scrollWidth") == width and page.js("document.body.scrollHeight") <= height
    for id in ("say", "go", "clear", "temperature", "tokens", "mode"):
        box = f"at('{id}').getBoundingClientRect()"
        assert page.js(f"(r => r.left >= 0 && r.right <= innerWidth && r.bottom <= innerHeight)({box})")
    colours = page.js("['color', 'backgroundColor'].map(k => getComputedStyle(document.body)[k])")
    text, back = (sum(map(int, re.findall(r"\d+", c)[:3])) / 3 for c in colours)
    assert (text - back > 150) if dark else (back - text > 150)
    (tmp_path / "page.png").write_bytes(page.picture())
