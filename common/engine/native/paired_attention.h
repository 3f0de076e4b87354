/* Attention to bf16 keys and values for CPUs that multiply bf16 (`pairs.h`): queries and weights are rounded to bf16,
   and products are summed in float32. Included by `kernels.c`.

   Keys are packed as panels of 16 slots, whose input features are the dimensions; values as panels of 16 dimensions,
   whose input features are the slots, in blocks of 32 from a position that is a multiple of 32. So a token's sums have
   the same order in a decode step and in a chunk. Slots that no token sees are zeros. */

enum {
    AT_ONCE = 256, /* slots of a decode step that are packed before they are multiplied: they stay in the first cache */
    AHEAD_SLOTS = 64, /* from the slots that are packed to those that are prefetched */
    QUERIES_IN_PAIRS = 2 * SIDE,
};

/* The keys of the slots `[first, first + num)`, or their values, which are `where` bytes behind; NULL for a slot that
   is not in `[begin, end)`. */
INLINE void slots_of(const struct cache *c, const int64_t *table, long head, long where, long first, long num,
                     long begin, long end, const char **slots) {
    long block = first / c->block_size, place = first % c->block_size;
    for (long i = 0; i < num; i++) {
        const int seen = first + i >= begin && first + i < end;
        slots[i] = seen ? keys_of(c, table[block], head) + where + place * c->head_dim * 2 : NULL;
        if (++place == c->block_size) place = 0, block++;
    }
}

/* The same, while those AHEAD_SLOTS behind them are prefetched. */
INLINE void slots_ahead(const struct cache *c, const int64_t *table, long head, long where, long first, long num,
                        long begin, long end, const char **slots) {
    slots_of(c, table, head, where, first + AHEAD_SLOTS, num, begin, end, slots);
    for (long i = 0; i < num; i++)
        for (long at = 0; slots[i] && at < 2 * c->head_dim; at += 64) __builtin_prefetch(slots[i] + at, 0, 2);
    slots_of(c, table, head, where, first, num, begin, end, slots);
}

/* Pack the keys of the slots `[first, first + 16)` as a panel `[blocks of dimensions][16][16][2]`. */
static void pair_keys(const struct cache *c, const int64_t *table, long head, long first, long begin, long end,
                      char *to) {
    const long D = c->head_dim;
    const char *slots[SIDE];
    slots_ahead(c, table, head, 0, first, SIDE, begin, end, slots);
    for (long half = 0; half < SIDE; half += 8)
        for (long d = 0; d < blocks_of(D) * BLOCK; d += 16) {
            v8 rows[8], columns[8];
            UNROLL for (int i = 0; i < 8; i++) {
                rows[i] = splat(0);
                if (slots[half + i] && d + 16 <= D) memcpy(rows + i, slots[half + i] + 2 * d, 32);
                else if (slots[half + i] && d < D) memcpy(rows + i, slots[half + i] + 2 * d, 16);
            }
            transpose(rows, columns);
            UNROLL for (int i = 0; i < 8; i++) memcpy(to + 4 * ((d / 2 + i) * SIDE + half), columns + i, 32);
        }
}

/* Pack the values of the slots `[first, first + 32)` as a block of each panel of 16 dimensions; the panels are
   `panel_bytes` apart. */
static void pair_values(const struct cache *c, const int64_t *table, long head, long first, long begin, long end,
                        char *to, long panel_bytes) {
    const long D = c->head_dim;
    const char *slots[BLOCK];
    slots_ahead(c, table, head, c->block_size * D * 2, first, BLOCK, begin, end, slots);
    for (long pair = 0; pair < SIDE; pair++)
        for (long d = 0; d < dims_of(D); d += 8) {
            u16x8 lower = {0}, upper = {0};
            if (slots[2 * pair] && d < D) memcpy(&lower, slots[2 * pair] + 2 * d, 16);
            if (slots[2 * pair + 1] && d < D) memcpy(&upper, slots[2 * pair + 1] + 2 * d, 16);
            const u32x8 words = __builtin_convertvector(lower, u32x8) | __builtin_convertvector(upper, u32x8) << 16;
            memcpy(to + d / PANEL * panel_bytes + 4 * (pair * SIDE + d % PANEL), &words, 32);
        }
}

/* Attention of one token, for a KV head, to its slots `[begin, end)`. `size` is their number from the multiple of 32
   before `begin` to the one behind `end`. */
