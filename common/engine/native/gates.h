/* Gated products: out `[M, F]` = silu(x times the gates) * (x times the ups). Included by `kernels.c`.

   Panels of gates and of ups alternate. A thread takes some of them, holds their sums in its caches, and writes only
   the gated numbers: the sums of many rows would be the largest activations by far. For AMX see `tiles.h`. */

enum { SUMS = 1 << 15 }; /* numbers of the sums that a thread holds */

static __thread struct room gated;

/* How many adjacent panels a thread takes at a time, unless it takes all: a multiple of GROUP, so that no gate is
   without its up, and what is gated is whole blocks. */
static long gated_run(long panels, long rows, long panel_bytes, int threads) {
    const long held = SUMS / (rows * PANEL) / GROUP * GROUP, most = held < GROUP ? GROUP : held;
    const long run = rows > MANY ? most : run_of(panels, panel_bytes, threads);
    return run < most ? run : most;
}

/* Gate the sums `[rows][panels][16]` of the panels from `first` on, a multiple of GROUP. */
INLINE void gate_sums(const float *sums, long rows, long panels, long first, int rounded, char *out, long F) {
    for (long r = 0; r < rows; r++, out += bytes_of_row(F, rounded))
        for (long p = 0; p < panels; p += GROUP) {
            const long at = (first + p) / 2 * PANEL, num = F - at < BLOCK ? F - at : BLOCK;
            float gated[BLOCK];
            for (long i = 0; i < 2 && p + 2 * i < panels; i++, sums += 2 * PANEL)
                UNROLL for (int part = 0; part < LANES; part++) {
                    const float *gates = sums + part * LANE;
                    lane some = silu_of_lanes(lanes(gates)) * lanes(gates + PANEL);
                    memcpy(gated + i * PANEL + part * LANE, &some, sizeof(some));
                }
            if (rounded) round_row(gated, num, out + 2 * at);
            else if (num == BLOCK) memcpy(out + 4 * at, gated, 4 * BLOCK);
            else memcpy(out + 4 * at, gated, 4 * num);
        }
}

/* The packed weights have alternating panels of gates and of ups, as `bias` has 16 numbers for each of them, unless it
   is NULL. Returns 0, or 1 if there is not enough memory. Rows are packed as in `LINEAR`, `num` input features of each
   at a time. */
#define GATES(NAME, PANELS_NAME, TYPE)                                                                                 \
    static int NAME##_panels(void *job, long unit) {                                                                   \
        const struct linear *a = job;                                                                                  \
        const long row_bytes = PANEL * size_of(TYPE), panel_bytes = a->K * row_bytes, first = unit * a->run;           \
        const long panels = a->panels - first < a->run ? a->panels - first : a->run, width = panels * PANEL;           \
        float *sums = grown(&gated, a->rows * width);                                                                  \
        if (!sums) return 1;                                                                                           \
        for (long k = 0; k < a->K; k += a->num) {                                                                      \
            const long left = a->K - k, num = left < a->num ? left : a->num;                                           \
            const float *bias = num == left && a->bias ? a->bias + first * PANEL : NULL;                               \
            PANELS_NAME(a->packed + a->rows * k, a->rows, num, a->w + first * panel_bytes + k * row_bytes, row_bytes,  \
                        panel_bytes, panels, NULL, k == 0, bias, sums, width, 0);                                      \
        }                                                                                                              \
        gate_sums(sums, a->rows, panels, first, TYPE == PAIRS,                                                         \
                  (char *)a->out + a->m * bytes_of_row(a->N, TYPE == PAIRS), a->N);                                    \
        return 0;                                                                                                      \
    }                                                                                                                  \
    int NAME(const float *x, long M, long K, const char *w, const float *bias, float *out, long F, int threads) {      \
        const long height = M < ROWS ? M : ROWS, depth = depth_of(height, K, TYPE);                                    \
        struct linear a = {.x = x, .M = M, .K = K, .w = w, .bias = bias, .out = out, .N = F};                          \
        float *packed = M == 1 ? (float *)x : room_for(height * K);                                                    \
        if (!packed) return 1;                                                                                         \
        a.panels = 2 * ((F + PANEL - 1) / PANEL);                                                                      \
        a.run = gated_run(a.panels, height, K * PANEL * size_of(TYPE), threads);                                       \
        for (; a.m < M; a.m += height) {                                                                               \
            a.rows = M - a.m < height ? M - a.m : height;                                                              \
            for (a.k = 0; a.k < K && M > 1; a.k += depth) {                                                            \
                a.num = K - a.k < depth ? K - a.k : depth;                                                             \
                a.packed = packed + a.rows * a.k;                                                                      \
                share(tiles_of(a.rows), M > MANY ? threads : 1, pack_rows, &a);                                        \
            }                                                                                                          \
            a.packed = packed;                                                                                         \
            a.num = depth;                                                                                             \
            if (share((a.panels + a.run - 1) / a.run, threads, NAME##_panels, &a)) return 1;                           \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

GATES(baton_gated_float32, panels_float32, F32)
GATES(baton_gated_bfloat16, panels_bfloat16, BF16)
GATES(baton_gated_float16, panels_float16, F16)
GATES(gated_words, panels_pairs, PAIRS)

static int gate_pairs(const float *x, const char *rounded, long M, long K, const char *w, const float *bias, float *out,
                      long F, int threads) {
    const long blocks = blocks_of(K);
#ifdef TILES
    if (with_tiles) {
        struct tiled product = {.x = x, .M = M, .K = K, .blocks = blocks, .rounded = rounded, .w = w,
                                .panel_bytes = blocks * TILE_BYTES, .panels = 2 * ((F + SIDE - 1) / SIDE),
                                .bias = bias, .out = (char *)out, .N = F, .gates = 1};
        return multiply_tiles(&product, threads);
    }
#endif
    const char *rows = rounded ? rounded : rounded_rows(x, M, K, threads);
    return rows ? gated_words((const float *)rows, M, blocks * SIDE, w, bias, out, F, threads) : 1;
}

/* The same with x rounded to bf16, and weights in pairs. What is gated is rounded to bf16, too: inputs for
   `baton_linear_rounded`, which is all that it is for, in half of the memory. */
int baton_gated_pairs(const float *x, long M, long K, const char *w, const float *bias, float *out, long F,
                      int threads) {
    return gate_pairs(x, NULL, M, K, w, bias, out, F, threads);
}

/* The same of rows that are rounded already. */
static int gated_rounded(const float *x, long M, long K, const char *w, const float *bias, float *out, long F,
                         int threads) {
    return gate_pairs(NULL, (const char *)x, M, K, w, bias, out, F, threads);
}
