"""What several test folders share: the cases of the shared folder, a tiny random target on disk, and an S3 server."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.s3_servers import FaultProxy, JuicefsGateway

settings.register_profile("repeatable", deadline=None, derandomize=True)  # a busy machine may take its time
settings.load_profile("repeatable")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: Llama, 3 layers, width 32, vocabulary 64, whose next-token distributions are peaked."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, initializer_range=0.1, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.model.embed_tokens.weight.data.normal_(0.0, 1.0)
    model.lm_head.weight.data.normal_(0.0, 0.5)
    folder = tmp_path_factory.mktemp("tiny_target")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def juicefs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JuicefsGateway]:
    """A running S3 gateway with the bucket `drafters`. A test that kills it starts it again."""
    folder = tmp_path_factory.mktemp("juicefs")
    gateway = JuicefsGateway(folder)
    gateway.start()
    gateway.make_bucket("drafters")
    yield gateway
    gateway.stop()
    shutil.rmtree(folder)


@pytest.fixture
def s3(juicefs: JuicefsGateway, monkeypatch: pytest.MonkeyPatch) -> JuicefsGateway:
    """The gateway, with this process's environment pointing at it."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in juicefs.environment.items():
        monkeypatch.setenv(name, value)
    return juicefs


@pytest.fixture
def s3_proxy(s3: JuicefsGateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before the gateway, with this process's environment pointing at the proxy."""
    proxy = FaultProxy(s3.url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield proxy
    proxy.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `<name>_case` runs once for every case of `shared/cases/<name>.json`, and is skipped without it."""
    for argument in metafunc.fixturenames:
        if argument.endswith("_case"):
            metafunc.parametrize(argument, _cases(argument.removesuffix("_case")))


def _cases(name: str) -> list[Any]:
    path = SHARED / "cases" / f"{name}.json"
    if not path.is_file():
        return [pytest.param({}, marks=pytest.mark.skip(reason=f"{path} is not there"))]
    return [pytest.param(case, id=case["name"]) for case in json.loads(path.read_text())["cases"]]
