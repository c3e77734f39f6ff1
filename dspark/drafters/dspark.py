"""DSpark: the DFlash backbone, a sequential head that makes drafting semi-autoregressive, and a confidence head (Eq. 4-8)."""

from dspark.config import DSparkConfig, TargetShape
from dspark.drafters.base import FrozenTables
from dspark.drafters.dflash import DFlash
from dspark.drafters.heads import SEQUENTIAL_HEADS, ConfidenceHead


class DSpark(DFlash):
    """p_k ~ exp(U_k + B_k), and c_k from [h_k ; W_1[x_{k-1}]]. Without a sequential head B_k = 0 and c_k is of h_k alone."""

    config: DSparkConfig

    def make_parameters(self, shape: TargetShape, tables: FrozenTables) -> None:
        super().make_parameters(shape, tables)
        config, rank = self.config, 0
        if config.sequential_head != "none":
            rank = config.markov_rank
            self.markov_head = SEQUENTIAL_HEADS[config.sequential_head](shape.vocab_size, len(self.draft_ids_W), rank, shape.width)
        self.confidence_head = ConfidenceHead(shape.width, rank)