static int attend_in_pairs(const struct cache *c, const float *q, const int64_t *table, long head, long begin, long end,
                           float *room, long size, float *out) {
    const long D = c->head_dim, G = c->group, all = dims_of(D), base = begin / BLOCK * BLOCK;
    const long key_bytes = blocks_of(D) * TILE_BYTES, low = begin - base, whole = low / 8 * 8;
    float *scores = room, *scaled = scores + G * size, *sums = scaled + G * D, *factors = sums + G * all;
    char *packed = (char *)(factors + (G + SIDE - 1) / SIDE * SIDE);
    int failed = 0;
    for (long i = 0; i < G * D; i++) scaled[i] = q[i] * c->scale;
    for (long s = 0, num; s < size; s += num) {
        num = size - s < AT_ONCE ? size - s : AT_ONCE;
        for (long p = 0; p < num / PANEL; p++)
            pair_keys(c, table, head, base + s + p * PANEL, begin, end, packed + p * key_bytes);
        failed |= pairs_product(scaled, G, D, D, packed, key_bytes, num / PANEL, 1, scores + s, size);
    }
    for (long r = 0; r < G; r++) {
        float *row = scores + r * size;
        for (long s = whole; s < low; s++) row[s] = -__builtin_inff();
        factors[r] = softmax(row + whole, end - base - whole, (end - base - whole + 7) / 8 * 8);
        memset(row, 0, low * sizeof(float));
        memset(row + end - base, 0, (size - (end - base)) * sizeof(float));
    }
    for (long s = 0, num; s < size; s += num) {
        num = size - s < AT_ONCE ? size - s : AT_ONCE;
        const long blocks = num / BLOCK;
        for (long b = 0; b < blocks; b++)
            pair_values(c, table, head, base + s + b * BLOCK, begin, end, packed + b * TILE_BYTES, blocks * TILE_BYTES);
        failed |= pairs_product(scores + s, G, size, num, packed, blocks * TILE_BYTES, all / PANEL, s == 0, sums, all);
    }
    for (long r = 0; r < G; r++)
        for (long d = 0; d < D; d++) out[r * D + d] = sums[r * all + d] * factors[r];
    return failed;
}

/* A KV head of a token. */
static int decode_in_pairs(void *job, long unit) {
    const struct decode *a = job;
    const struct cache *c = &a->cache;
    const long i = unit / c->kv_heads, head = unit % c->kv_heads, end = a->lens[i], D = c->head_dim, G = c->group;
    const long begin = a->window && end > a->window ? end - a->window : 0;
    const long size = blocks_of(end - begin / BLOCK * BLOCK) * BLOCK, width = blocks_of(D) * BLOCK;
    float *room = grown(&attending, G * (size + D + dims_of(D)) + G + SIDE + AT_ONCE * width / 2);
    if (!room) return 1;
    return attend_in_pairs(c, a->q + i * a->q_stride + head * G * D, a->tables + i * a->width, head, begin, end, room,
                           size, a->out + (i * c->kv_heads + head) * G * D);
}

/* See DECODE. */
int baton_decode_pairs(const float *q, long q_stride, const char *layer, long block_bytes, long head_bytes,
                       const int64_t *tables, long width, const int64_t *lens, long N, long kv_heads, long group,
                       long block_size, long head_dim, long window, float scale, float *out, int threads) {
    const struct cache c = {layer, block_bytes, head_bytes, kv_heads, group, block_size, head_dim, scale};
    struct decode a = {c, q, q_stride, tables, width, lens, window, kv_heads, out};
    return share(N * kv_heads, threads, decode_in_pairs, &a);
}

static int pair_slots(void *job, long unit) {
    const struct prefill *a = job;
    const struct cache *c = &a->cache;
    const long stop = (unit + 1) * RUN < a->panels ? (unit + 1) * RUN : a->panels;
    const long begin = a->window && a->start + 1 > a->window ? a->start + 1 - a->window : 0;
    for (long p = unit * RUN; p < stop; p++) {
        const long s = a->first + p * PANEL;
        pair_keys(c, a->table, a->head, s, begin, a->end, a->keys + p * blocks_of(c->head_dim) * TILE_BYTES);
        if (p % 2 == 0)
            pair_values(c, a->table, a->head, s, begin, a->end, a->values + p / 2 * TILE_BYTES,
                        blocks_of(a->size) * TILE_BYTES);
    }
    return 0;
}

/* See PREFILL. */
int baton_prefill_pairs(const float *q, long q_stride, const char *layer, long block_bytes, long head_bytes,
                        const int64_t *table, long start, long N, long kv_heads, long group, long block_size,
                        long head_dim, long window, float scale, float *out, int threads) {
    const struct cache c = {layer, block_bytes, head_bytes, kv_heads, group, block_size, head_dim, scale};
    const long first = window && start + 1 > window ? (start + 1 - window) / BLOCK * BLOCK : 0, end = start + N;
    const long blocks = blocks_of(end - first), panels = 2 * blocks, size = blocks * BLOCK;
    const long key_bytes = panels * blocks_of(head_dim) * TILE_BYTES;
    char *keys = aligned_alloc(64, key_bytes + dims_of(head_dim) / PANEL * blocks * TILE_BYTES);
    if (!keys) return 1;
    struct prefill a = {c,      q,    q_stride,  table, start, first, end, window, panels,
                        size, N * group, 0, QUERIES_IN_PAIRS, 1, keys, keys + key_bytes, out};
    return attend_prompt(&a, pair_slots, threads);
}
