"""The HTTP side: routes, and the story of a request from body to answer."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from router.answer import Answer, Prompt
from router.chat import THINK, encode_chat
from router.completions import Completion, CompletionStream
from router.config import RouterConfig
from router.conversation import Chat, ChatShape, ChatStream
from router.dispatch import Dispatcher
from router.errors import ApiError, internal, invalid
from router.health import Health
from router.openai import (
    CompletionRequest,
    Options,
    check_fits,
    check_ids,
    check_scores,
    check_vocabulary,
    output_tokens,
    parse_chat,
    parse_completion,
    parse_json,
)
from router.request import Request
from router.stream import EventStream, Reply, Written
from router.text import Tokenizer
from wire.messages import SamplingParams
from wire.metrics import Metrics, render
from wire.sockets import Inbox
from wire.timeline import Timeline

_LOG = logging.getLogger("pdserve.router")
_timeline = Timeline("router")
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
INLINE_BYTES = 1 << 17  # larger bodies are read in a thread: this many take up to 20 ms
SHORT_BYTES = 1 << 21  # and still larger ones in another, so that others do not wait behind them
INLINE_CHARS = 2000  # more text is tokenised in a thread: 150,000 characters take 0.1 s
LONG_CHARS = 200_000  # and still more in the other
INLINE_NUMBERS = 20_000  # answers with more of them are written in that other thread
Made = TypeVar("Made")
OPENAPI = Path(__file__).with_name("openapi.json")

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class App:
    """Handlers and what they share. `handle` is the whole server for aiohttp's `web.Server`."""

    def __init__(
        self,
        config: RouterConfig,
        dispatcher: Dispatcher,
        health: Health,
        metrics: Metrics,
        inbox: Inbox,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._health = health
        self._metrics = metrics
        self._inbox = inbox
        self._tokenizer = tokenizer
        self._model = config.served_name
        self._short_work = ThreadPoolExecutor(1, "short")  # takes milliseconds
        self._long_work = ThreadPoolExecutor(1, "long")  # may take seconds
        self._openapi = OPENAPI.read_text(encoding="utf-8")
        self._routes: dict[str, dict[str, Handler]] = {
            "/v1/completions": {"POST": self.completions},
            "/v1/chat/completions": {"POST": self.chat_completions},
            "/v1/models": {"GET": self.models},
            "/health": {"GET": self.health},
            "/metrics": {"GET": self.metrics},
            "/openapi.json": {"GET": self.openapi},
        }

    @property
    def paths(self) -> list[str]:
        return list(self._routes)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._find(request)(request)
        except ApiError as error:
            self._metrics.add(f"http_{error.status}")
            return _error_reply(error)
        except web.RequestPayloadError as error:
            self._metrics.add("http_400")
            return _error_reply(ApiError(400, str(error), code="broken_body")).close_after()
        except web.HTTPRequestEntityTooLarge:
            self._metrics.add("http_413")
            return _error_reply(self._too_large()).close_after()
        except ConnectionError:
            raise
        except Exception:  # a bug of ours must not look like anything else, and costs only this request
            _LOG.exception("%s %s", request.method, request.path)
            self._metrics.add("http_500")
            return _error_reply(internal())

    def _find(self, request: web.BaseRequest) -> Handler:
        methods = self._routes.get(request.path)
        if methods is None and request.path.startswith("/v1/models/"):
            methods = {"GET": self.model}
        if methods is None:
            raise ApiError(404, f"there is nothing at {request.path}", code="not_found")
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            allowed = ", ".join(methods)
            message = f"{request.method} is not allowed here, only {allowed}"
            raise ApiError(405, message, code="method_not_allowed", allow=allowed)
        return handler

    # ---- generation ----

    async def completions(self, http: web.BaseRequest) -> web.StreamResponse:
        body = await self._read(http)
        wanted = await self._by_size(body, partial(self._parse, parse_completion, body))
        options = self._admit(wanted.options, len(wanted.prompts))
        prompts = await self._prompts(wanted)
        sampling = self._completion_sampling(wanted, prompts)
        if not options.stream:
            answer = Completion(wanted, prompts, self._tokenizer, self._model, self._long_work)
            return await self._whole(answer, sampling)
        events = EventStream(http, self._config.stream_buffer_bytes)
        stream = CompletionStream(events, wanted, prompts, self._tokenizer, self._model, self._long_work)
        return await self._streamed(events, stream, sampling)

    async def chat_completions(self, http: web.BaseRequest) -> web.StreamResponse:
        body = await self._read(http)
        wanted = await self._by_size(body, partial(self._parse, parse_chat, body))
        options = self._admit(wanted.options, 1)
        if self._tokenizer is None:
            raise invalid("messages", _NO_TOKENIZER, "no_tokenizer")
        try:
            text = await self._by_size(body, partial(encode_chat, wanted.messages, wanted.thinking, wanted.effort))
        except RecursionError as error:  # nested as deep as JSON may be read, which is too deep to write it again
            raise invalid("messages", "tools or schemas are nested too deeply") from error
        [ids] = await self._encode([text], "messages")
        prompts = [Prompt(ids, text)]
        sampling = [options.params(output_tokens(options, len(ids), self._context(), 0, "messages"))]
        shape = ChatShape(text.endswith(THINK), wanted.tools)
        if not options.stream:
            return await self._whole(Chat(options, prompts, self._tokenizer, self._model, shape), sampling)
        events = EventStream(http, self._config.stream_buffer_bytes)
        return await self._streamed(events, ChatStream(events, options, prompts, self._tokenizer, self._model, shape), sampling)

    async def _whole(self, answer: Completion | Chat, sampling: list[SamplingParams]) -> web.StreamResponse:
        await self._finished(answer, self._submit(answer, sampling))
        self._count(answer)
        if answer.weight() > INLINE_NUMBERS:
            return Reply(await self._work(self._long_work, answer.body))
        return Reply(answer.body())

    async def _streamed(
        self, events: EventStream, answer: CompletionStream | ChatStream, sampling: list[SamplingParams]
    ) -> web.StreamResponse:
        """Events leave from the dispatcher's callbacks; this coroutine only waits for the end."""
        requests = self._submit(answer, sampling)
        try:
            await self._finished(answer, requests)
        except ApiError as error:
            if not events.started:
                raise
            self._metrics.add("streams_broken")
            events.send(f"data: {error.body()}\n\n")
            events.end()
        finally:
            if events.overflowed:
                self._metrics.add("streams_overflowed")
        self._count(answer)
        return Written(events)

    def _submit(self, answer: Answer, sampling: list[SamplingParams]) -> list[Request]:
        """One request for each prompt. They have to be given to `_finished` next. Raises ApiError when there is no room now:
        others may have come while the prompts were tokenised."""
        tokens = sum([len(prompt.ids) for prompt in answer.prompts])
        if tokens > self._config.max_prompt_tokens:
            raise invalid("prompt", f"{tokens} tokens are more than the limit of {self._config.max_prompt_tokens}")
        self._dispatcher.check_room(len(answer.choices), tokens)
        if sampling[0].prompt_logprobs >= 0:
            answer.expect_scores()
        requests = []
        for number, (prompt, params) in enumerate(zip(answer.prompts, sampling, strict=True)):
            request = Request.new(prompt.ids, answer.options.n, params, answer.listener(number))
            requests.append(request)
            self._dispatcher.submit(request)
            _timeline.name(request.rid, answer.id)
        self._metrics.add("requests")
        return requests

    async def _finished(self, answer: Answer, requests: list[Request]) -> None:
        """Waits for the end, and drops what is still on its way then, whatever the end was."""
        try:
            await answer.done
        except asyncio.CancelledError:  # the client has gone
            self._metrics.add("requests_dropped", sum([not request.closed for request in requests]))
            raise
        finally:
            for request in requests:
                self._dispatcher.cancel(request)

    def _count(self, answer: Answer) -> None:
        self._metrics.add("prompt_tokens", answer.prompt_tokens)
        self._metrics.add("completion_tokens", answer.output_tokens)

    # ---- checks and tokens ----

    async def _read(self, http: web.BaseRequest) -> bytes:
        """The body, which says that it is JSON. Raises ApiError 400, 413 or 415."""
        kind = http.headers.get("Content-Type", "application/json")
        if kind != "application/json" and kind.partition(";")[0].strip().lower() != "application/json":
            raise ApiError(400, f"Content-Type must be application/json, not {kind!r}", code="invalid_content_type")
        coding = ", ".join(http.headers.getall("Content-Encoding", ()))
        if coding.strip().lower() not in ("", "identity"):
            message = f"Content-Encoding: {coding!r} is not supported, send the body as it is"
            raise ApiError(415, message, "Content-Encoding", "unsupported_encoding")
        if "Expect" in http.headers and http.headers["Expect"].lower() == "100-continue" and http.transport is not None:
            http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        content = http.content
        if not content.is_eof():
            return await http.read()
        body = content.read_nowait()  # all of it came with the head, as it nearly always does: no need to wait in turns
        if len(body) > self._config.max_body_bytes:
            raise self._too_large()
        return body

    def _parse(self, parse: Callable[[dict[str, Any], int], Made], body: bytes) -> Made:
        return parse(parse_json(body, patient=len(body) > INLINE_BYTES), self._config.max_logprobs)

    async def _by_size(self, body: bytes, make: Callable[[], Made]) -> Made:
        """Work that grows with the body: done here, or in a thread when it would hold up everybody."""
        if len(body) <= INLINE_BYTES:
            return make()
        return await self._work(self._short_work if len(body) <= SHORT_BYTES else self._long_work, make)

    def _admit(self, options: Options, prompts: int) -> Options:
        """Raises ApiError when the model is another one, nobody can serve now, or ids are not in the vocabulary."""
        if options.model is not None and options.model != self._model:
            raise ApiError(404, f"model: {options.model!r} is not served, only {self._model!r}", "model", "model_not_found")
        if prompts * options.n > self._config.max_requests:
            raise invalid(
                "n", f"{prompts} prompts x {options.n} samples are more than the limit of {self._config.max_requests}"
            )
        if options.stop and self._tokenizer is None:
            raise invalid("stop", _NO_TEXT, "no_tokenizer")
        self._dispatcher.check_room(prompts * options.n)
        check_vocabulary(options, self._dispatcher.pool.vocab_size)
        return options

    async def _prompts(self, wanted: CompletionRequest) -> list[Prompt]:
        texts = [raw for raw in wanted.prompts if isinstance(raw, str)]  # all of them, or none
        if texts:
            if self._tokenizer is None:
                raise invalid("prompt", _NO_TOKENIZER, "no_tokenizer")
            encoded = await self._encode(texts, "prompt")
            # An empty text still needs a token to go on from.
            return [Prompt(ids or [self._dispatcher.pool.bos_token_id], text) for ids, text in zip(encoded, texts, strict=True)]
        prompts = [Prompt(raw) for raw in wanted.prompts if not isinstance(raw, str)]
        context = self._context()
        for prompt in prompts:
            check_fits(len(prompt.ids), context, "prompt")  # first: the next check takes time on millions of ids
            check_ids(prompt.ids, self._dispatcher.pool.vocab_size, "prompt")
        if wanted.echo and self._tokenizer is not None:
            decode = partial(_decode, self._tokenizer, prompts, wanted.options.skip_special)
            short = sum([len(prompt.ids) for prompt in prompts]) <= INLINE_NUMBERS
            return decode() if short else await self._work(self._long_work, decode)
        return prompts

    async def _encode(self, texts: list[str], param: str) -> list[list[int]]:
        assert self._tokenizer is not None
        try:
            longest = max([len(text.encode("utf-8")) for text in texts])
        except UnicodeEncodeError as error:
            raise invalid(param, "has half of a surrogate pair, which is not text") from error
        context = self._context()
        if longest > context * self._tokenizer.longest_bytes:
            message = f"{longest} bytes of text are more than the context of {context} tokens can hold"
            raise invalid(param, message, "context_length_exceeded")
        encode = partial(_encode, self._tokenizer, texts)
        num_chars = sum(map(len, texts))  # of all: a thousand short texts take as long as a long one
        if num_chars <= INLINE_CHARS:
            return encode()
        return await self._work(self._short_work if num_chars <= LONG_CHARS else self._long_work, encode)

    async def _work(self, thread: ThreadPoolExecutor, make: Callable[[], Made]) -> Made:
        return await asyncio.get_running_loop().run_in_executor(thread, make)

    def _completion_sampling(self, wanted: CompletionRequest, prompts: list[Prompt]) -> list[SamplingParams]:
        scores = wanted.options.logprobs if wanted.echo else -1
        if scores >= 0:
            check_scores(sum([len(prompt.ids) for prompt in prompts]), scores)
        context = self._context()
        outputs = [output_tokens(wanted.options, len(prompt.ids), context, COMPLETION_TOKENS, "prompt") for prompt in prompts]
        return [wanted.options.params(max(output, 1), scores) for output in outputs]

    def _context(self) -> int:
        """Raises ApiError 503 when the workers have gone while the prompt was tokenised."""
        self._dispatcher.check_pair()
        return self._dispatcher.pool.context_tokens

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._config.max_body_bytes} bytes", code="body_too_large")

    # ---- the rest ----

    async def models(self, http: web.BaseRequest) -> web.StreamResponse:
        return Reply(json.dumps({"object": "list", "data": [self._card()]}))

    async def model(self, http: web.BaseRequest) -> web.StreamResponse:
        name = http.path.removeprefix("/v1/models/")
        if name != self._model:
            raise ApiError(404, f"model: {name!r} is not served, only {self._model!r}", "model", "model_not_found")
        return Reply(json.dumps(self._card()))

    def _card(self) -> dict[str, Any]:
        pool = self._dispatcher.pool
        context = pool.context_tokens if pool.has_pair() else None
        return {"id": self._model, "object": "model", "created": 0, "owned_by": "pdserve", "max_model_len": context}

    async def health(self, http: web.BaseRequest) -> web.StreamResponse:
        report = self._health.report()
        if report["reason"] is None:
            return Reply(json.dumps(report))
        return Reply(json.dumps(report), status=503, headers={"Retry-After": "1"})

    async def metrics(self, http: web.BaseRequest) -> web.StreamResponse:
        pool = self._dispatcher.pool
        self._metrics.total("bad_frames", self._inbox.bad_frames)
        self._metrics.total("refused_peers", self._inbox.refused_peers)
        self._metrics.set("samples_in_flight", self._dispatcher.in_flight)
        self._metrics.set("healthy", float(not self._health.reason()))
        for role in ("prefill", "decode"):
            self._metrics.set(f"{role}_workers", len(pool.workers(role)))
        sources = [({"role": "router", "worker": "router"}, self._metrics.snapshot())]
        sources += [({"role": worker.role, "worker": worker.name}, worker.metrics) for worker in pool.workers()]
        return Reply(render(sources), content_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, http: web.BaseRequest) -> web.StreamResponse:
        return Reply(self._openapi)


_NO_TEXT = "the model has no tokenizer.json, so there is no text to look for it in: use stop_token_ids"
_NO_TOKENIZER = "the model has no tokenizer.json, so only token ids are served: send prompt as an array of ids"


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [tokenizer.encode(text) for text in texts]


def _decode(tokenizer: Tokenizer, prompts: list[Prompt], skip_special: bool) -> list[Prompt]:
    return [Prompt(prompt.ids, tokenizer.decode(prompt.ids, skip_special)) for prompt in prompts]


def _error_reply(error: ApiError) -> Reply:
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else {}
    headers |= {"Allow": error.allow} if error.allow else {}
    return Reply(error.body(), status=error.status, headers=headers)
