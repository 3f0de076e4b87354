/* Attention to bf16 keys and values for CPUs that multiply bf16 (`pairs.h`): queries and weights are rounded to bf16,
   and products are summed in float32. Included by `kernels.c`.

   Keys are packed as panels of 16 slots, whose input features are the dimensions; values as panels of 16 dimensions,
   whose input features are the slots, in blocks of 32 from a position that is a multiple of 32. So a token's sums have
   the same order in a decode step and in a chunk. Slots that no token sees are zeros. */

enum {
    AT_ONCE = 128, /* slots of a decode step that are packed before they are multiplied: they stay in the first cache */
    QUERIES_IN_PAIRS = 2 * SIDE,
};

typedef uint32_t words __attribute__((vector_size(4 * SIDE))); /* a row of a tile */
typedef uint16_t halves __attribute__((vector_size(4 * SIDE)));

/* Number i of the first of two vectors, number i of the second, the next one of the first, and so on. */
#define ALTERNATING(i)                                                                                                 \
    i, i + 32, i + 1, i + 33, i + 2, i + 34, i + 3, i + 35, i + 4, i + 36, i + 5, i + 37, i + 6, i + 38, i + 7,        \
    i + 39, i + 8, i + 40, i + 9, i + 41, i + 10, i + 42, i + 11, i + 43, i + 12, i + 44, i + 13, i + 45, i + 14,      \
    i + 46, i + 15, i + 47

/* The keys of the 16 slots from `first` on, or their values, which are `where` bytes behind: rows of head_dim numbers.
   Slots that are not in `[begin, end)` are zeros. Rows that do not lie together are copied to `room`. */
INLINE const char *rows_of(const struct cache *c, const int64_t *table, long head, long where, long first, long begin,
                           long end, char *room) {
    const long step = 2 * c->head_dim, block = first / c->block_size, place = first % c->block_size;
    if (place + SIDE <= c->block_size && first >= begin && first + SIDE <= end)
        return keys_of(c, table[block], head) + where + place * step;
    for (long s = first; s < first + SIDE; s++, room += step) {
        if (s < begin || s >= end) memset(room, 0, step);
        else memcpy(room, keys_of(c, table[s / c->block_size], head) + where + s % c->block_size * step, step);
    }
    return room - SIDE * step;
}

/* Where a decode step's next keys or values are, to be prefetched: in STREAMS parts, each in one block if
   blocks are no smaller. Half of them are prefetched while others are packed, and half during the products, at half the
   pace of the panels: a core has room for few lines on their way. */
INLINE struct ahead slots_ahead(const struct cache *c, const int64_t *table, long head, long where, long first,
                                long end) {
    struct ahead ahead = {.pace = 32};
    for (long i = 0, s = first; i < STREAMS; i++, s += AT_ONCE / STREAMS) {
        const long slot = s < end ? s : end - 1;
        ahead.at[i] = keys_of(c, table[slot / c->block_size], head) + where + slot % c->block_size * 2 * c->head_dim;
    }
    return ahead;
}

/* Prefetch the next `num_bytes` of all parts together. */
INLINE void prefetch_some(struct ahead *ahead, long num_bytes) {
    UNROLL for (int i = 0; i < STREAMS; i++)
        for (const char *stop = ahead->at[i] + num_bytes / STREAMS; ahead->at[i] < stop; ahead->at[i] += 64)
            __builtin_prefetch(ahead->at[i], 0, 2);
}

/* Load 16 numbers each from two places. */
INLINE words load_twice(const char *first, const char *second) {
#ifdef __AVX512F__
    const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)first));
    return (words)_mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i *)second), 1);
#else
    words x;
    memcpy(&x, first, sizeof(x) / 2);
    memcpy((char *)&x + sizeof(x) / 2, second, sizeof(x) / 2);
    return x;
#endif
}

/* Load up to 32 numbers; zeros behind the last one. */
INLINE words load_words(const char *row, long num) {
#ifdef __AVX512BW__
    return (words)_mm512_maskz_loadu_epi16(num < BLOCK ? (1u << num) - 1 : ~0u, row);
#else
    words x = {0};
    memcpy(&x, row, num < BLOCK ? 2 * num : 2 * BLOCK);
    return x;
#endif
}

#define IN_QUARTERS(a, b, ...) __builtin_shuffle(a, b, (words){__VA_ARGS__})

