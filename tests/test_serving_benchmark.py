"""The serving benchmark: arrivals, measures, and loads against a small server and against the engine."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import typer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import hf_paged
from benchmarks import serving, serving_table, workloads
from benchmarks.arrivals import gamma_arrivals, poisson_arrivals
from benchmarks.latency import Goals, e2e, gaps, summarise, tpot, ttft
from benchmarks.load import Chunk, Record, closed_loop, open_loop
from benchmarks.rounds import Setting
from benchmarks.serving import Load
from benchmarks.targets import EngineTarget, OpenAITarget, TgiTarget
from benchmarks.workloads import Workload, WorkloadRequest

REQUESTS = tuple(WorkloadRequest((10 + index, 20), 3 + index % 3) for index in range(6))

# -- arrivals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variation_that_were_asked_for(cv: float) -> None:
    times = gamma_arrivals(40_000, rate=5.0, cv=cv)
    between = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert statistics.mean(between) == pytest.approx(0.2, rel=0.1)
    assert statistics.pstdev(between) / statistics.mean(between) == pytest.approx(cv, rel=0.1, abs=1e-6)


def test_poisson_arrivals_have_a_variation_of_one_and_the_same_seed_the_same_times() -> None:
    assert poisson_arrivals(5, 2.0, seed=3) == gamma_arrivals(5, 2.0, 1.0, seed=3)
    assert poisson_arrivals(5, 2.0, seed=3) != poisson_arrivals(5, 2.0, seed=4)


@pytest.mark.parametrize(("rate", "cv"), [(0.0, 1.0), (1.0, -1.0)])
def test_a_rate_or_variation_that_is_none_is_refused(rate: float, cv: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        gamma_arrivals(1, rate, cv)


# -- measures --------------------------------------------------------------------------------------------------------


def test_what_a_user_feels_is_counted_from_when_the_request_was_due() -> None:
    record = Record(due=1.0, arrivals=(1.5, 1.75, 2.5), num_tokens=5)
    assert (ttft(record), e2e(record)) == (0.5, 1.5)
    assert tpot(record) == 0.25  # five tokens came in three pieces
    assert gaps(record) == [0.25, 0.75]
    assert tpot(Record(0.0, (1.0,), 1)) is None


def test_goodput_counts_requests_that_keep_every_goal() -> None:
    records = [
        Record(0.0, (0.5, 1.0), 2),
        Record(1.0, (3.0, 3.5), 2),  # its first token came late
        Record(2.0, (2.5, 4.0), 2),  # its second came late
        Record(3.0, (3.5,), 1, error="broken off"),
    ]
    found = summarise(records, Goals(ttft=1.0, tpot=1.0))
    assert (found["num_failed"], found["errors"]) == (1, ["broken off"])
    assert (found["seconds"], found["share_within_goals"]) == (4.0, 0.25)
    assert found["goodput_requests_per_second"] == 0.25
    assert found["requests_per_second"] == 0.75
    assert found["ttft_seconds"] == {"p50": 0.5, "p95": 2.0, "p99": 2.0}


def test_a_load_of_which_nothing_came_back_has_no_percentiles() -> None:
    found = summarise([Record(0.0, (), 0, error="refused")], Goals())
    assert found["ttft_seconds"] is None
    assert found["requests_per_second"] == found["share_within_goals"] == 0.0


# -- loops -----------------------------------------------------------------------------------------------------------


class Slow:
    """Answers at once, or when it is let; counts who is there at the same time."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self._gate = gate
        self._lock = threading.Lock()
        self.num_here = self.most_here = 0
        self.starts: list[float] = []

    def stream(self, request: WorkloadRequest) -> Iterator[Chunk]:
        with self._lock:
            self.num_here += 1
            self.most_here = max(self.most_here, self.num_here)
            self.starts.append(time.monotonic())
        if self._gate is not None:
            self._gate.wait(10)
        for _ in range(request.num_output_tokens):
            yield Chunk()
        with self._lock:
            self.num_here -= 1


