"""The chat page of the server: its policy, and a conversation in a real browser."""

import base64
import hashlib
import re
import socket
import threading
import time

import pytest
import uvicorn
from browser import Browser
from chat_parts import write_chat_model
from serve_parts import slow_down
from starlette.testclient import TestClient

from transformer.chat import Chat
from transformer.cli._services import ServiceSettings, make_service
from transformer.inference import open_model
from transformer.serve._page import page_response
from transformer.serve._server import settings

KEY = "a-secret-key"
HOSTILE = "<img src=x onerror=window.caught=1>"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    return open_model(write_chat_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def service(opened):
    return make_service(opened, ServiceSettings(slots=2, max_tokens=512, api_key=KEY))


@pytest.mark.parametrize("mode", ["chat", "text"])
def test_the_policy_allows_the_parts_of_the_page(mode):
    """A hash of another text would make the browser ignore the style or the script."""
    response = page_response(mode)
    page, policy = response.body.decode(), response.headers["content-security-policy"]
    for tag, name in (("style", "style-src"), ("script", "script-src")):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    assert f'data-mode="{mode}"' in page
    assert "default-src 'none'" in policy
    assert "{{" not in page
    assert not re.search(r"https?://", page), "it loads nothing"


def test_the_page_checks_the_host_and_needs_no_key(service):
    client = TestClient(service.application(), base_url="http://localhost")
    assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
    assert client.get("/", headers={"host": "evil.example"}).status_code == 403
    assert client.get("/v1/models").status_code == 401


@pytest.fixture(scope="module")
def url(service):
    """A server in this process."""
    service.warm_up(lambda done, total: None)
    service.start()
    server = uvicorn.Server(settings(service))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server.should_exit = True
    thread.join()
    service.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


def open_page(browser, url, *, key=KEY, limit=12, **options):
    page = browser.page(**options)
    page.call("Page.navigate", url=url)
    page.wait("document.readyState === 'complete' && !!document.querySelector('#send')")
    page.js(f"document.querySelector('#key').value = '{key}'; document.querySelector('#limit').value = {limit}; 0")
    page.js("document.querySelector('#temperature').value = 0")
    return page


def send(page, message):
    page.focus("#text")
    page.call("Input.insertText", text=message)
    page.press("Enter")


def wait_for_answer(page):
    page.wait("document.querySelector('#stop').hidden && document.querySelector('#text').value === ''")


def replies(page):
    return page.texts(".assistant > p")


@pytest.mark.slow
@pytest.mark.parametrize("size", [{"width": 1280, "height": 900}, {"width": 390, "height": 800, "phone": True}])
def test_the_page_holds_a_conversation(browser, url, opened, size):
    """Two turns with a system prompt: the replies of `Chat`. It fits a phone, loads nothing, and reports nothing."""
    page = open_page(browser, url, **size)
    page.js("document.querySelector('#settings').open = true")
    page.js("document.querySelector('#system').value = 'Be brief.'")
    chat, messages = Chat(opened.model, opened.params, opened.tokenizer), [{"role": "system", "content": "Be brief."}]
    for turn, text in enumerate((HOSTILE, "How are you?"), 1):
        send(page, text)
        page.wait(f"document.querySelectorAll('.assistant').length === {turn}")
        wait_for_answer(page)
        messages.append({"role": "user", "content": text})
        reply = chat.reply(messages, max_new_tokens=12)
        assert replies(page)[-1] == reply.text
        messages.append({"role": "assistant", "content": reply.text})
    assert page.texts(".user > p") == [HOSTILE, "How are you?"]
    assert page.js("window.caught") is None
    assert page.js("document.images.length") == 0
    assert page.js("document.documentElement.scrollWidth <= innerWidth"), "no horizontal scrolling"
    assert page.js("[...document.querySelectorAll('button')].every((e) => e.hidden || e.offsetHeight >= 44)")
    assert page.js("document.querySelector('#form').getBoundingClientRect().bottom <= innerHeight")
    assert [one for one in page.complaints() if one.get("entry", {}).get("level") != "verbose"] == []
    assert {one for one in page.requests() if not one.startswith("data:")} == {url, f"{url}v1/chat/completions"}
    page.click("#new")
    assert replies(page) == []


@pytest.mark.slow
def test_an_answer_can_be_stopped(browser, url, service, monkeypatch):
    """It grows while it is generated. After the button it does not change, and the server has a free slot."""
    slow_down(monkeypatch, service.engine)
    page = open_page(browser, url, limit=400)
    send(page, "Hello")
    seen = {page.wait("document.querySelector('.assistant > p')?.textContent") for _ in range(5) if not time.sleep(0.2)}
    assert len(seen) > 1
    page.click("#stop")
    page.wait("document.querySelector('#stop').hidden")
    assert page.text(".assistant .note") == "Stopped."
    stopped = replies(page)
    deadline = time.monotonic() + 20
    while service.load.running:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert replies(page) == stopped
    assert page.js("document.querySelector('#error').hidden")


@pytest.mark.slow
def test_errors_are_shown_and_the_typed_message_is_kept(browser, url, service, monkeypatch):
    page = open_page(browser, url, key="wrong")
    shown = "!document.querySelector('#error').hidden && document.querySelector('#stop').hidden"
    send(page, "Hello")
    page.wait(shown)
    assert page.text("#error") == "the API key is missing or wrong."
    assert page.js("document.querySelector('#settings').open")
    assert page.js("document.querySelector('#text').value") == "Hello"
    assert page.js("document.querySelectorAll('.message').length") == 0
    page.js(f"document.querySelector('#key').value = '{KEY}'")
    page.focus("#text")
    page.press("Enter")
    wait_for_answer(page)
    assert len(replies(page)) == 1
    assert page.js("document.querySelector('#error').hidden")
    page.js("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    send(page, "again")
    page.wait(shown)
    assert page.text("#error").startswith("The server does not answer.")