/* Swap rows and columns in each quarter of four vectors, for `num` vectors x. */
INLINE void transpose_quarters(const words *x, words *out, int num) {
    words y[SIDE];
    UNROLL for (int i = 0; i < num; i += 2) { /* pairs of words, then pairs of pairs */
        y[i] = IN_QUARTERS(x[i], x[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        y[i + 1] = IN_QUARTERS(x[i], x[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
    UNROLL for (int i = 0; i < num; i++) {
        const words *from = y + i / 4 * 4 + i % 4 / 2;
        out[i] = i % 2 ? IN_QUARTERS(from[0], from[2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
                       : IN_QUARTERS(from[0], from[2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    }
}

/* Swap the rows and columns of 16 vectors, which are words of a tile. */
INLINE void transpose_words(words *x) {
    words y[SIDE], z[SIDE];
    transpose_quarters(x, z, SIDE);
    UNROLL for (int i = 0; i < SIDE; i++) { /* quarters: even ones and odd ones, twice */
        const words *from = z + i / 8 * 8 + i % 4;
        y[i] = i % 8 / 4 ? IN_QUARTERS(from[0], from[4], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
                         : IN_QUARTERS(from[0], from[4], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    }
    UNROLL for (int i = 0; i < SIDE; i++) {
        const words *from = y + i % 8;
        const int column = i % 4 + i / 4 % 2 * 4 + i / 8 * 8;
        x[column] = i / 8 ? IN_QUARTERS(from[0], from[8], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
                          : IN_QUARTERS(from[0], from[8], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    }
}

/* Pack 16 numbers of 16 slots, which are `step` bytes apart, as the first half of a block of a panel. The other half
   is zeros. */
INLINE void pair_half(const char *rows, long step, char *to) {
    words x[SIDE / 2], y[SIDE / 2], zeros = {0};
    UNROLL for (int i = 0; i < SIDE / 2; i++) x[i] = load_twice(rows + i * step, rows + (i + SIDE / 2) * step);
    transpose_quarters(x, y, SIDE / 2);
    UNROLL for (int i = 0; i < SIDE / 2; i++) {
        const words *from = y + i % 4;
        const words column =
            i / 4 ? IN_QUARTERS(from[0], from[4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
                  : IN_QUARTERS(from[0], from[4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        memcpy(to + i * sizeof(words), &column, sizeof(words));
        memcpy(to + (i + SIDE / 2) * sizeof(words), &zeros, sizeof(words));
    }
}

/* Pack the keys of the slots `[first, first + 16)` as a panel `[blocks of dimensions][16][16][2]`. */
static void pair_keys(const struct cache *c, const int64_t *table, long head, long first, long begin, long end,
                      char *to) {
    char room[2 * SIDE * MAX_HEAD_DIM];
    const long step = 2 * c->head_dim;
    const char *rows = rows_of(c, table, head, 0, first, begin, end, room);
    for (long left = c->head_dim; left > 0; left -= BLOCK, rows += 2 * BLOCK, to += TILE_BYTES) {
        if (left == SIDE) {
            pair_half(rows, step, to);
            return;
        }
        words x[SIDE];
        UNROLL for (int i = 0; i < SIDE; i++) x[i] = load_words(rows + i * step, left);
        transpose_words(x);
        UNROLL for (int i = 0; i < SIDE; i++) memcpy(to + i * sizeof(words), x + i, sizeof(words));
    }
}

/* Pack the values of the slots `[first, first + 16)` as a half of a block of each panel of 16 dimensions; the panels
   are `panel_bytes` apart. */
static void pair_values(const struct cache *c, const int64_t *table, long head, long first, long begin, long end,
                        char *to, long panel_bytes) {
    char room[2 * SIDE * MAX_HEAD_DIM];
    const long step = 2 * c->head_dim;
    const char *rows = rows_of(c, table, head, c->block_size * step, first, begin, end, room);
    for (long left = c->head_dim; left > 0; left -= BLOCK, rows += 2 * BLOCK, to += 2 * panel_bytes)
        UNROLL for (int pair = 0; pair < SIDE / 2; pair++) {
            const halves a = (halves)load_words(rows + 2 * pair * step, left);
            const halves b = (halves)load_words(rows + (2 * pair + 1) * step, left);
            const halves low = __builtin_shuffle(a, b, (halves){ALTERNATING(0)});
            memcpy(to + pair * sizeof(words), &low, sizeof(low));
            if (left <= SIDE) continue;
            const halves high = __builtin_shuffle(a, b, (halves){ALTERNATING(16)});
            memcpy(to + panel_bytes + pair * sizeof(words), &high, sizeof(high));
        }
}

/* Scale and round a query. */
static void round_query(const struct cache *c, const float *q, char *to) {
    float scaled[MAX_HEAD_DIM];
    multiply_by(q, c->scale, c->head_dim, scaled);
    round_row(scaled, c->head_dim, to);
}

/* Round to bf16 what the softmax makes of a row of `size` scores, a multiple of 32, before it is divided by its sum:
   zeros before `begin` and from `end` on. Returns the factor that divides. */
static float round_softmax(float *row, long begin, long end, long size, char *to) {
    const long first = begin / BLOCK * BLOCK;
    const lane none = (lane){0} - __builtin_inff();
    for (long s = first; s < begin; s++) row[s] = -__builtin_inff();
    for (long s = end; s < size; s++) row[s] = -__builtin_inff();
    lane most[2] = {none, none}, sums[2] = {{0}, {0}};
    for (long s = first; s < size; s += 2 * LANE)
        UNROLL for (int i = 0; i < 2; i++) most[i] = larger_lanes(lanes(row + s + i * LANE), most[i]);
    most[0] = larger_lanes(most[0], most[1]);
    float top = most[0][0];
    for (int i = 1; i < LANE; i++) top = most[0][i] > top ? most[0][i] : top;
    memset(to, 0, 2 * first);
    for (long s = first; s < size; s += BLOCK) {
        float block[BLOCK];
        UNROLL for (int i = 0; i < BLOCK / LANE; i++) {
            const lane x = exp_of_lanes(lanes(row + s + i * LANE) - top);
            sums[i % 2] += x;
            memcpy(block + i * LANE, &x, sizeof(x));
        }
        round_row(block, BLOCK, to + 2 * s);
    }
    memset(to + 2 * first, 0, 2 * (begin - first)); /* what is smallest is not zero */
    memset(to + 2 * end, 0, 2 * (size - end));
    return 1.0f / sum_of(add_lanes(splat(0), sums[0] + sums[1]));
}

/* Room for the attention of `num` queries to `size` slots. There are rows until a second tile is whole, whose content
   is undefined and unused. */
struct paired_room {
    float *scores, *sums, *factors; /* [rows][size], [rows][dimensions], [rows] */
    char *queries, *weights;        /* rounded, `pairs_stride` apart */
    char *rest;
};

/* The room, and `more` numbers behind it. The scores are NULL if there is not enough memory. */
static struct paired_room paired_room(const struct cache *c, long num, long size, long more) {
    const long held = rows_held(num), D = c->head_dim, all = dims_of(D), padded = (held + SIDE - 1) / SIDE * SIDE;
    const long row = size + all + (pairs_stride(D) + pairs_stride(size)) / 4;
    struct paired_room room = {.scores = grown(&attending, held * row + padded + more)};
    room.sums = room.scores + held * size;
    room.factors = room.sums + held * all;
    room.queries = (char *)(room.factors + padded);
    room.weights = room.queries + held * pairs_stride(D);
    room.rest = room.weights + held * pairs_stride(size);
    return room;
}

/* Attention of one token, for a KV head, to its slots `[begin, end)`. Meanwhile prefetch a share of `following`.
   Returns 0, or 1 if there is not enough memory. */
static int attend_in_pairs(const struct cache *c, const float *q, const int64_t *table, long head, long begin, long end,
                           struct ahead following, float *out) {
    const long D = c->head_dim, G = c->group, all = dims_of(D), base = begin / BLOCK * BLOCK;
    const long size = blocks_of(end - base) * BLOCK, stride = pairs_stride(size);
    const long key_bytes = blocks_of(D) * TILE_BYTES, value_bytes = c->block_size * D * 2;
    const struct paired_room room = paired_room(c, G, size, AT_ONCE * blocks_of(D) * BLOCK / 2);
    if (!room.scores) return 1;
    int failed = 0;
    for (long r = 0; r < G; r++) round_query(c, q + r * D, room.queries + r * pairs_stride(D));
    for (long s = 0, num; s < size; s += num) {
        num = size - s < AT_ONCE ? size - s : AT_ONCE;
        struct ahead next = s + num < size ? slots_ahead(c, table, head, 0, base + s + num, end)
                                           : slots_ahead(c, table, head, value_bytes, base, end);
        for (long p = 0; p < num / PANEL; p++) {
            prefetch_some(&next, PANEL * D * AT_ONCE / num);
            pair_keys(c, table, head, base + s + p * PANEL, begin, end, room.rest + p * key_bytes);
        }
        failed |= pairs_product(room.queries, G, pairs_stride(D), blocks_of(D), room.rest, key_bytes, num / PANEL,
                                &next, 1, room.scores + s, size);
    }
    for (long r = 0; r < G; r++) {
        float *row = room.scores + r * size;
        room.factors[r] = round_softmax(row, begin - base, end - base, size, room.weights + r * stride);
    }
    for (long s = 0, num; s < size; s += num) {
        num = size - s < AT_ONCE ? size - s : AT_ONCE;
        const long blocks = num / BLOCK;
        struct ahead next =
            s + num < size ? slots_ahead(c, table, head, value_bytes, base + s + num, end) : following;
        for (long half = 0; half < 2 * blocks; half++) {
            prefetch_some(&next, SIDE * D * AT_ONCE / num);
            pair_values(c, table, head, base + s + half * SIDE, begin, end, room.rest + half * TILE_BYTES / 2,
                        blocks * TILE_BYTES);
        }
        failed |= pairs_product(room.weights + 2 * s, G, stride, blocks, room.rest, blocks * TILE_BYTES, all / PANEL,
                                &next, s == 0, room.sums, all);
    }
    end_products();
    for (long r = 0; r < G; r++) multiply_by(room.sums + r * all, room.factors[r], D, out + r * D);
    return failed;
}

/* The first slot that token i sees. */
INLINE long first_seen(const struct decode *a, long i) {
    return a->window && a->lens[i] > a->window ? a->lens[i] - a->window : 0;
}

/* A KV head of a token. Meanwhile the first keys of the one that this thread will come to next are prefetched. */
static int decode_in_pairs(void *job, long unit) {
    const struct decode *a = job;
    const struct cache *c = &a->cache;
    const long i = unit / c->kv_heads, head = unit % c->kv_heads;
    const long next = unit + a->threads < a->units ? unit + a->threads : unit, other = next / c->kv_heads;
    return attend_in_pairs(c, a->q + i * a->q_stride + head * c->group * c->head_dim, a->tables + i * a->width, head,
                           first_seen(a, i), a->lens[i],
                           slots_ahead(c, a->tables + other * a->width, next % c->kv_heads, 0,
                                       first_seen(a, other) / BLOCK * BLOCK, a->lens[other]),
                           a->out + unit * c->group * c->head_dim);
}

/* See DECODE. */
int baton_decode_pairs(const float *q, long q_stride, const char *layer, long block_bytes, long head_bytes,
                       const int64_t *tables, long width, const int64_t *lens, long N, long kv_heads, long group,
                       long block_size, long head_dim, long window, float scale, float *out, int threads) {
    const struct cache c = {layer, block_bytes, head_bytes, kv_heads, group, block_size, head_dim, scale};
    struct decode a = {c, q, q_stride, tables, width, lens, window, kv_heads, out, N * kv_heads, threads};
    return share(a.units, threads, decode_in_pairs, &a);
}

/* As `attend_tile`. */
static int attend_tile_in_pairs(const struct prefill *a, long begin, long end) {
    const struct cache *c = &a->cache;
    const long D = c->head_dim, num = end - begin, all = dims_of(D), slots = seen_by(a, end - 1).end;
    const long blocks = blocks_of(slots), size = blocks * BLOCK, stride = pairs_stride(size);
    const struct paired_room room = paired_room(c, num, size, 0);
    if (!room.scores) return 1;
    for (long r = 0; r < num; r++) round_query(c, query_of(a, begin + r), room.queries + r * pairs_stride(D));
    int failed = pairs_product(room.queries, num, pairs_stride(D), blocks_of(D), a->keys, blocks_of(D) * TILE_BYTES,
                               2 * blocks, NULL, 1, room.scores, size);
    for (long r = 0; r < num; r++) {
        const struct seen seen = seen_by(a, begin + r);
        room.factors[r] = round_softmax(room.scores + r * size, seen.begin, seen.end, size, room.weights + r * stride);
    }
    failed |= pairs_product(room.weights, num, stride, blocks, a->values, blocks_of(a->size) * TILE_BYTES, all / PANEL,
                            NULL, 1, room.sums, all);
    end_products();
    for (long r = 0; r < num; r++) multiply_by(room.sums + r * all, room.factors[r], D, attended_by(a, begin + r));
    return failed;
}

static int pair_slots(void *job, long unit) {
    const struct prefill *a = job;
    const struct cache *c = &a->cache;
    const long stop = (unit + 1) * RUN < a->panels ? (unit + 1) * RUN : a->panels;
    const long begin = a->window && a->start + 1 > a->window ? a->start + 1 - a->window : 0;
    for (long p = unit * RUN; p < stop; p++) {
        const long s = a->first + p * PANEL;
        pair_keys(c, a->table, a->head, s, begin, a->end, a->keys + p * blocks_of(c->head_dim) * TILE_BYTES);
        pair_values(c, a->table, a->head, s, begin, a->end, a->values + p * TILE_BYTES / 2,
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
    struct prefill a = {c, q, q_stride, table, start, first, end, window, panels, size, N * group, 0, QUERIES_IN_PAIRS,
                        attend_tile_in_pairs, keys, keys + key_bytes, out};
    return attend_prompt(&a, pair_slots, threads);
}
