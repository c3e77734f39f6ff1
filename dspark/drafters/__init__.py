"""The one table of drafters: kind -> class. A new drafter is a config record, a module here, a row and a yaml."""

from torch import Tensor

from dspark.config import DrafterConfig, TargetShape
from dspark.drafters.base import FrozenTables
from dspark.drafters.dflash import DFlash
from dspark.drafters.dspark import DSpark

DRAFTERS = {"dflash": DFlash, "dspark": DSpark}


def build_drafter(
    config: DrafterConfig,
    shape: TargetShape,
    tapped_layers: tuple[int, ...],
    mask_token_id: int,
    tables: FrozenTables,
    draft_ids: Tensor | None,
) -> DFlash:
    """A drafter with unset weights; `initialise(seed)` or load a state dict."""
    return DRAFTERS[config.kind](config, shape, tapped_layers, mask_token_id, tables, draft_ids)  # type: ignore[arg-type]
