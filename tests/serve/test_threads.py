"""Which calls of a service with one thread are computed together, and what happens to those that leave."""

import asyncio
import threading

import pytest

from transformer.serve._errors import APIError
from transformer.serve._threads import Job, ThreadService


class Service(ThreadService):
    """A service without a model."""

    most_tokens = None

    def warm_up(self, report):
        """Nothing is compiled."""

    def endpoints(self):
        return {}


class Client:
    """A request whose client leaves when `left` is set."""

    def __init__(self):
        self.left = asyncio.Event()

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}


class Scene:
    """A service whose thread is busy until `proceed` is set; `groups` has the inputs of each later computation."""

    def __init__(self):
        self.service = Service(name="x", api_key=None, local_only=True)
        self.proceed, self.begun, self.groups = threading.Event(), threading.Event(), []

    def hold(self, inputs):
        self.begun.set()
        assert self.proceed.wait(60)
        return inputs

    def compute(self, inputs):
        self.groups.append(list(inputs))
        if 0 in inputs:
            raise ValueError("zero")
        return [10 * one for one in inputs]

    def start(self, job, client=None):
        return asyncio.ensure_future(self.service.compute(client or Client(), job))

    def call(self, *inputs, key="a", client=None):
        """Start a call whose inputs have their values as sizes; a group has at most 8."""
        return self.start(Job(key, lambda: inputs, self.compute, int, 8), client)


def run(story):
    """Run a coroutine function with a scene whose thread is busy."""

    async def whole():
        scene = Scene()
        first = scene.start(Job("first", lambda: [1], scene.hold, int, 8))
        while not scene.begun.is_set():
            await asyncio.sleep(0.001)
        try:
            await asyncio.wait_for(story(scene), 60)
        finally:
            scene.proceed.set()
            await asyncio.gather(first, return_exceptions=True)
            scene.service.close()
        assert scene.service.load.running == scene.service.load.waiting == 0

    asyncio.run(whole())


def test_batches_keep_order_share_a_key_and_have_a_size_limit():
    async def story(scene):
        calls = [scene.call(3), scene.call(1, key="b"), scene.call(1, 4), scene.call(5), scene.call(2), scene.call(9)]
        await asyncio.sleep(0.01)
        assert scene.service.load.waiting == 6
        scene.proceed.set()
        found = await asyncio.gather(*calls)
        assert scene.groups == [[3, 1, 4], [1], [5, 2], [9]]
        assert [list(results) for _, results in found] == [[30], [10], [10, 40], [50], [20], [90]]
        assert [list(inputs) for inputs, _ in found] == [[3], [1], [1, 4], [5], [2], [9]]

    run(story)


def test_a_request_of_a_disconnected_client_is_not_computed():
    async def story(scene):
        client = Client()
        gone, other = scene.call(3, client=client), scene.call(4)
        await asyncio.sleep(0.01)
        client.left.set()
        with pytest.raises(APIError, match="the client has left"):
            await gone
        assert scene.service.load.waiting == 1
        scene.proceed.set()
        assert (await other)[1] == [40]
        assert scene.groups == [[4]]

    run(story)


def test_an_error_ends_only_its_request():
    """An error of the inputs, and one of the computation, which is repeated for each call alone."""

    async def story(scene):
        wrong = scene.start(Job("a", lambda: int("x"), scene.compute, int, 8))
        calls = [scene.call(2), scene.call(0), scene.call(3)]
        await asyncio.sleep(0.01)
        scene.proceed.set()
        found = await asyncio.gather(wrong, *calls, return_exceptions=True)
        assert "invalid literal" in str(found[0])
        assert str(found[2]) == "zero"
        assert [found[1][1], found[3][1]] == [[20], [30]]
        assert scene.groups == [[2, 0, 3], [2], [0], [3]]

    run(story)


def test_waiting_requests_end_with_the_server():
    async def story(scene):
        waiting = scene.call(2)
        await asyncio.sleep(0.01)
        scene.service.close()
        done, _ = await asyncio.wait([waiting], timeout=10)
        assert done, "it does not wait for what is computed"
        with pytest.raises(APIError, match="shutting down"):
            await waiting
        with pytest.raises(APIError, match="shutting down"):
            await scene.call(3)
        assert scene.groups == []

    run(story)
