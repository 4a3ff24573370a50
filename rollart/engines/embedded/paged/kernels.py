"""Triton kernels of the paged back end. Each computes what its namesake in `ops.py` computes in plain torch.

Layout of one layer's cache, keys and values alike: (pages, KV heads, page tokens, head size), so that the tokens of one
page and head lie side by side. `tables` (lanes, pages of the longest context) says which page holds which part of a
lane's sequence; a flat token is found by its lane and position.

Sums are in float32. Offsets into the cache are 64-bit: a layer may hold more than 2^31 numbers.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(hidden, residual, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """One row: `hidden` (+ `residual`, into which the sum is written), normalised, times `weight`."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    x = tl.load(hidden + row + cols, mask=inside, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(residual + row + cols, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(residual + row + cols, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    normed = (wide * scale).to(x.dtype)
    tl.store(out + row + cols, normed * tl.load(weight + cols, mask=inside, other=0.0), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A block of one row: silu(gate) * up, where gate and up stand side by side."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + cols, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + cols, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * WIDTH + cols, silu * up, mask=inside)


@triton.jit
def _norm_rotate(
    source, heads, cols, inside, norm, cos_low, cos_high, sin_low, sin_high, eps,
    SIZE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Both halves of these heads, normalised if the model does so, and rotated."""
    half: tl.constexpr = SIZE // 2
    low = tl.load(source + heads[:, None] * SIZE + cols[None, :], mask=inside, other=0.0)
    high = tl.load(source + heads[:, None] * SIZE + half + cols[None, :], mask=inside, other=0.0)
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        square = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        scale = tl.rsqrt(square / SIZE + eps)[:, None]
        within = cols < half
        low = (low * scale).to(dtype) * tl.load(norm + cols, mask=within, other=0.0)[None, :]
        high = (high * scale).to(dtype) * tl.load(norm + half + cols, mask=within, other=0.0)[None, :]
        low, high = low.to(tl.float32), high.to(tl.float32)
    turned_low = low * cos_low[None, :] - high * sin_low[None, :]
    turned_high = high * cos_high[None, :] + low * sin_high[None, :]
    return turned_low.to(dtype), turned_high.to(dtype)


@triton.jit
def rotate_and_keep_kernel(
    qkv, query, keys, values, tables, lanes, positions, cos, sin, query_norm, key_norm, eps, table_width,
    QUERY_HEADS: tl.constexpr, QUERY_BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, KV_BLOCK: tl.constexpr,
    SIZE: tl.constexpr, HALF_BLOCK: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One token: norms and rotation of its queries and keys; keys and values go into the cache."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = SIZE // 2
    cols = tl.arange(0, HALF_BLOCK)
    within = cols < half
    position = tl.load(positions + token)
    lane = tl.load(lanes + token)
    page = tl.load(tables + lane.to(tl.int64) * table_width + position // PAGE).to(tl.int64)
    angle = position.to(tl.int64) * SIZE
    cos_low = tl.load(cos + angle + cols, mask=within, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + half + cols, mask=within, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angle + cols, mask=within, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angle + half + cols, mask=within, other=0.0).to(tl.float32)
    row = qkv + token * (QUERY_HEADS + 2 * KV_HEADS) * SIZE

    heads = tl.arange(0, QUERY_BLOCK)
    inside = (heads < QUERY_HEADS)[:, None] & within[None, :]
    low, high = _norm_rotate(
        row, heads, cols, inside, query_norm, cos_low, cos_high, sin_low, sin_high, eps, SIZE, NORM
    )
    place = query + token * QUERY_HEADS * SIZE + heads[:, None] * SIZE + cols[None, :]
    tl.store(place, low, mask=inside)
    tl.store(place + half, high, mask=inside)

    heads = tl.arange(0, KV_BLOCK)
    inside = (heads < KV_HEADS)[:, None] & within[None, :]
    row += QUERY_HEADS * SIZE
    low, high = _norm_rotate(row, heads, cols, inside, key_norm, cos_low, cos_high, sin_low, sin_high, eps, SIZE, NORM)
    kept = (page * KV_HEADS + heads[:, None]) * PAGE * SIZE + (position % PAGE) * SIZE + cols[None, :]
    tl.store(keys + kept, low, mask=inside)
    tl.store(keys + kept + half, high, mask=inside)
    row += KV_HEADS * SIZE
    own = heads[:, None] * SIZE + cols[None, :]
    tl.store(values + kept, tl.load(row + own, mask=inside, other=0.0), mask=inside)
    tl.store(values + kept + half, tl.load(row + own + half, mask=inside, other=0.0), mask=inside)


@triton.jit
def decode_kernel(
    query, keys, values, out, partial, partial_stats, tables, lanes, positions, scaling, table_width,
    GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One new token against its whole context, for the query heads of one KV head; or one of SPLITS parts of it."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    lane = tl.load(lanes + token)
    length = tl.load(positions + token) + 1
    num_pages = (length + PAGE - 1) // PAGE
    share = (num_pages + SPLITS - 1) // SPLITS
    first = split * share
    last = tl.minimum(first + share, num_pages)

    rows = tl.arange(0, GROUP_BLOCK)
    cols = tl.arange(0, SIZE_BLOCK)
    slots = tl.arange(0, PAGE)
    within = cols < SIZE
    own = (rows < GROUP)[:, None] & within[None, :]
    heads = token.to(tl.int64) * KV_HEADS * GROUP + head * GROUP + rows
    q = tl.load(query + heads[:, None] * SIZE + cols[None, :], mask=own, other=0.0)
    q = (q.to(tl.float32) * scaling * 1.4426950408889634).to(q.dtype)

    peak = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_BLOCK,), tl.float32)
    sums = tl.zeros((GROUP_BLOCK, SIZE_BLOCK), tl.float32)
    table = tables + lane.to(tl.int64) * table_width
    for index in range(first, last):
        page = tl.load(table + index).to(tl.int64)
        live = index * PAGE + slots < length
        start = (page * KV_HEADS + head) * PAGE * SIZE
        place = start + slots[:, None] * SIZE + cols[None, :]
        key = tl.load(keys + place, mask=live[:, None] & within[None, :], other=0.0)
        value = tl.load(values + place, mask=live[:, None] & within[None, :], other=0.0)
        scores = tl.where(live[None, :], tl.dot(q, tl.trans(key), input_precision="ieee"), float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp2(peak - highest)
        weights = tl.exp2(scores - highest[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        peak = highest

    if SPLITS == 1:
        answer = sums / total[:, None]
        tl.store(out + heads[:, None] * SIZE + cols[None, :], answer.to(out.dtype.element_ty), mask=own)
    else:
        part = heads * SPLITS + split
        tl.store(partial + part[:, None] * SIZE + cols[None, :], sums, mask=own)
        tl.store(partial_stats + part * 2, peak, mask=rows < GROUP)
        tl.store(partial_stats + part * 2 + 1, total, mask=rows < GROUP)


@triton.jit
def combine_kernel(partial, partial_stats, out, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """One query head: its parts added up."""
    head = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, SIZE_BLOCK)
    within = cols < SIZE
    parts = head * SPLITS + tl.arange(0, SPLITS)
    peaks = tl.load(partial_stats + parts * 2)
    totals = tl.load(partial_stats + parts * 2 + 1)
    weights = tl.exp2(peaks - tl.max(peaks, axis=0))
    sums = tl.load(partial + parts[:, None] * SIZE + cols[None, :], mask=within[None, :], other=0.0)
    answer = tl.sum(sums * weights[:, None], axis=0) / tl.sum(totals * weights, axis=0)
    tl.store(out + head * SIZE + cols, answer.to(out.dtype.element_ty), mask=within)


@triton.jit
def chunk_kernel(
    query, keys, values, out, tables, blocks, scaling, table_width,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of one prompt chunk against all that comes before them, for one query head."""
    block = blocks + tl.program_id(1) * 4
    first_token = tl.load(block).to(tl.int64)
    num_tokens = tl.load(block + 1)
    first_position = tl.load(block + 2)
    lane = tl.load(block + 3)
    head = tl.program_id(0)
    kv_head = head // GROUP

    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, SIZE_BLOCK)
    slots = tl.arange(0, PAGE)
    within = cols < SIZE
    own = (rows < num_tokens)[:, None] & within[None, :]
    heads = (first_token + rows) * KV_HEADS * GROUP + head
    q = tl.load(query + heads[:, None] * SIZE + cols[None, :], mask=own, other=0.0)
    q = (q.to(tl.float32) * scaling * 1.4426950408889634).to(q.dtype)

    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, SIZE_BLOCK), tl.float32)
    table = tables + lane.to(tl.int64) * table_width
    unmasked = (first_position + 1) // PAGE
    num_pages = (first_position + num_tokens + PAGE - 1) // PAGE
    for index in range(0, unmasked):
        page = tl.load(table + index).to(tl.int64)
        place = (page * KV_HEADS + kv_head) * PAGE * SIZE + slots[:, None] * SIZE + cols[None, :]
        key = tl.load(keys + place, mask=within[None, :], other=0.0)
        value = tl.load(values + place, mask=within[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee")
        highest = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp2(peak - highest)
        weights = tl.exp2(scores - highest[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        peak = highest
    for index in range(unmasked, num_pages):
        page = tl.load(table + index).to(tl.int64)
        seen = index * PAGE + slots[None, :] <= first_position + rows[:, None]
        live = (index * PAGE + slots < first_position + num_tokens)[:, None] & within[None, :]
        place = (page * KV_HEADS + kv_head) * PAGE * SIZE + slots[:, None] * SIZE + cols[None, :]
        key = tl.load(keys + place, mask=live, other=0.0)
        value = tl.load(values + place, mask=live, other=0.0)
        scores = tl.where(seen, tl.dot(q, tl.trans(key), input_precision="ieee"), float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp2(peak - highest)
        weights = tl.exp2(scores - highest[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        peak = highest
    answer = sums / total[:, None]
    tl.store(out + heads[:, None] * SIZE + cols[None, :], answer.to(out.dtype.element_ty), mask=own)


@triton.jit
def _consider(
    logits, token, uniform, inverse, greedy, peak, total, score, chosen, chosen_logit, VOCAB: tl.constexpr
):  # fmt: skip
    """Take these tokens into the running maximum, sum of exponentials and best candidate of each of the lanes."""
    inside = token < VOCAB
    logit = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32) * inverse
    uniform = tl.maximum(uniform, 1.1641532e-10)
    # -log(1 - u), exact where u is small: there the subtraction would lose the digits that decide.
    exponential = tl.where(uniform < 1e-3, uniform + 0.5 * uniform * uniform, -tl.log(1.0 - uniform))
    own = tl.where(greedy, logit, logit - tl.log(exponential))
    better = inside & (own > score)
    score = tl.where(better, own, score)
    chosen = tl.where(better, token, chosen)
    chosen_logit = tl.where(better, logit, chosen_logit)
    highest = tl.maximum(peak, logit)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    total = total * tl.exp(peak - safe) + tl.exp(logit - safe)
    return highest, total, score, chosen, chosen_logit


@triton.jit
def draw_parts_kernel(
    logits, temperatures, seeds, best_score, best_token, best_logit, peaks, totals,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One chunk of one row of logits: its largest, the sum of its exponentials, and its candidate for the draw.

    A token is drawn as the one with the largest logit - log(E), E exponentially distributed: the Gumbel-max trick.
    """
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    greedy = temperature <= 0.0
    inverse = tl.where(greedy, 1.0, 1.0 / tl.where(greedy, 1.0, temperature))
    seed = tl.load(seeds + row)
    logits += row.to(tl.int64) * VOCAB
    lanes = tl.arange(0, BLOCK)
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    score = tl.full((BLOCK,), float("-inf"), tl.float32)
    chosen = tl.zeros((BLOCK,), tl.int32)
    chosen_logit = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, CHUNK, 4 * BLOCK):
        token = chunk * CHUNK + begin + lanes
        # One call of the generator gives four numbers; the first token of the four names it.
        first, second, third, fourth = tl.rand4x(seed, token)
        peak, total, score, chosen, chosen_logit = _consider(
            logits, token, first, inverse, greedy, peak, total, score, chosen, chosen_logit, VOCAB
        )
        peak, total, score, chosen, chosen_logit = _consider(
            logits, token + BLOCK, second, inverse, greedy, peak, total, score, chosen, chosen_logit, VOCAB
        )
        peak, total, score, chosen, chosen_logit = _consider(
            logits, token + 2 * BLOCK, third, inverse, greedy, peak, total, score, chosen, chosen_logit, VOCAB
        )
        peak, total, score, chosen, chosen_logit = _consider(
            logits, token + 3 * BLOCK, fourth, inverse, greedy, peak, total, score, chosen, chosen_logit, VOCAB
        )
    place = row * CHUNKS + chunk
    top = tl.max(peak, axis=0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    tl.store(peaks + place, top)
    tl.store(totals + place, tl.sum(total * tl.exp(peak - safe), axis=0))
    best = tl.max(score, axis=0)
    token = tl.min(tl.where(score == best, chosen, 2147483647), axis=0)
    tl.store(best_score + place, best)
    tl.store(best_token + place, token)
    winner = (score == best) & (chosen == token)
    tl.store(best_logit + place, tl.max(tl.where(winner, chosen_logit, float("-inf")), axis=0))


@triton.jit
def draw_kernel(
    best_score, best_token, best_logit, peaks, totals, lanes, lane_tokens, tokens, logprobs,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: the drawn token, its log-probability, and the same token as the next input of its lane."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < CHUNKS
    place = row * CHUNKS + cols
    score = tl.load(best_score + place, mask=inside, other=float("-inf"))
    token = tl.load(best_token + place, mask=inside, other=2147483647)
    logit = tl.load(best_logit + place, mask=inside, other=float("-inf"))
    peak = tl.load(peaks + place, mask=inside, other=float("-inf"))
    total = tl.load(totals + place, mask=inside, other=0.0)
    best = tl.max(score, axis=0)
    chosen = tl.min(tl.where(score == best, token, 2147483647), axis=0)
    chosen_logit = tl.max(tl.where((score == best) & (token == chosen), logit, float("-inf")), axis=0)
    top = tl.max(peak, axis=0)
    logprob = chosen_logit - top - tl.log(tl.sum(total * tl.exp(peak - top), axis=0))
    chosen = tl.where(chosen == 2147483647, 0, chosen)
    tl.store(tokens + row, chosen)
    tl.store(logprobs + row, logprob)
    tl.store(lane_tokens + tl.load(lanes + row), chosen)