def test_an_open_loop_starts_requests_while_others_still_wait() -> None:
    gate = threading.Event()
    target = Slow(gate)
    threading.Timer(0.3, gate.set).start()
    records = open_loop(target, REQUESTS, [0.0, 0.01, 0.02, 0.03, 0.04, 0.05])
    assert target.most_here == len(REQUESTS)
    assert [record.due for record in records] == [0.0, 0.01, 0.02, 0.03, 0.04, 0.05]
    assert [record.num_tokens for record in records] == [request.num_output_tokens for request in REQUESTS]


def test_a_closed_loop_has_only_so_many_at_once() -> None:
    target = Slow()
    records = closed_loop(target, REQUESTS, 2)
    assert 1 <= target.most_here <= 2
    assert [record.num_tokens for record in records] == [request.num_output_tokens for request in REQUESTS]


def test_loads_have_the_same_lengths_and_shared_beginnings_in_other_ids() -> None:
    workload = workloads.chat(4, last_id=100)
    other = serving.shifted(workload, 1)
    assert other != workload
    assert len({request.prompt_ids[:256] for request in other.requests}) == 1
    for one, two in zip(workload.requests, other.requests, strict=True):
        assert len(one.prompt_ids) == len(two.prompt_ids)
        assert one.num_output_tokens == two.num_output_tokens
        assert all(10 <= token < 100 for token in two.prompt_ids)
        assert all(a != b for a, b in zip(one.prompt_ids, two.prompt_ids, strict=True))


