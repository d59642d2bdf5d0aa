"""What a load is sent to: our engine in this process, or an HTTP server that speaks OpenAI's or TGI's language."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from benchmarks.load import Chunk
from benchmarks.workloads import WorkloadRequest

Decode = Callable[[tuple[int, ...]], str]  # token ids to text

TIMEOUT = 600.0  # seconds between two pieces of an answer


class ServerError(RuntimeError):
    """A server answered with an error, or with something else than a stream of events."""


class EngineTarget:
    """PagedEngine. Every thread that waits for a token drives the loop for all."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def stream(self, request: WorkloadRequest) -> Iterator[Chunk]:
        """Sends one request; yields as its tokens come."""
        num_tokens = 0
        outputs = self._engine.stream(
            list(request.prompt_ids), max_new_tokens=request.num_output_tokens, do_sample=False, eos_token_id=None
        )
        for output in outputs:
            now = output.outputs[0].num_tokens
            if now > num_tokens:
                yield Chunk(now - num_tokens)
            num_tokens = now


class HttpTarget:
    """A server's streaming endpoint.

    Args:
        url: with or without a path; without one it is the protocol's own.
        decode: for servers that take text; None sends ids where the protocol takes them.

    Raises:
        ValueError: the url has no host, or isn't http or https.
    """

    path: str

    def __init__(self, url: str, decode: Decode | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server, such as http://127.0.0.1:8000.")
        self._connection = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path if parts.path.strip("/") else self.path
        self._decode = decode
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}

    def body(self, request: WorkloadRequest) -> dict[str, Any]:
        """What is sent."""
        raise NotImplementedError

    def chunk(self, event: dict[str, Any]) -> Chunk:
        """What an event of the answer says."""
        raise NotImplementedError

    def stream(self, request: WorkloadRequest) -> Iterator[Chunk]:
        """Sends one request; yields as its tokens come.

        Raises:
            ServerError: the server refused the request, or broke it off.
        """
        connection = self._connection(self._host, self._port, timeout=TIMEOUT)
        try:
            connection.request("POST", self._path, json.dumps(self.body(request)), self._headers)
            response = connection.getresponse()
            if response.status != 200:
                text = response.read(500).decode("utf-8", "replace")
                raise ServerError(f"{response.status} {response.reason}: {text}")
            for event in _events(response):
                if "error" in event:
                    raise ServerError(str(event["error"]))
                yield self.chunk(event)
        finally:
            connection.close()


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:  # as they come: http.client reads no further than a line
        text = line.decode("utf-8").strip()
        if not text.startswith("data:"):
            continue
        data = text.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield json.loads(data)


class OpenAITarget(HttpTarget):
    """`/v1/completions`. A chunk of text may hold several tokens; the usage at the end tells their number."""

    path = "/v1/completions"

    def __init__(self, url: str, model: str = "default", decode: Decode | None = None) -> None:
        super().__init__(url, decode)
        self._model = model

    def body(self, request: WorkloadRequest) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": self._decode(request.prompt_ids) if self._decode else list(request.prompt_ids),
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def chunk(self, event: dict[str, Any]) -> Chunk:
        choices = event.get("choices") or ()
        usage = event.get("usage") or {}
        # the last choice may only tell why it ended
        has_token = any(choice.get("text") or choice.get("finish_reason") is None for choice in choices)
        return Chunk(1 if has_token else 0, usage.get("completion_tokens"))


class TgiTarget(HttpTarget):
    """`/generate_stream`: an event a token, and text for a prompt."""

    path = "/generate_stream"

    def __init__(self, url: str, decode: Decode | None) -> None:
        super().__init__(url, decode)
        if self._decode is None:
            raise ValueError("TGI takes text; give the model's folder, whose tokenizer makes text of the ids.")

    def body(self, request: WorkloadRequest) -> dict[str, Any]:
        assert self._decode is not None
        parameters = {"max_new_tokens": request.num_output_tokens, "do_sample": False, "ignore_eos_token": True}
        return {"inputs": self._decode(request.prompt_ids), "parameters": parameters}

    def chunk(self, event: dict[str, Any]) -> Chunk:
        details = event.get("details") or {}
        return Chunk(1 if event.get("token") else 0, details.get("generated_tokens"))
