"""The one door to DeepSpeed: a `TrainEngine` that shards optimiser, gradients or parameters (ZeRO 0-3).

It must give the numbers of `dspark.training.LocalEngine`: the loss arrives already divided by the global denominators, so
DeepSpeed's own averaging over ranks and micro-batches is undone; the learning rate is set by the loop before each step. In
bf16 it does so loosely: DeepSpeed keeps gradients and Muon's momentum in bf16, the local engine its momentum in fp32.
"""

import importlib
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

import deepspeed
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)

from dspark.config import TrainingConfig
from dspark.drafters.base import Drafter, TrainingBatch
from dspark.layers import fast_dtype
from dspark.losses import Denominators
from dspark.training import ADAMW_STATES, DTYPES, MUON_MOMENTUM, DrafterLoss, load_adamw, part_norms, save_adamw

TAG = "engine"


def engine_factory(zero_stage: int) -> Callable[[DrafterLoss, TrainingConfig, int], "DeepSpeedEngine"]:
    """What the training loop calls to wrap its drafter."""
    return lambda module, config, num_micro_batches: DeepSpeedEngine(module, config, num_micro_batches, zero_stage)


def _optimizer(drafter: Drafter, config: TrainingConfig) -> tuple[list[float], torch.optim.Optimizer]:
    """Peak learning rates of the groups, and a torch optimiser: DeepSpeed's own Adam compiles C++ at its first step."""
    if config.muon_lr is None:
        return [config.lr], torch.optim.AdamW(drafter.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True)
    from deepspeed.runtime.zero.muon import original_muon
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    setattr(original_muon, "ns_compute_dtype", lambda _method: fast_dtype())  # noqa: B010 - it takes every CPU for one with bf16 instructions
    if not torch.cuda.is_available():
        torch.compiler.set_stance("force_eager")  # Muon's few matrix products gain nothing from being compiled on a CPU
    matrices = drafter.hidden_matrices()
    muon: list[Tensor] = []
    rest: list[Tensor] = []
    for name, parameter in drafter.named_parameters():
        (muon if name in matrices else rest).append(parameter)
        setattr(parameter, "use_muon", name in matrices)  # noqa: B010 - ZeRO reads it: it orthogonalises, then cuts into partitions
    groups = [
        {"params": muon, "use_muon": True, "lr": config.muon_lr, "momentum": MUON_MOMENTUM, "ns_method": "standard"},
        {"params": rest, "use_muon": False, "lr": config.lr, "betas": (0.9, 0.999), "eps": 1e-8},
    ]
    for group in groups:
        group["weight_decay"] = config.weight_decay
    return [config.muon_lr, config.lr], MuonWithAuxAdam(groups, torch.optim.AdamW, {"fused": True})


