"""Slow, independent versions of every equation: loops that anyone can check, in fp64, one sequence at a time.

Nothing here calls the code under test, except that the drafter's oracle takes its visibility from
`blocks.attention_mask`, which `shared/cases` and `visibility` check on their own.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy.stats
import torch
from torch import Tensor

# --- block geometry ---------------------------------------------------------------------------------------------------


def labels(loss_mask: Sequence[int], anchor: int, block_size: int) -> list[int]:
    """Label positions of a block: a+1, a+2, ... up to the first one that is unsupervised or outside; then -1."""
    result: list[int] = []
    for k in range(block_size):
        position = anchor + 1 + k
        is_open = not result or result[-1] >= 0
        result.append(position if is_open and position < len(loss_mask) and loss_mask[position] else -1)
    return result


def visibility(anchors: Sequence[int], num_tokens: int, block_size: int) -> list[list[bool]]:
    """Row (block i, k) sees context t < a_i and the rows of block i."""
    columns = [("context", t) for t in range(num_tokens)] + [("block", j) for j in range(len(anchors)) for _ in range(block_size)]
    rows = [i for i in range(len(anchors)) for _ in range(block_size)]
    return [[index < anchors[i] if part == "context" else index == i for part, index in columns] for i in rows]


# --- loss (Eq. 8-12) --------------------------------------------------------------------------------------------------


@dataclass
class Loss:
    """Numerators and denominators over all rows; accept[a][k] is None where the row does not count."""

    ce: float = 0.0
    tv: float = 0.0
    confidence: float = 0.0
    sum_weights: float = 0.0
    sum_weights_ce: float = 0.0
    accept: list[list[float | None]] = field(default_factory=list)

    def total(self, alphas: tuple[float, float, float]) -> float:
        terms = ((self.ce, self.sum_weights_ce), (self.tv, self.sum_weights), (self.confidence, self.sum_weights))
        return sum(alpha * (n / d if d else 0.0) for alpha, (n, d) in zip(alphas, terms, strict=True))

    def accepted_length(self) -> float | None:
        lengths = []
        for row in self.accept:
            rates = [rate for rate in row if rate is not None]
            if rates:
                lengths.append(sum(math.prod(rates[: k + 1]) for k in range(len(rates))))
        return 1.0 + sum(lengths) / len(lengths) if lengths else None


def loss(
    draft_logits: Sequence,
    target_logits: Sequence,
    label_ids: Sequence,
    confidence_logits: Sequence | None,
    draft_ids: Sequence[int],
    gamma: float,
) -> Loss:
    """Rows [A][K]; draft logits over the draft vocabulary, target logits over the whole one; label -1 = does not count.

    Everything is computed over the whole vocabulary, where p_d is 0 outside `draft_ids`: c* = sum_v min(p_d, p_t).
    """
    result = Loss()
    for a, label_row in enumerate(label_ids):
        result.accept.append([])
        for k, label in enumerate(label_row):
            if label < 0:
                result.accept[-1].append(None)
                continue
            p_target = softmax(target_logits[a][k])
            p_draft = [0.0] * len(p_target)
            for i, p in zip(draft_ids, softmax(draft_logits[a][k]), strict=True):
                p_draft[i] = p
            weight = math.exp(-k / gamma)
            accept = min(max(sum(min(p, q) for p, q in zip(p_draft, p_target, strict=True)), 0.0), 1.0)
            result.accept[-1].append(accept)
            result.sum_weights += weight
            result.tv += weight * sum(abs(p - q) for p, q in zip(p_draft, p_target, strict=True))
            if label in draft_ids:
                result.sum_weights_ce += weight
                result.ce -= weight * math.log(p_draft[label])
            if confidence_logits is not None:
                z = confidence_logits[a][k]
                log_c, log_not_c = -math.log1p(math.exp(-z)), -math.log1p(math.exp(z))
                result.confidence -= weight * (accept * log_c + (1.0 - accept) * log_not_c)
    return result


def softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    terms = [math.exp(x - top) for x in logits]
    return [term / sum(terms) for term in terms]


def dense_loss(batch, head, hidden_BAKD: Tensor, bias_BAKR: Tensor | None, bias_weight_WR: Tensor | None, confidence_BAK, config) -> Tensor:
    """Eq. 12 of one batch by autograd over whole [rows, vocabulary] tensors, as the paper's code computes it: both softmaxes in
    full, for the loss and again for the confidence label."""
    valid = batch.valid_BAK
    wide = torch.float64 if hidden_BAKD.dtype == torch.float64 else torch.float32
    decay_K = torch.exp(-torch.arange(valid.shape[-1], dtype=wide) / config.position_decay)
    weight = (valid * decay_K)[valid]
    draft = soft_cap((hidden_BAKD[valid] @ head.weight_WD.T).to(wide), head.soft_cap)
    if bias_BAKR is not None:
        draft = draft + (bias_BAKR[valid] @ bias_weight_WR.T).to(wide)
    target = soft_cap((batch.final_BAKD[valid] @ head.weight_WD.T).to(wide), head.soft_cap)
    p_target = (target - batch.log_sum_exp_BAK[valid][:, None]).exp()
    outside = (1.0 - p_target.sum(-1)).clamp_min(0.0)
    labels = batch.label_BAK[valid]
    inside = (head.ids_W[None] == labels[:, None]).any(-1)
    place = torch.searchsorted(head.ids_W, labels).clamp_max(len(head.ids_W) - 1)
    ce = -draft.log_softmax(-1).gather(-1, place[:, None])[:, 0]
    soft_ce = -(p_target * draft.log_softmax(-1)).sum(-1) if config.alpha_soft_ce else torch.zeros_like(ce)
    tv = (draft.softmax(-1) - p_target).abs().sum(-1) + outside
    with torch.no_grad():
        p_target = (target - batch.log_sum_exp_BAK[valid][:, None]).exp()
        accept = 1.0 - 0.5 * ((draft.softmax(-1) - p_target).abs().sum(-1) + outside)
    confidence = torch.nn.functional.binary_cross_entropy_with_logits(confidence_BAK[valid], accept, reduction="none")
    terms = config.alpha_soft_ce * soft_ce + config.alpha_tv * tv + config.alpha_confidence * confidence
    return config.alpha_ce * (weight * inside * ce).sum() / (weight * inside).sum() + (weight * terms).sum() / weight.sum()


# --- the drafter (Eq. 2-7), with a dense mask ---------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + epsilon) * weight


def rotary_frequency(rope, i: int) -> float:
    """Radians a position of pair i. Linear: divided by the factor. Llama 3.1: by wavelength, smoothly. YaRN: by index, on a ramp."""
    frequency, scaling, width = rope.theta ** (-2 * i / rope.rotated_width), rope.scaling, rope.rotated_width
    if scaling is None:
        return frequency
    if scaling.rope_type == "linear":
        return frequency / scaling.factor
    if scaling.rope_type == "proportional":
        return frequency / scaling.factor if i < scaling.turned_pairs else 0.0
    original = scaling.original_max_position_embeddings
    if scaling.rope_type == "llama3":
        wavelength = 2 * math.pi / frequency
        if wavelength < original / scaling.high_freq_factor:
            return frequency
        if wavelength > original / scaling.low_freq_factor:
            return frequency / scaling.factor
        smooth = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        return (1 - smooth) * frequency / scaling.factor + smooth * frequency
    # original * theta^(-2j/width) = 2 pi * turns, solved for j
    low, high = (width / 2 * math.log(original / (2 * math.pi * turns), rope.theta) for turns in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    divided = min(max((i - low) / (high - low), 0.0), 1.0)
    return divided * frequency / scaling.factor + (1 - divided) * frequency


def rotate(x: Tensor, position: int, rope) -> Tensor:
    """Rotary embedding of one head vector: components i and i + P/2 turn, the components from P on do not."""
    half, result = rope.rotated_width // 2, x.clone()
    scale = rope.scaling.attention_factor if rope.scaling is not None and rope.scaling.rope_type == "yarn" else 1.0
    for i in range(half):
        angle = position * rotary_frequency(rope, i)
        result[i] = scale * (x[i] * math.cos(angle) - x[i + half] * math.sin(angle))
        result[i + half] = scale * (x[i + half] * math.cos(angle) + x[i] * math.sin(angle))
    return result


def attention(query: Tensor, keys: Tensor, values: Tensor, mask: np.ndarray) -> Tensor:
    """Dense attention of [rows, N, H] over [columns, G, H]; query head n reads key/value head n * G // N. -> [rows, N*H]."""
    num_rows, N, H = query.shape
    G, out = keys.shape[1], torch.zeros_like(query)
    for row, n in itertools.product(range(num_rows), range(N)):
        seen = np.flatnonzero(mask[row])
        score = torch.stack([query[row, n] @ keys[column, n * G // N] for column in seen]) / math.sqrt(H)
        share = torch.exp(score - score.max())
        share = share / share.sum()
        for weight, column in zip(share, seen, strict=True):
            out[row, n] += weight * values[column, n * G // N]
    return out.reshape(num_rows, N * H)


@dataclass
class BlockRows:
    """Of every block row: logits over the draft vocabulary [A, K, W] and the confidence logit [A, K] (None without head)."""

    logits_AKW: Tensor
    confidence_AK: Tensor | None


def drafter_rows(
    drafter, tapped_TLD: Tensor, anchors: Sequence[int], previous_AK: Sequence[Sequence[int]], *masks: np.ndarray
) -> BlockRows:
    """The network of one sequence from its weights alone, attention over [T context ; A*K block rows] under `masks`: one for
    all layers, or one for each."""
    w = {name: tensor.detach().double() for name, tensor in drafter.state_dict().items()}
    shape, K = drafter.shape, drafter.config.block_size
    N, G, H, eps = shape.num_heads, shape.num_kv_heads, shape.head_width, shape.norm_epsilon
    embedding, head = drafter.embedding_VD.double(), drafter.lm_head_WD.double()
    context = [rms_norm(w["fc.weight"] @ token.double().reshape(-1), w["hidden_norm.weight"], eps) for token in tapped_TLD]
    num_rows = K if drafter.config.sample_from_anchor else K + 1
    positions = [a + k for a in anchors for k in range(num_rows)]
    tokens = [previous_AK[i][0] if k == 0 else drafter.mask_token_id for i in range(len(anchors)) for k in range(num_rows)]
    x = [embedding[token] * shape.embedding_scale for token in tokens]
    for layer in range(drafter.config.num_layers):
        p = f"layers.{layer}."

        def heads(vector: Tensor, name: str, num: int, position: int | None, p: str = p) -> Tensor:
            parts = (w[f"{p}self_attn.{name}_proj.weight"] @ vector).reshape(num, H)
            if position is None:
                return parts
            norm = w[f"{p}self_attn.{name}_norm.weight"]
            return torch.stack([rotate(rms_norm(part, norm, eps), position, shape.rope) for part in parts])

        normed = [rms_norm(row, w[p + "input_layernorm.weight"], eps) for row in x]
        columns = list(zip([*context, *normed], [*range(len(context)), *positions], strict=True))
        keys = torch.stack([heads(vector, "k", G, position) for vector, position in columns])
        values = torch.stack([heads(vector, "v", G, None) for vector, _ in columns])
        query = torch.stack([heads(vector, "q", N, position) for vector, position in zip(normed, positions, strict=True)])
        mixed = attention(query, keys, values, masks[layer % len(masks)])
        x = [row + w[p + "self_attn.o_proj.weight"] @ m for row, m in zip(x, mixed, strict=True)]
        for i, row in enumerate(x):
            y = rms_norm(row, w[p + "post_attention_layernorm.weight"], eps)
            gate = w[p + "mlp.gate_proj.weight"] @ y
            x[i] = row + w[p + "mlp.down_proj.weight"] @ (gate / (1.0 + torch.exp(-gate)) * (w[p + "mlp.up_proj.weight"] @ y))
    x = [row for i, row in enumerate(x) if i % num_rows >= num_rows - K]
    logits, confidences = [], []
    for row, previous in zip(x, [token for block in previous_AK for token in block], strict=True):
        hidden = rms_norm(row, w["norm.weight"], eps)
        score = soft_cap(head @ hidden, shape.logit_soft_cap)
        features = hidden
        if "markov_head.markov_w1.weight" in w:
            embedded = w["markov_head.markov_w1.weight"][previous]
            bias, features = embedded, torch.cat([hidden, embedded])
            if "markov_head.gate_proj.weight" in w:
                gate = w["markov_head.gate_proj.weight"] @ features + w["markov_head.gate_proj.bias"]
                bias = embedded / (1.0 + torch.exp(-gate))
            if "markov_head.joint_proj.weight" in w:  # rows of W_g, W_c, W_o; the state starts anew with every block
                R = len(embedded)
                if len(logits) % K == 0:
                    state = torch.zeros(R, dtype=torch.float64)
                z = torch.cat([state, embedded, hidden])
                joint, offset = w["markov_head.joint_proj.weight"], w["markov_head.joint_proj.bias"]
                gate, candidate, out = (joint[i * R : (i + 1) * R] @ z + offset[i * R : (i + 1) * R] for i in range(3))
                gate = 1.0 / (1.0 + torch.exp(-gate))
                state = gate * state + (1.0 - gate) * torch.tanh(candidate)
                bias = torch.tanh(out)
            score = score + w["markov_head.markov_w2.weight"] @ bias
        if "confidence_head.proj.weight" in w:
            confidences.append(w["confidence_head.proj.weight"][0] @ features + w["confidence_head.proj.bias"][0])
        logits.append(score)
    size = (len(anchors), K)
    return BlockRows(torch.stack(logits).reshape(*size, -1), torch.stack(confidences).reshape(size) if confidences else None)


def recurrent_rows(
    drafter, tapped_TLD: Tensor, next_tokens: Sequence[int], anchors: Sequence[int], previous_AK: Sequence[Sequence[int]]
) -> Tensor:
    """Logits [A, K, W] of EAGLE-3 or MTP, block by block and step by step, from the weights alone."""
    w = {name: tensor.detach().double() for name, tensor in drafter.state_dict().items()}
    shape, is_mtp = drafter.shape, "eh_proj.weight" in w
    N, G, H, eps = shape.num_heads, shape.num_kv_heads, shape.head_width, shape.norm_epsilon
    embedding, head, p = drafter.embedding_VD.double(), drafter.lm_head_WD.double(), "mtp_block." if is_mtp else "layers.0."

    def first(t: int) -> Tensor:
        if is_mtp:
            return rms_norm(tapped_TLD[t, -1].double(), drafter.target_norm_D.double() + shape.norm_weight_offset, eps)
        return w["fc.weight"] @ tapped_TLD[t].double().reshape(-1)

    def feed(token: int, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Input of attention, and residual."""
        embedded = embedding[token] * shape.embedding_scale
        if is_mtp:
            embedded = embedded * 0.0 if position == 0 else embedded
            y = w["eh_proj.weight"] @ torch.cat([rms_norm(embedded, w["enorm.weight"], eps), rms_norm(state, w["hnorm.weight"], eps)])
            return rms_norm(y, w["input_layernorm.weight"], eps), y
        return torch.cat(
            [rms_norm(embedded, w[p + "input_layernorm.weight"], eps), rms_norm(state, w[p + "hidden_norm.weight"], eps)]
        ), state

    def heads(x: Tensor, name: str, num: int, position: int | None) -> Tensor:
        parts = (w[f"{p}self_attn.{name}_proj.weight"] @ x).reshape(num, H)
        if position is None:
            return parts
        return torch.stack([rotate(rms_norm(part, w[f"{p}self_attn.{name}_norm.weight"], eps), position, shape.rope) for part in parts])

    logits = []
    for a, previous in zip(anchors, previous_AK, strict=True):
        rows = [(feed(next_tokens[t], first(t), t)[0], t) for t in range(a - 1)]
        state = first(a - 1)
        for s, token in enumerate(previous):
            x, residual = feed(token, state, a - 1 + s)
            rows.append((x, a - 1 + s))
            keys = torch.stack([heads(row, "k", G, position) for row, position in rows])
            values = torch.stack([heads(row, "v", G, None) for row, _ in rows])
            mixed = attention(heads(x, "q", N, a - 1 + s)[None], keys, values, np.ones((1, len(rows)), bool))[0]
            y = residual + w[p + "self_attn.o_proj.weight"] @ mixed
            z = rms_norm(y, w[p + "post_attention_layernorm.weight"], eps)
            gate = w[p + "mlp.gate_proj.weight"] @ z
            state = y + w[p + "mlp.down_proj.weight"] @ (gate / (1.0 + torch.exp(-gate)) * (w[p + "mlp.up_proj.weight"] @ z))
            logits.append(soft_cap(head @ rms_norm(state, w["norm.weight"], eps), shape.logit_soft_cap))
    return torch.stack(logits).reshape(len(anchors), -1, len(head))


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


# --- speculative sampling -----------------------------------------------------------------------------------------------


def residual(p_target: Sequence[float], p_draft: Sequence[float]) -> list[float]:
    """max(p_t - p_d, 0) normalised; the target where nothing is left."""
    left = [max(t - d, 0.0) for t, d in zip(p_target, p_draft, strict=True)]
    return [x / sum(left) for x in left] if sum(left) > 0 else list(p_target)


def complete(emitted: Mapping[tuple[int, ...], float], p_target: Sequence[Sequence[float]]) -> dict[tuple[int, ...], float]:
    """Emitted sequences, completed to len(p_target) tokens with the target's own draws: a joint distribution."""
    joint = {tokens: 0.0 for tokens in itertools.product(range(len(p_target[0])), repeat=len(p_target))}
    for tokens, probability in emitted.items():
        for tail in itertools.product(range(len(p_target[0])), repeat=len(p_target) - len(tokens)):
            rest = math.prod(p_target[len(tokens) + i][v] for i, v in enumerate(tail))
            joint[tokens + tail] += probability * rest
    return joint


def distance_from_target(emitted: Mapping[tuple[int, ...], float], p_target: Sequence[Sequence[float]]) -> float:
    """Total variation between the completed emission and the target's joint distribution; 0 iff lossless."""
    joint = complete(emitted, p_target)
    return 0.5 * sum(abs(p - math.prod(p_target[i][v] for i, v in enumerate(tokens))) for tokens, p in joint.items())


def fit(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of a chi-square test that `counts` follow `probabilities`; cells of fewer than 5 expected are pooled."""
    total, order = counts.sum(), np.argsort(-probabilities)
    counts, expected = counts[order].astype(float), probabilities[order] * total
    if counts[expected == 0].any():
        return 0.0
    keep = int((expected >= 5).sum())
    observed, wanted = counts[:keep], expected[:keep]
    if expected[keep:].sum() > 0:
        observed, wanted = np.append(observed, counts[keep:].sum()), np.append(wanted, expected[keep:].sum())
    if len(observed) == 1:
        return 1.0  # one possible outcome, and nothing else was seen
    return float(scipy.stats.chisquare(observed, wanted * (observed.sum() / wanted.sum())).pvalue)


# --- scheduling (Algorithm 1, §5.2) --------------------------------------------------------------------------------------


def survivals(confidences: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """(survival, request, position) of every slot, in the order of the walk; positions count from 1."""
    slots = []
    for request, row in enumerate(confidences):
        product = 1.0
        for position, confidence in enumerate(row, start=1):
            product *= confidence
            slots.append((product, request, position))
    return sorted(slots, key=lambda slot: (-slot[0], slot[1], slot[2]))


def admission(confidences: Sequence[Sequence[float]], sps: Callable[[int], float]) -> tuple[list[int], float, int, list[float]]:
    """Algorithm 1: (lengths, theta, batch_tokens, every theta evaluated, the one that stopped the walk included)."""
    lengths, batch_tokens, tau = [0] * len(confidences), len(confidences), float(len(confidences))
    thetas = [tau * sps(batch_tokens)]
    for value, request, position in survivals(confidences):
        if value == 0.0:
            break
        tau += value
        thetas.append(tau * sps(batch_tokens + 1))
        if thetas[-1] <= thetas[-2]:
            return lengths, thetas[-2], batch_tokens, thetas
        lengths[request] = position
        batch_tokens += 1
    return lengths, thetas[-1], batch_tokens, thetas


def async_admission(
    stale: Sequence[Sequence[float]], current: Sequence[Sequence[float]], sps: Callable[[int], float]
) -> tuple[list[int], list[float]]:
    """(lengths, theta of 0, 1, ... admissions on the stale confidences); the first maximum of those is the capacity."""
    tau = float(len(stale))
    thetas = [tau * sps(len(stale))]
    for k, (value, _, _) in enumerate(survivals(stale), start=1):
        tau += value
        thetas.append(tau * sps(len(stale) + k))
    lengths = [0] * len(current)
    for value, request, position in survivals(current)[: thetas.index(max(thetas))]:
        if value > 0.0:
            lengths[request] = position
    return lengths, thetas


# --- training -----------------------------------------------------------------------------------------------------------


def learning_rate(step: int, peak: float, warmup: int, num_steps: int) -> float:
    """Linear up to `peak` over `warmup` steps (the first step is not 0), then a half cosine that ends at 0 after the last."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * math.cos(math.pi / 2 * (step - warmup) / (num_steps - warmup)) ** 2


def central_difference(function: Callable[[], float], cell: Tensor, index: tuple[int, ...], step: float = 1e-6) -> float:
    """Numerical derivative of `function` with respect to one entry of a tensor that it reads."""
    before = cell[index].item()
    cell[index] = before + step
    high = function()
    cell[index] = before - step
    low = function()
    cell[index] = before
    return (high - low) / (2 * step)
