"""The border to a vLLM server, faked: the four addresses that a measurement asks, over real HTTP on loopback."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class FakeVllm:
    """Answers every prompt with `text` after one draft of `block_size` tokens, `num_accepted` of them accepted."""

    model: str = "target"
    text: tuple[int, ...] = (1, 2)
    block_size: int = 2
    num_accepted: int = 1
    num_foreign_tokens: int = 0  # generated for somebody else with every request
    has_speculation: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_prompts: int = 0
    num_tokens: int = 0
    url: str = ""

    def answer(self, path: str, body: dict[str, Any] | None) -> str | None:
        if path == "/v1/completions" and body is not None:
            self.bodies.append(body)
            self.num_prompts += len(body["prompt"])
            self.num_tokens += len(body["prompt"]) * len(self.text) + self.num_foreign_tokens
            choices = [{"index": i, "token_ids": list(self.text)} for i in range(len(body["prompt"]))]
            return json.dumps({"choices": choices[::-1]})
        found = {"/v1/models": {"data": [{"id": self.model}]}, "/version": {"version": "0.0"}}.get(path)
        return self.metrics() if path == "/metrics" else found and json.dumps(found)

    def metrics(self) -> str:
        """As prometheus_client writes it, of two engines, of which the second stays idle."""
        counts = {"generation_tokens_total": self.num_tokens}
        if self.has_speculation:
            names = ("drafts", "draft_tokens", "accepted_tokens")
            values = (self.num_prompts, self.num_prompts * self.block_size, self.num_prompts * self.num_accepted)
            counts |= {f"spec_decode_num_{name}_total": value for name, value in zip(names, values, strict=True)}
        lines = ["# HELP vllm:x Made up.", "process_start_time_seconds 1.7e+09", "vllm:spec_decode_num_drafts_created 1.7e+09"]
        for engine, share in ((0, 1), (1, 0)):
            labels = f'engine="{engine}",model_name="{self.model} {{x}}"'
            lines += [f"vllm:{name}{{{labels}}} {float(value * share)}" for name, value in counts.items()]
            per_position = range(self.block_size if self.has_speculation else 0)
            lines += [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{k}"}} {float(self.num_prompts * share * (k < self.num_accepted))}'
                for k in per_position
            ]
        return "\n".join(lines) + "\n"

    @contextmanager
    def running(self) -> Iterator["FakeVllm"]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def _respond(self, body: dict[str, Any] | None) -> None:
                text = server.answer(self.path, body)
                self.send_response(404 if text is None else 200)
                self.end_headers()
                self.wfile.write((text or "not found").encode())

            def do_GET(self) -> None:
                self._respond(None)

            def do_POST(self) -> None:
                self._respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *arguments: Any) -> None: ...

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
            thread = Thread(target=http.serve_forever)
            thread.start()
            self.url = f"http://127.0.0.1:{http.server_address[1]}"
            try:
                yield self
            finally:
                http.shutdown()
                thread.join()
