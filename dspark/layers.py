"""The drafter's building blocks: RMSNorm, rotary positions, attention over [target context ; own block], MLP, layer.

Module and parameter names are those of the released DSpark checkpoints, so that a state dict needs no renaming.

Shapes: B batch, T context tokens, A anchors (blocks), K block positions, D width, N query heads, G key/value heads,
R = N / G query heads per key/value head, H head width, P rotated width.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark.config import LinearScaling, Llama3Scaling, ProportionalScaling, Rope, TargetShape, YarnScaling

TILE_ROWS = 2048  # rows of a weight that are converted at once
FEW_ROWS = 64  # above, the copy that turns columns into rows again costs more than they save
FULL_COLUMNS = (1, 2, 4, 5, 6, 8, 16)  # above, multiples of 8: 15 columns of fp32 take MKL twice as long as 16


def fast_dtype() -> torch.dtype:
    """bf16 where the processor has instructions for it; elsewhere they are emulated, several times slower than fp32."""
    has_bf16 = torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_bf16 else torch.float32


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which `project` and `project_back` are fastest for weights of this one."""
    return fast_dtype() if dtype == torch.bfloat16 else dtype


def project(x: Tensor, weight_VD: Tensor) -> Tensor:
    """x [M, D] in `product_dtype` times the transpose of a large weight, which is converted tile by tile: [M, V], at least fp32."""
    if x.dtype == weight_VD.dtype:
        out = x @ weight_VD.T
        return out if out.dtype == torch.float64 else out.float()
    out = x.new_empty(len(x), len(weight_VD))
    for start in range(0, len(weight_VD), TILE_ROWS):
        out[:, start : start + TILE_ROWS] = x @ weight_VD[start : start + TILE_ROWS].to(x.dtype).T
    return out


def project_back(y: Tensor, weight_VD: Tensor) -> Tensor:
    """y [M, V] in `product_dtype` times a large weight: [M, D]."""
    if y.dtype == weight_VD.dtype:
        return y @ weight_VD
    out = y.new_zeros(len(y), weight_VD.shape[1])
    for start in range(0, len(weight_VD), TILE_ROWS):
        out.addmm_(y[:, start : start + TILE_ROWS], weight_VD[start : start + TILE_ROWS].to(y.dtype))
    return out


def product(x: Tensor, weight_ED: Tensor) -> Tensor:
    """x [..., D] times the transpose of a weight: [..., E]. Few rows become columns, and a single one a vector: oneDNN's bf16 is quicker
    so on a CPU, by 7 % of a whole step of one token of a 135M target, 1 % of one of eight."""
    rows_MD = x.reshape(-1, x.shape[-1])
    if len(rows_MD) > FEW_ROWS:
        return nn.functional.linear(x, weight_ED)
    return as_rows(weight_ED @ as_columns(rows_MD), len(rows_MD)).reshape(*x.shape[:-1], len(weight_ED))


