"""The sharded engine gives the numbers of the local one: AdamW and Muon, one rank and two, whole runs and resumed ones."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from dspark.storage import LocalStorage
from dspark.training import LocalEngine, TrainingData, TrainState, train
from tests.dspark import tiny

# The seed orders the rows so that no step's gradient is nearly singular: Muon's bf16 iteration blows up what is lost there.
ADAMW = dataclasses.replace(tiny.TRAINING, precision="fp32", num_steps=6, checkpoint_every_steps=4, seed=8)
BF16_MUON = dataclasses.replace(ADAMW, muon_lr=0.02, clip_norm=None, precision="bf16")
MUON = dataclasses.replace(ADAMW, muon_lr=0.02, clip_norm=None)


def _data(folder: Path) -> TrainingData:
    return tiny.training_data(tiny.write_cache(folder / "cache", tiny.rows()), ADAMW)


class Stop(Exception):  # noqa: N818 - not an error: the machine is gone
    pass


def _rank(rank: int, world_size: int, folder: str, config, zero_stage: int) -> None:
    """One process: a whole run, and one that is stopped after its checkpoint and resumed."""
    from pipelines.backends.deepspeed import engine_factory

    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)

    def run(name: str, stop_at: int = 0, seed: int = 2) -> TrainState:
        engines = []

        def make_engine(*given):
            engines.append(engine_factory(zero_stage)(*given))
            return engines[0]

        def on_step(metrics):
            if metrics["step"] == stop_at:
                raise Stop

        drafter = tiny.drafter("dspark", seed=seed)
        state = train(
            drafter,
            _data(Path(folder) / f"{name}-{rank}"),
            config,
            make_engine,
            tiny.Memory(1, 7),
            LocalStorage(f"{folder}/{name}"),
            on_step,
        )
        state.best_weights = engines[0].weights()
        return state

    whole = run("whole")
    with pytest.raises(Stop):
        run("resumed", stop_at=5)
    resumed = run("resumed", seed=99)
    if rank == 0:
        torch.save([(s.curves, s.best_weights) for s in (whole, resumed)], f"{folder}/out.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("config", "world_size", "zero_stage"),
    [(ADAMW, 1, 1), (ADAMW, 2, 0), (ADAMW, 2, 3), (MUON, 2, 1), (MUON, 2, 2), (MUON, 1, 3), (BF16_MUON, 1, 1)],
    ids=["adamw", "adamw-2-zero0", "adamw-2-zero3", "muon-2", "muon-2-zero2", "muon-zero3", "muon-bf16"],
)
def test_sharded_engine_gives_the_numbers_of_the_local_one(tmp_path, config, world_size, zero_stage):
    torch.multiprocessing.spawn(_rank, (world_size, str(tmp_path), config, zero_stage), nprocs=world_size)
    (curves, weights), (resumed_curves, resumed_weights) = torch.load(tmp_path / "out.pt", weights_only=True)
    drafter, engines = tiny.drafter("dspark"), []

    def make_engine(*given):
        engines.append(LocalEngine(*given))
        return engines[0]

    before = {name: p.detach().float().clone() for name, p in drafter.named_parameters()}
    local = train(
        drafter,
        _data(tmp_path / "local"),
        config,
        make_engine,
        tiny.Memory(1, 7),
        LocalStorage(str(tmp_path / "out")),
        lambda metrics: None,
    )
    wanted = engines[0].weights()
    # Newton-Schulz runs in bf16, in another order of operations: a part in a hundred of each step. bf16 weights are rounded to
    # more than what a norm moves in these few steps, so of those only the matrices are compared.
    if config.precision == "bf16":
        before = {name: start for name, start in before.items() if name in drafter.hidden_matrices()}
    close = 1e-5 if config.muon_lr is None else 0.03 if config.precision == "fp32" else 0.15
    for name, start in before.items():
        moved = (wanted[name] - start).norm()
        assert float((weights[name] - wanted[name]).norm() / moved) < close, name
    assert [p["loss"] for p in curves] == pytest.approx([p["loss"] for p in local.curves], rel=close / 10)
    if config.muon_lr is None and zero_stage > 0:  # plain DeepSpeed does not tell it
        assert [p["grad_norm"] for p in curves] == pytest.approx([p["grad_norm"] for p in local.curves], rel=1e-4)
    assert resumed_curves == curves
    assert all(torch.equal(resumed_weights[name], weights[name]) for name in weights)
