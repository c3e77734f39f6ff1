"""The sharded engine gives the numbers of the local one: AdamW and Muon, one rank and two, whole runs and resumed ones."""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dspark.config import TrainingConfig
from dspark.storage import LocalStorage
from dspark.training import LocalEngine, TrainingData, train
from tests.dspark import tiny

# The seed orders the rows so that no step's gradient is nearly singular: Muon's bf16 iteration blows up what is lost there.
ADAMW = dataclasses.replace(tiny.TRAINING, precision="fp32", num_steps=20, checkpoint_every_steps=4, seed=8)
BF16_MUON = dataclasses.replace(ADAMW, num_steps=6, muon_lr=0.02, clip_norm=None, precision="bf16")
BF16 = dataclasses.replace(ADAMW, precision="bf16")
MUON = dataclasses.replace(ADAMW, num_steps=6, muon_lr=0.02, clip_norm=None)


def _data(folder: Path) -> TrainingData:
    return tiny.training_data(tiny.write_cache(folder / "cache", tiny.rows()), ADAMW)


class Stop(Exception):  # noqa: N818 - not an error: the machine is gone
    pass


@dataclasses.dataclass(frozen=True)
class Run:
    """One call of `train` by all ranks. Runs of one name go on from each other's checkpoints."""

    name: str
    config: TrainingConfig
    zero_stage: int
    stop_at: int = 0
    seed: int = 2


