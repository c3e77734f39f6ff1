"""DSpark: the DFlash backbone, a Markov head that makes drafting semi-autoregressive, and a confidence head (Eq. 4-8)."""

from torch import Tensor

from dspark.config import DSparkConfig, TargetShape
from dspark.drafters.base import FrozenTables
from dspark.drafters.dflash import DFlash
from dspark.drafters.heads import ConfidenceHead, MarkovHead


class DSpark(DFlash):
    """p_k ~ exp(U_k + B_k), and c_k from [h_k ; W_1[x_{k-1}]]."""

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
        self.markov_head = MarkovHead(shape.vocab_size, len(self.draft_ids_W), config.markov_rank)
        self.confidence_head = ConfidenceHead(shape.width, config.markov_rank)
        self.is_markov_ablated = False  # measurement only: drafts without the bias, confidences unchanged

    def _embed_previous(self, previous: Tensor) -> Tensor:
        return self.markov_head.embed(previous)

    def _bias(self, embedded: Tensor | None) -> Tensor | float:
        assert embedded is not None
        return 0.0 if self.is_markov_ablated else self.markov_head.bias(embedded)

    def _confidence(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        assert embedded is not None
        return self.confidence_head(hidden, embedded)
