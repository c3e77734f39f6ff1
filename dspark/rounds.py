"""Decoding rounds: the record that every report is computed from, and its Parquet form.

One `Round` is one draft-verify-accept cycle of one request. A round whose accepted prefix contains a stop token is stored
*cut* there: `proposed` and `accepted` end at the stop token and no bonus follows, so that later positions do not count as
rejections. The limit on new tokens cuts no round, and a stop token that only the limit kept out of the text ends none. Schema
version 2 (1 had no top_k and top_p); it stands in the file's metadata, and readers refuse another.
"""

import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROUND_SCHEMA_VERSION = 2
VERIFY_ALL = "verify_all"  # the policy of whole blocks


@dataclass(frozen=True)
class Round:
    request_id: str
    domain: str
    source: str  # benchmark name, or the split of the project's own prompts
    round_index: int
    temperature: float
    top_k: int
    top_p: float
    draft_mode: str  # probabilistic | greedy
    variant: str  # "" or what is not as trained: no_markov, or ngram for prompt lookup
    policy: str  # how the verified length was chosen, e.g. fixed_3
    context_length_tokens: int  # position of the anchor
    anchor_token: int
    draft_tokens: tuple[int, ...]  # `proposed` of them
    draft_probs: tuple[float, ...]  # p_d of each drafted token
    target_probs: tuple[float, ...]  # p_t of each drafted token given the drafted prefix
    confidence_logits: tuple[float, ...]  # empty when the drafter has no confidence head
    proposed: int
    accepted: int
    next_token: int | None  # correction or bonus; None when an accepted token was a stop token
    ended_by_stop: bool

    @property
    def setting(self) -> str:
        """How it was decoded, in one word: t0-greedy, t0-greedy-no_markov, t0.7-probabilistic-top_p0.9-fixed_3."""
        return setting_name(self.temperature, self.draft_mode, self.top_k, self.top_p, self.variant, self.policy)


def setting_name(temperature: float, draft_mode: str, top_k: int, top_p: float, variant: str, policy: str) -> str:
    """Rounds of one name may be pooled. What it does not name is not there: no filter, no ablation, whole blocks verified."""
    filters = [f"top_k{top_k}"] * (top_k > 0) + [f"top_p{top_p:g}"] * (top_p < 1.0)
    return "-".join([f"t{temperature:g}", draft_mode, *filters, *[variant] * bool(variant), *[policy] * (policy != VERIFY_ALL)])


_COLUMN_TYPES = {str: pa.string(), int: pa.int32(), float: pa.float64(), bool: pa.bool_()}


def _arrow_type(annotation: Any) -> pa.DataType:
    if annotation == tuple[int, ...]:
        return pa.list_(pa.int32())
    if annotation == tuple[float, ...]:
        return pa.list_(pa.float32())
    return _COLUMN_TYPES.get(annotation, pa.int32())  # the only union is int | None


SCHEMA = pa.schema(
    [pa.field(f.name, _arrow_type(f.type)) for f in dataclasses.fields(Round)],
    metadata={"schema": "dspark.round", "schema_version": str(ROUND_SCHEMA_VERSION)},
)


def to_parquet(rounds: Sequence[Round]) -> bytes:
    """A Parquet file of these rounds."""
    columns = {f.name: [getattr(r, f.name) for r in rounds] for f in dataclasses.fields(Round)}
    sink = io.BytesIO()
    pq.write_table(pa.table(columns, schema=SCHEMA), sink)
    return sink.getvalue()


def from_parquet(data: bytes) -> list[Round]:
    """The rounds of a file; ValueError when its schema version is not this one."""
    table = pq.read_table(io.BytesIO(data))
    version = (table.schema.metadata or {}).get(b"schema_version", b"none").decode()
    if version != str(ROUND_SCHEMA_VERSION):
        raise ValueError(
            f"rounds file: schema version {version}, this version reads {ROUND_SCHEMA_VERSION}. Fix: run the step that made it again"
        )

    def values(row: dict[str, Any]) -> dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}

    return [Round(**values(row)) for row in table.to_pylist()]