def _rank(rank: int, world_size: int, folder: str, runs: list[Run]) -> None:
    """One process; what each run that is not stopped found is `<name>.pt`."""
    from pipelines.backends.deepspeed import engine_factory

    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    meet = Path(folder) / f"meet-{runs[0].name}"
    torch.distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world_size)
    for run in runs:
        engines = []

        def make_engine(*given, run=run, engines=engines):
            engines.append(engine_factory(run.zero_stage)(*given))
            return engines[0]

        def on_step(metrics, run=run):
            if metrics["step"] == run.stop_at:
                raise Stop

        drafter, out = tiny.drafter("dspark", seed=run.seed), LocalStorage(f"{folder}/{run.name}")
        data = _data(Path(folder) / f"{run.name}-{rank}")
        try:
            state = train(drafter, data, run.config, make_engine, tiny.Memory(1, 7), out, on_step)
        except Stop:
            torch.distributed.barrier()
            continue
        weights = engines[0].weights()
        if rank == 0:
            torch.save((state.curves, weights), f"{folder}/{run.name}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class Case:
    config: TrainingConfig
    world_size: int
    zero_stage: int


CASES = {
    **{f"adamw-2-zero{stage}": Case(ADAMW, 2, stage) for stage in range(4)},
    "adamw": Case(ADAMW, 1, 1),
    "adamw-bf16": Case(BF16, 1, 1),
    "muon-2": Case(MUON, 2, 1),
    "muon-2-zero2": Case(MUON, 2, 2),
    "muon-zero3": Case(MUON, 1, 3),
    "muon-bf16": Case(BF16_MUON, 1, 1),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what every run left behind. The processes of one world size go through all of its cases: of each a whole run,
    and one that is stopped after its checkpoint and resumed. Then some change their world size and stage on the way."""
    folder = tmp_path_factory.mktemp("found")

    def spawn(world_size: int, runs: list[Run]) -> None:
        torch.multiprocessing.spawn(_rank, (world_size, str(folder), runs), nprocs=world_size)

    def cases(world_size: int) -> list[Run]:
        runs = []
        for name, case in CASES.items():
            if case.world_size == world_size:
                whole = Run(name, case.config, case.zero_stage)
                resumed = dataclasses.replace(whole, name=f"{name}-resumed", seed=99)
                runs += [whole, dataclasses.replace(whole, name=resumed.name, stop_at=5), resumed]
        return runs

    spawn(2, [*cases(2), Run("2-1", ADAMW, 1, stop_at=11), Run("2-local", ADAMW, 3, stop_at=11)])
    spawn(1, [*cases(1), Run("2-1", ADAMW, 3, seed=99), Run("1-2", ADAMW, 3, stop_at=11), Run("bf16-1-2", BF16, 1, stop_at=11)])
    spawn(2, [Run("1-2", ADAMW, 2, seed=99), Run("bf16-1-2", BF16, 3, seed=99)])
    return folder


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TrainingConfig], tuple[list[dict[str, float]], dict[str, torch.Tensor]]]:
    """Curves and weights of the local engine."""

    @functools.cache
    def run(config: TrainingConfig) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        folder, engines = tmp_path_factory.mktemp("local"), []

        def make_engine(*given):
            engines.append(LocalEngine(*given))
            return engines[0]

        out = LocalStorage(str(folder / "out"))
        state = train(tiny.drafter("dspark"), _data(folder), config, make_engine, tiny.Memory(1, 7), out, lambda metrics: None)
        return state.curves, engines[0].weights()

    return run


@pytest.mark.parametrize("name", CASES)
def test_sharded_engine_gives_the_numbers_of_the_local_one(found, local, name):
    config, zero_stage = CASES[name].config, CASES[name].zero_stage
    curves, weights = torch.load(found / f"{name}.pt", weights_only=True)
    resumed_curves, resumed_weights = torch.load(found / f"{name}-resumed.pt", weights_only=True)
    wanted_curves, wanted = local(config)
    drafter = tiny.drafter("dspark")
    before = {name: p.detach().float().clone() for name, p in drafter.named_parameters()}
    # Newton-Schulz runs in bf16, in another order of operations: a part in a hundred of each step. bf16 weights are rounded to
    # more than what a norm moves in these few steps, so of those only the matrices are compared.
    if config.precision == "bf16":
        before = {name: start for name, start in before.items() if name in drafter.hidden_matrices()}
    close = 0.15 if config.precision == "bf16" else 0.03 if config.muon_lr is not None else 1e-5
    for parameter, start in before.items():
        moved = (wanted[parameter] - start).norm()
        assert float((weights[parameter] - wanted[parameter]).norm() / moved) < close, parameter
    assert [p["loss"] for p in curves] == pytest.approx([p["loss"] for p in wanted_curves], rel=close / 10)
    if config.muon_lr is None and zero_stage > 0:  # without ZeRO DeepSpeed does not tell it
        assert [p["grad_norm"] for p in curves] == pytest.approx([p["grad_norm"] for p in wanted_curves], rel=max(close, 1e-4))
    if config.muon_lr is None:
        parts = [name for name in wanted_curves[9] if name.startswith("grad_norm_")]
        assert len(parts) == 6
        assert [curves[9][part] for part in parts] == pytest.approx([wanted_curves[9][part] for part in parts], rel=max(close, 1e-4))
    assert [p["label_coverage"] for p in curves] == pytest.approx([p["label_coverage"] for p in wanted_curves])
    assert resumed_curves == curves
    assert all(torch.equal(resumed_weights[parameter], weights[parameter]) for parameter in weights)


@pytest.mark.parametrize(
    ("name", "undisturbed", "close"), [("2-1", "adamw", 1e-5), ("1-2", "adamw", 1e-5), ("bf16-1-2", "adamw-bf16", 0.02)]
)
def test_training_resumed_with_other_workers_and_another_stage_goes_on_as_if_undisturbed(found, name, undisturbed, close):
    (curves, weights), (wanted_curves, wanted) = (torch.load(found / f"{run}.pt", weights_only=True) for run in (name, undisturbed))
    assert [p["step"] for p in curves] == list(range(1, 21))
    assert [p["loss"] for p in curves] == pytest.approx([p["loss"] for p in wanted_curves], rel=close)
    assert [p["lr"] for p in curves] == [p["lr"] for p in wanted_curves]
    assert all(torch.allclose(weights[parameter], wanted[parameter], atol=close) for parameter in weights)


def test_training_of_the_sharded_engine_goes_on_with_the_local_one(found, local):
    engines = []

    def make_engine(*given):
        engines.append(LocalEngine(*given))
        return engines[0]

    data, out = _data(found / "goes-on"), LocalStorage(str(found / "2-local"))
    state = train(tiny.drafter("dspark", seed=99), data, ADAMW, make_engine, tiny.Memory(1, 7), out, lambda metrics: None)
    wanted_curves, wanted = local(ADAMW)
    assert [p["loss"] for p in state.curves] == pytest.approx([p["loss"] for p in wanted_curves], rel=1e-5)
    assert all(torch.allclose(engines[0].weights()[name], tensor, atol=1e-5) for name, tensor in wanted.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_computes_in_the_fast_precision_of_the_processor(dtype, monkeypatch):
    """DeepSpeed's own function is asked: were it to look the precision up elsewhere, bf16 would be emulated again."""
    from deepspeed.runtime.zero.muon import original_muon

    import pipelines.backends.deepspeed as backend

    monkeypatch.setattr(original_muon, "ns_compute_dtype", original_muon.ns_compute_dtype)  # put back afterwards
    monkeypatch.setattr(backend, "fast_dtype", lambda: dtype)
    try:
        backend._optimizer(tiny.drafter("dspark"), MUON)
        assert original_muon.zeropower_via_newtonschulz5(torch.randn(12, 8), steps=5).dtype == dtype
    finally:
        torch.compiler.set_stance("default")