def as_columns(rows_MD: Tensor) -> Tensor:
    """[D, M], or a single row as a vector. In fp32 on a CPU with as many columns of zeros behind them as make them quick."""
    num_rows = len(rows_MD)
    if rows_MD.dtype == torch.float32 and rows_MD.device.type == "cpu":
        full = next((size for size in FULL_COLUMNS if size >= num_rows), -(-num_rows // 8) * 8)
        rows_MD = nn.functional.pad(rows_MD, (0, 0, 0, full - num_rows))
    return rows_MD.T.squeeze(1)


def as_rows(columns_EM: Tensor, num_rows: int) -> Tensor:
    """[M, E] of what a matrix times `as_columns` came to."""
    return columns_EM.view(len(columns_EM), -1)[:, :num_rows].T


class Linear(nn.Linear):
    """Without a bias; quick with few rows, as decoding has them."""

    def __init__(self, in_width: int, out_width: int) -> None:
        super().__init__(in_width, out_width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight)


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in at least fp32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0) -> Tensor:
    """RMSNorm whose factor is (offset + weight); statistics in fp32, or fp64 when x is."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * (offset + weight.to(wide.dtype))).to(x.dtype)


def inverse_frequencies(rope: Rope, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Radians by which one position turns each pair of components, [P / 2]; the formulas are those of transformers' ROPE_INIT_FUNCTIONS."""
    width, scaling = rope.rotated_width, rope.scaling
    inverse = rope.theta ** (-torch.arange(0, width, 2, dtype=dtype, device=device) / width)
    if scaling is None:
        return inverse
    if isinstance(scaling, LinearScaling):
        return inverse / scaling.factor
    if isinstance(scaling, ProportionalScaling):
        return torch.where(torch.arange(width // 2, device=device) < scaling.turned_pairs, inverse / scaling.factor, 0.0)
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_max_position_embeddings * inverse / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:
        # The index whose pair makes so many turns within the original context.
        low, high = (
            width * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        kept = 1 - (torch.arange(width // 2, dtype=dtype, device=device) - low) / (high - low or 0.001)
    kept = kept.clamp(0, 1)
    return inverse * (kept + (1 - kept) / scaling.factor)


@dataclass(frozen=True)
class Rotation:
    """cos and sin of the rotary angles, [..., P], halves repeated (NeoX style)."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def at(positions: Tensor, rope: Rope, dtype: torch.dtype) -> "Rotation":
        """Angles of integer positions [...]; computed in fp32 (fp64 for an fp64 model)."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        angles = positions[..., None].to(wide) * inverse_frequencies(rope, wide, positions.device)
        angles = torch.cat([angles, angles], dim=-1)
        scale = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
        return Rotation((angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype))

    def apply(self, x: Tensor) -> Tensor:
        """Rotates the first P components of x [..., heads, H] whose leading dimensions are those of the positions."""
        width = self.cos.shape[-1]
        head, rest = x[..., :width], x[..., width:]
        turned = torch.cat([-head[..., width // 2 :], head[..., : width // 2]], dim=-1)
        head = head * self.cos[..., None, :] + turned * self.sin[..., None, :]
        return torch.cat([head, rest], dim=-1) if rest.shape[-1] else head


def attend(
    query_BAKNH: Tensor,
    own_key_BAKGH: Tensor,
    own_value_BAKGH: Tensor,
    context_key_BTGH: Tensor,
    context_value_BTGH: Tensor,
    visible_BAKT: Tensor,
) -> Tensor:
    """Attention of block rows over the context that is visible to them (or, [B,A,1,T], to their block) and over all rows of
    their own block.

    One softmax over both parts, T + K columns a row: other blocks' columns are never computed, so the cost does not grow
    with the square of the number of blocks. Query heads of one key/value head are folded into rows. Returns [B,A,K,N*H].
    """
    B, A, K, N, H = query_BAKNH.shape
    G, T = own_key_BAKGH.shape[3], context_key_BTGH.shape[1]
    R = N // G
    # [B, G, A, R*K, H]: rows of one block together, so that both products are plain batched matrix products.
    query = query_BAKNH.view(B, A, K, G, R, H).permute(0, 3, 1, 4, 2, 5).reshape(B, G, A, R * K, H) * H**-0.5
    own_key, own_value = (x.permute(0, 3, 1, 2, 4) for x in (own_key_BAKGH, own_value_BAKGH))  # [B, G, A, K, H]
    context_key, context_value = (x.transpose(1, 2) for x in (context_key_BTGH, context_value_BTGH))  # [B, G, T, H]
    context_score = (query.reshape(B, G, A * R * K, H) @ context_key.transpose(-1, -2)).view(B, G, A, R, K, T)
    context_score = context_score.masked_fill(~visible_BAKT[:, None, :, None], float("-inf")).view(B, G, A, R * K, T)
    own_score = query @ own_key.transpose(-1, -2)
    score = torch.cat([context_score, own_score], dim=-1)
    wide = torch.float64 if score.dtype == torch.float64 else torch.float32
    weight = score.softmax(-1, dtype=wide).to(query.dtype)
    mixed = (weight[..., :T].reshape(B, G, A * R * K, T) @ context_value).view(B, G, A, R * K, H) + weight[..., T:] @ own_value
    return mixed.view(B, G, A, R, K, H).permute(0, 2, 4, 1, 3, 5).reshape(B, A, K, N * H)


class BlockAttention(nn.Module):
    """Keys and values are those of [H_ctx ; block] (Eq. 2-3); queries and keys are normalised per head, then rotated."""

    def __init__(self, shape: TargetShape, input_width: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_width = shape.num_heads, shape.num_kv_heads, shape.head_width
        self.q_proj = Linear(input_width, shape.num_heads * shape.head_width)
        self.k_proj = Linear(input_width, shape.num_kv_heads * shape.head_width)
        self.v_proj = Linear(input_width, shape.num_kv_heads * shape.head_width)
        self.o_proj = Linear(shape.num_heads * shape.head_width, shape.width)
        self.q_norm = RMSNorm(shape.head_width, shape.norm_epsilon)
        self.k_norm = RMSNorm(shape.head_width, shape.norm_epsilon)

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[..., D] -> [..., N, H]."""
        return rotation.apply(self.q_norm(self.q_proj(x).view(*x.shape[:-1], self.num_heads, self.head_width)))

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """[..., D] -> keys and values [..., G, H]; used for the context (H_ctx, un-normed) and for block rows alike."""
        heads = (*x.shape[:-1], self.num_kv_heads, self.head_width)
        return rotation.apply(self.k_norm(self.k_proj(x).view(heads))), self.v_proj(x).view(heads)

    def forward(self, x_BAKD: Tensor, rotation: Rotation, context: tuple[Tensor, Tensor], visible_BAKT: Tensor) -> Tensor:
        query = self.queries(x_BAKD, rotation)
        return self.o_proj(attend(query, *self.keys_values(x_BAKD, rotation), *context, visible_BAKT))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, mlp_width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, mlp_width)
        self.up_proj = Linear(width, mlp_width)
        self.down_proj = Linear(mlp_width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    """Pre-norm layer. The context bypasses the input norm: every layer projects the same H_ctx."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, shape.norm_epsilon)
        self.self_attn = BlockAttention(shape, shape.width)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.norm_epsilon)
        self.mlp = MLP(shape.width, shape.mlp_width)

    def forward(self, x_BAKD: Tensor, rotation: Rotation, context: tuple[Tensor, Tensor], visible_BAKT: Tensor) -> Tensor:
        x_BAKD = x_BAKD + self.self_attn(self.input_layernorm(x_BAKD), rotation, context, visible_BAKT)
        return x_BAKD + self.mlp(self.post_attention_layernorm(x_BAKD))