# -- a small server --------------------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """Both protocols, as the servers that made them speak them; a prompt that begins with 99 is refused."""

    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if str(body.get("prompt", body.get("inputs")))[:3] in ("[99", "99 "):
            self._refuse()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for event in self._openai(body) if self.path == "/v1/completions" else self._tgi(body):
            self.wfile.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
            self.wfile.flush()

    def _refuse(self) -> None:
        self.send_response(422)
        self.end_headers()
        self.wfile.write(b'{"error": "no luck"}')

    def _openai(self, body: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
        count = body["max_tokens"]
        assert body["stream"]
        for index in range(0, count, 2):  # two tokens in a piece
            yield {"choices": [{"index": 0, "text": "ab"[: count - index], "finish_reason": None}]}
        yield {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
        yield {"choices": [], "usage": {"completion_tokens": count}}
        yield "[DONE]"

    def _tgi(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        count = body["parameters"]["max_new_tokens"]
        for index in range(count):
            details = {"generated_tokens": count} if index == count - 1 else None
            yield {"token": {"id": index, "text": "a"}, "details": details}

    def log_message(self, format: str, *args: Any) -> None:
        """Stays quiet."""


@pytest.fixture
def server() -> Iterator[str]:
    Handler.bodies.clear()
    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{found.server_address[1]}"
    found.shutdown()
    found.server_close()
    thread.join(10)


def _text(ids: tuple[int, ...]) -> str:
    return " ".join(map(str, ids))


def test_openai_is_sent_ids_and_says_how_many_tokens_came_in_its_pieces(server: str) -> None:
    records = closed_loop(OpenAITarget(server, "tiny"), REQUESTS, 2)
    assert [record.error for record in records] == [None] * len(REQUESTS)
    assert [record.num_tokens for record in records] == [request.num_output_tokens for request in REQUESTS]
    assert [len(record.arrivals) for record in records] == [-(-r.num_output_tokens // 2) for r in REQUESTS]
    sent = sorted(Handler.bodies, key=lambda body: body["prompt"])
    assert [body["prompt"] for body in sent] == [list(request.prompt_ids) for request in REQUESTS]
    assert all(body["model"] == "tiny" and body["ignore_eos"] and body["temperature"] == 0 for body in sent)


def test_tgi_is_sent_text_and_streams_an_event_a_token(server: str) -> None:
    records = closed_loop(TgiTarget(server, _text), REQUESTS, 3)
    assert [len(record.arrivals) for record in records] == [request.num_output_tokens for request in REQUESTS]
    assert {body["inputs"] for body in Handler.bodies} == {_text(request.prompt_ids) for request in REQUESTS}
    with pytest.raises(ValueError, match="TGI takes text"):
        TgiTarget(server, None)


def test_a_refused_request_is_a_record_and_the_others_go_on(server: str) -> None:
    requests = (WorkloadRequest((99, 1), 2), WorkloadRequest((14, 1), 2))
    refused, fine = closed_loop(OpenAITarget(server), requests, 1)
    assert refused.error is not None
    assert "422" in refused.error
    assert "no luck" in refused.error
    assert (fine.error, fine.num_tokens) == (None, 2)


def test_a_server_that_is_not_there_fails_the_warm_up(tmp_path: Path) -> None:
    target = OpenAITarget("http://127.0.0.1:9")
    with pytest.raises(SystemExit, match="the first request failed: ConnectionRefusedError"):
        serving.run(
            target,
            Workload("some", REQUESTS),
            [Load(rate=1.0)],
            goals=Goals(),
            setting=Setting(tmp_path, 1),
            command="",
            name="nobody",
        )


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


app = typer.Typer()
app.command()(serving.main)


def _call(*arguments: object) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_the_engine_under_three_loads_gives_a_table_and_a_file(tiny_folder: Path, tmp_path: Path) -> None:
    result = _call(
        "--model", tiny_folder, "--requests", 5, "--rate", 200, "--rate", 400, "--concurrency", 2, "--threads", 1,
        "--goal-e2e", 1000, "--output", tmp_path, "--kv-tokens", 2048,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("serving-*.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    wanted = workloads.mixed(5, last_id=128).num_output_tokens
    assert [load["name"] for load in data["loads"]] == ["200/s, Poisson", "400/s, Poisson", "2 users"]
    for load in data["loads"]:
        summary = load["summary"]
        assert (summary["num_requests"], summary["num_failed"], summary["share_within_goals"]) == (5, 0, 1.0)
        assert summary["output_tokens_per_second"] * summary["seconds"] == pytest.approx(wanted)
        assert load["engine"]["num_steps"] > 0
        assert load["engine"]["prefix_hit_tokens"] == 0  # every load has ids of its own
    lines = path.with_suffix(".md").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("| load | requests/s |")
    assert lines[2].startswith("| 200/s, Poisson | ")
    assert "to the engine in this process. Goals: end to end 1000 s." in lines[-1]


def test_a_server_is_measured_as_the_engine_is(server: str, tiny_folder: Path, tmp_path: Path) -> None:
    result = _call(
        "--model", tiny_folder, "--requests", 4, "--rate", 100, "--cv", 3, "--url", server, "--output", tmp_path
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("serving-*.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["target"] == "a server that speaks openai"
    assert data["loads"][0]["name"] == "100/s, in bursts, CV 3"
    assert server not in serving_table.markdown({**data, "command": ""})


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "at least one --rate or --concurrency"),
        (("--rate", 0), "A rate is above 0"),
        (("--rate", 1, "--workload", "multi-turn"), "'multi-turn' is none of"),
    ],
)
def test_a_wrong_option_is_one_sentence(arguments: tuple[object, ...], reason: str) -> None:
    result = _call(*arguments)
    assert result.exit_code == 2
    assert reason in " ".join(result.output.replace("│", " ").split())


def test_an_address_that_is_none_is_one_sentence(tiny_folder: Path) -> None:
    result = _call("--rate", 1, "--model", tiny_folder, "--url", "localhost:8000")
    assert result.exit_code == 2
    assert "is no address of a server" in " ".join(result.output.replace("│", " ").split())


def test_many_threads_stream_from_one_engine_the_tokens_of_stock(tiny_folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_folder).eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    with hf_paged.PagedEngine(model, hf_paged.PagedConfig(num_blocks=64)) as engine:
        records = closed_loop(EngineTarget(engine), REQUESTS, 6)
        engine.check()
    assert [len(record.arrivals) for record in records] == [request.num_output_tokens for request in REQUESTS]


def test_a_serving_result_makes_a_picture(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which no command needs")
    result = serving.run(
        Slow(), Workload("some", REQUESTS), [Load(rate=500.0), Load(concurrency=2)], goals=Goals(ttft=1.0),
        setting=Setting(tiny_folder, 1), command="", name="nobody",
    )  # fmt: skip
    from benchmarks.serving_picture import draw_serving

    draw_serving(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
