"""vLLM's DSpark class with Sequential Temperature Scaling, which vLLM has not: confidence k is sigmoid(logit / T_k).

The temperatures stand in the drafter's config.json, `sts_temperatures`, one a block position. Without the key everything is
vLLM's own. A single temperature could be folded into the confidence head's weights; one a position cannot, since one head
serves all positions. Registered by vllm_plugin.py.

Shapes: R requests, N drafted tokens a request (`num_speculative_tokens`, at most the block size).
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM


class CalibratedQwen3DSpark(Qwen3DSparkForCausalLM):
    """ValueError when there are fewer temperatures than drafted tokens, or one is not a finite number above 0."""

    sts_temperatures_N: torch.Tensor | None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        assert vllm_config.speculative_config is not None
        num_drafted = vllm_config.speculative_config.num_speculative_tokens
        temperatures_N = None
        found = getattr(self.config, "sts_temperatures", None)
        if found is not None:
            temperatures_N = torch.tensor(found, dtype=torch.float32)[:num_drafted]
            if temperatures_N.shape != (num_drafted,) or not ((temperatures_N > 0) & temperatures_N.isfinite()).all():
                raise ValueError(
                    f"config.json sts_temperatures: {found}: finite numbers above 0, one for each of the {num_drafted} drafted tokens. "
                    "Fix: take the drafter's own config.json, or draft no more tokens than its block_size"
                )
        self.register_buffer("sts_temperatures_N", temperatures_N, persistent=False)  # moves with the module, is no weight to load

    def compute_confidence(self, head_hidden: torch.Tensor, markov_embed: torch.Tensor) -> torch.Tensor:
        """[R * N], the N steps of a request one after the other; tensor operations alone, for it is captured in a CUDA graph."""
        if self.sts_temperatures_N is None:
            return super().compute_confidence(head_hidden, markov_embed)
        confidence_head: Any = self.model.confidence_head  # its weights are there: vLLM asks no drafter without them
        logits_RN = confidence_head(head_hidden, markov_embed).view(-1, len(self.sts_temperatures_N))
        return torch.sigmoid(logits_RN / self.sts_temperatures_N).flatten()
