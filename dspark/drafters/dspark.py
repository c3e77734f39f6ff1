"""DSpark: the DFlash backbone, a sequential head that makes drafting semi-autoregressive, and a confidence head (Eq. 4-8)."""

from torch import Tensor

from dspark.config import DSparkConfig, TargetShape
from dspark.drafters.base import FrozenTables
from dspark.drafters.dflash import DFlash
from dspark.drafters.heads import SEQUENTIAL_HEADS, ConfidenceHead


class DSpark(DFlash):
    """p_k ~ exp(U_k + B_k), and c_k from [h_k ; W_1[x_{k-1}]]. Without a sequential head B_k = 0 and c_k is of h_k alone."""

    def __init__(
        self,
        config: DSparkConfig,
        shape: TargetShape,
        tapped_layers: tuple[int, ...],
        mask_token_id: int,
        tables: FrozenTables,
        draft_ids: Tensor | None,
    ) -> None:
        super().__init__(config, shape, tapped_layers, mask_token_id, tables, draft_ids)
        rank = 0
        if config.sequential_head != "none":
            rank = config.markov_rank
            self.markov_head = SEQUENTIAL_HEADS[config.sequential_head](shape.vocab_size, len(self.draft_ids_W), rank, shape.width)
        self.confidence_head = ConfidenceHead(shape.width, rank)
