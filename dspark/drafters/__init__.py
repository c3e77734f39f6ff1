"""The one table of drafters: kind -> class. A new drafter is a config record, a module here, a row and a yaml."""

from torch import Tensor

from dspark.config import DrafterConfig, TargetShape
from dspark.drafters.base import Drafter, FrozenTables
from dspark.drafters.dflash import DFlash
from dspark.drafters.dspark import DSpark
from dspark.drafters.eagle3 import Eagle3
from dspark.drafters.mtp import Mtp
from dspark.families import check_tapped_layers

DRAFTERS = {"dflash": DFlash, "dspark": DSpark, "eagle3": Eagle3, "mtp": Mtp}


def build_drafter(
    config: DrafterConfig,
    shape: TargetShape,
    tapped_layers: tuple[int, ...],
    mask_token_id: int,
    tables: FrozenTables,
    draft_ids: Tensor | None,
) -> Drafter:
    """A drafter with unset weights; `initialise(seed)` or load a state dict."""
    check_tapped_layers(tapped_layers, shape.num_layers, config.kind)
    return DRAFTERS[config.kind](config, shape, tapped_layers, mask_token_id, tables, draft_ids)