class DeepSpeedEngine:
    """One rank of the sharded engine. torch.distributed must be initialised."""

    def __init__(self, module: DrafterLoss, config: TrainingConfig, num_micro_batches: int, zero_stage: int) -> None:
        # DeepSpeed would compile a shared-memory operator (a minute, and a compiler) that training does not use.
        # `deepspeed.comm.torch` as an attribute is torch itself, so the module is asked for by name.
        setattr(importlib.import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None)  # noqa: B010
        deepspeed.init_distributed(dist_backend=torch.distributed.get_backend())
        self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._scale, self._zero_stage = float(self.world_size * num_micro_batches), zero_stage
        module = module.to(DTYPES[config.precision])
        self._peaks, optimizer = _optimizer(module.drafter, config)
        self._has_muon = config.muon_lr is not None
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": config.batch_sequences // self.world_size // num_micro_batches,
                "gradient_accumulation_steps": num_micro_batches,
                "gradient_clipping": config.clip_norm or 0.0,
                "bf16": {"enabled": config.precision == "bf16"},
                "zero_optimization": {"stage": zero_stage, **({"reduce_scatter": False} if self._has_muon and zero_stage == 3 else {})},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
            },
        )
        self.device = self._engine.device

    def forward(self, batch: TrainingBatch, denominators: Denominators) -> tuple[Tensor, Tensor]:
        return self._engine(batch, denominators)

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss * self._scale)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()

    def part_norms(self) -> dict[str, float]:
        # Muon's groups are orthogonalised by now: see `step`.
        return {} if self._has_muon else part_norms((name, safe_get_full_grad(p)) for name, p in self._named_parameters())

    def step(self, schedule: float) -> float | None:
        for group, peak in zip(self._engine.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = schedule * peak
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        # DeepSpeed measures Muon's groups after it has orthogonalised them: no gradient norm, unless it is not finite.
        return None if norm is None or (self._has_muon and math.isfinite(norm)) else float(norm)

    def all_sum(self, values: Tensor) -> Tensor:
        summed = values.clone()
        torch.distributed.all_reduce(summed)
        return summed

    def weights(self) -> dict[str, Tensor]:
        state = self._engine._zero3_consolidated_16bit_state_dict() if self._zero_stage == 3 else self._engine.module.state_dict()
        return {name.removeprefix("drafter."): tensor.detach().clone() for name, tensor in (state or {}).items()}

    def save(self, folder: Path) -> None:
        if self._has_muon:
            self._engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)
            return
        state = {name: self._whole(parameter) for name, parameter in self._named_parameters()}
        if self.rank == 0:
            save_adamw(folder, state, self._num_steps())

    def load(self, folder: Path) -> None:
        if self._has_muon:
            self._engine.load_checkpoint(str(folder), tag=TAG)
            return
        state, num_steps = load_adamw(folder)
        for flat in self._flat_parameters():  # DeepSpeed makes these at the first step
            new = {key: torch.zeros_like(flat) for key in ADAMW_STATES[1:]}
            self._base_optimizer().state[flat] = {"step": torch.tensor(float(num_steps), device=flat.device), **new}
        if self._zero_stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, parameter in self._named_parameters():
            self._set(parameter, state[name])

    def _named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name.removeprefix("drafter."), parameter) for name, parameter in self._engine.module.named_parameters()]

    def _base_optimizer(self) -> torch.optim.Optimizer:
        """torch's own, below what DeepSpeed wraps around it."""
        return getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)

    def _flat_parameters(self) -> list[Tensor]:
        """What torch's optimizer steps: this rank's shards."""
        if self._zero_stage == 3:
            return self._engine.optimizer.fp32_partitioned_groups_flat
        return [flat for group in self._base_optimizer().param_groups for flat in group["params"]]

    def _num_steps(self) -> int:
        return int(next(iter(self._base_optimizer().state.values()))["step"])

    def _whole(self, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
        """A parameter and its AdamW states in fp32, gathered from all ranks."""
        if self._is_sharded(parameter):
            found = [safe_get_full_fp32_param(parameter), *(safe_get_full_optimizer_state(parameter, key) for key in ADAMW_STATES[1:])]
        else:
            found = [parameter.detach(), *(self._base_optimizer().state[parameter][key] for key in ADAMW_STATES[1:])]
        return {key: tensor.float().cpu().reshape(_shape(parameter)).clone() for key, tensor in zip(ADAMW_STATES, found, strict=True)}

    def _set(self, parameter: torch.nn.Parameter, state: dict[str, Tensor]) -> None:
        state = {key: tensor.to(self.device) for key, tensor in state.items()}
        master = state[ADAMW_STATES[0]]
        if hasattr(parameter, "ds_id"):  # ZeRO-3; its call that sets a whole parameter takes none that is not cut into equal parts
            part = {key: self._part(parameter, tensor) for key, tensor in state.items()}
            safe_set_local_fp32_param(parameter, part[ADAMW_STATES[0]])
            for key in ADAMW_STATES[1:]:
                safe_set_local_optimizer_state(parameter, part[key], key)
        elif self._is_sharded(parameter):
            safe_set_full_fp32_param(parameter, master)
            for key in ADAMW_STATES[1:]:
                safe_set_full_optimizer_state(parameter, state[key], key)
        else:
            for key in ADAMW_STATES[1:]:
                self._base_optimizer().state[parameter][key].copy_(state[key])
        gathered = deepspeed.zero.GatheredParameters([parameter], modifier_rank=0) if self._zero_stage == 3 else nullcontext()
        with gathered, torch.no_grad():
            if self._zero_stage < 3 or self.rank == 0:
                parameter.copy_(master)

    def _part(self, parameter: Any, tensor: Tensor) -> Tensor:
        """What this rank holds of a whole parameter; the last part is padded with zeros."""
        num_values = parameter.ds_tensor.numel()
        padded = torch.nn.functional.pad(tensor.flatten(), (0, num_values * self.world_size - tensor.numel()))
        return padded[self.rank * num_values : (self.rank + 1) * num_values]

    def _is_sharded(self, parameter: torch.nn.Parameter) -> bool:
        return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def _shape(parameter: torch.nn.Parameter) -> torch.Size:
    """Of the whole parameter, of which ZeRO-3 leaves nothing outside of a forward."""
    return getattr(parameter, "ds_shape", parameter.shape)
