/* Products of bf16 for CPUs that multiply it: the inputs are rounded to bf16, and their products are exact and summed
   in float32. Included by `kernels.c`.

   Weights are packed in panels of 16 outputs, `[panel][half of the input features][16][2]`: an output's weights of two
   adjacent input features are one word. The input features are padded with zeros to whole blocks of 32, so that a block
   of a panel is a tile of AMX, and a row of it is a vector of AVX-512.

   With AVX-512 a sum is one chain in the order of the pairs. With AMX a block has a chain for each half of its pairs,
   and the sums of blocks are added in their order (Intel's Software Developer's Manual, TDPBF16PS). Both are the same
   whatever the number of rows, so all products of a CPU are computed with one of them. */

enum {
    SIDE = 16,                /* rows of a tile, and the words of each: a tile of sums has 16 rows and 16 outputs */
    BLOCK = 2 * SIDE,         /* input features of a tile */
    TILE_BYTES = 4 * SIDE * SIDE,
};

INLINE long blocks_of(long K) { return (K + BLOCK - 1) / BLOCK; }

/* Round n numbers to bf16, to the nearest, ties to even; the rest of the last block is zeros. */
INLINE void round_row(const float *x, long n, char *to) {
    long i = 0;
#ifdef __AVX512BF16__
    for (; i + BLOCK <= n; i += BLOCK) {
        __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + SIDE), _mm512_loadu_ps(x + i));
        memcpy(to + 2 * i, &both, sizeof(both));
    }
#endif
    for (; i + 8 <= n; i += 8) store(to + 2 * i, floats(x + i), BF16);
    if (i == blocks_of(n) * BLOCK) return;
    float rest[8] = {0};
    memcpy(rest, x + i, (n - i) * sizeof(float));
    store(to + 2 * i, floats(rest), BF16);
    memset(to + 2 * (i + 8), 0, 2 * (blocks_of(n) * BLOCK - i - 8));
}

struct rounding {
    const float *x;
    long K;
    char *to;
};

static int round_one(void *job, long unit) {
    const struct rounding *a = job;
    round_row(a->x + unit * a->K, a->K, a->to + unit * blocks_of(a->K) * 2 * BLOCK);
    return 0;
}

/* Round M rows of K numbers in memory of this thread; NULL if there is not enough. */
static const char *rounded_rows(const float *x, long M, long K, int threads) {
    struct rounding a = {x, K, (char *)grown(&rounded, M * blocks_of(K) * SIDE)};
    if (a.to) share(M, M > MANY ? threads : 1, round_one, &a);
    return a.to;
}

/* Round 16 numbers. */
INLINE void round_side(const float *x, char *to) {
#ifdef __AVX512BF16__
    __m256bh half = _mm512_cvtneps_pbh(_mm512_loadu_ps(x));
    memcpy(to, &half, sizeof(half));
#else
    store(to, floats(x), BF16);
    store(to + SIDE, floats(x + 8), BF16);
#endif
}

/* From a row of n numbers to the next: floats, or those of `round_row`. */
INLINE long bytes_of_row(long n, int rounded) { return rounded ? blocks_of(n) * 2 * BLOCK : n * (long)sizeof(float); }

/* Rows of x that `pairs_product` may read, and of sums that it may write, for M of them: a second tile is whole. */
INLINE long rows_held(long M) { return M % (2 * SIDE) > SIDE ? (M + 2 * SIDE - 1) / (2 * SIDE) * 2 * SIDE : M; }

/* From a row of its inputs to the next, in bytes: an odd number of lines, which are not in one place of a cache. */
INLINE long pairs_stride(long K) { return (blocks_of(K) | 1) * 2 * BLOCK; }

#include "tiles.h"

/* --- either ------------------------------------------------------------------------------------------------------- */

#ifdef TILES
static int with_tiles;
#endif

/* With what products of bf16 are to be computed by `baton_linear_pairs`: 2 for AMX, 1 for AVX-512, 0 if the CPU has
   neither. To be called once, before it. */
int baton_multiplies_pairs(void) {
#ifdef TILES
    if ((with_tiles = ALLOWED)) return 2;
#endif
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

/* With what products of float32 are computed, and of what is widened to it. All CPUs with fused multiplication and
   addition give the same bits: those of the first two do. */
const char *baton_multiplies_floats(void) {
#ifdef __AVX512F__
    return "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
    return "avx2";
#else
    return "other";
#endif
}

static int multiply_pairs(const float *x, const char *rounded, long M, long K, const char *w, const float *bias,
                          float *out, long N, int threads) {
    const long blocks = blocks_of(K);
#ifdef TILES
    if (with_tiles) {
        struct tiled product = {.x = x, .M = M, .K = K, .blocks = blocks, .rounded = rounded, .w = w,
                                .panel_bytes = blocks * TILE_BYTES, .panels = (N + SIDE - 1) / SIDE, .bias = bias,
                                .out = (char *)out, .N = N};
        return multiply_tiles(&product, threads);
    }
#endif
    const char *rows = rounded ? rounded : rounded_rows(x, M, K, threads);
    return rows ? baton_linear_words((const float *)rows, M, blocks * SIDE, w, bias, out, N, threads) : 1;
}

/* out `[M, N]` = x `[M, K]`, rounded to bf16, times the packed weights, plus bias `[N]` unless that is NULL. Returns 0,
   or 1 if there is not enough memory. */
int baton_linear_pairs(const float *x, long M, long K, const char *w, const float *bias, float *out, long N,
                       int threads) {
    return multiply_pairs(x, NULL, M, K, w, bias, out, N, threads);
}

/* The same of rows that are rounded already, and padded with zeros to whole blocks. */
int baton_linear_rounded(const float *x, long M, long K, const char *w, const float *bias, float *out, long N,
                         int threads) {
    return multiply_pairs(NULL, (const char *)x, M, K, w, bias, out, N, threads);
}

/* The same by one thread, for attention: M rounded rows of x, `stride` bytes apart, of `blocks` blocks, with `panels`
   panels, `panel_bytes` apart, to rows of `out`, `width` apart, a multiple of 16. The products are added to what is
   there unless they are `fresh`. Meanwhile prefetch a share of `next`, unless that is NULL. After the last one, call
   `end_products`. Returns 0, or 1 if there is not enough memory. */
static int pairs_product(const char *x, long M, long stride, long blocks, const char *w, long panel_bytes, long panels,
                         const struct ahead *next, int fresh, float *out, long width) {
#ifdef TILES
    if (with_tiles) {
        for (long at = 0; next && at < panels * panel_bytes / 64 * next->pace / STREAMS; at += 64)
            UNROLL for (int i = 0; i < STREAMS; i++) __builtin_prefetch(next->at[i] + at, 0, 2);
        attend_tiles(x, M, stride, blocks, w, panel_bytes, panels, fresh, out, width);
        return 0;
    }
#endif
    const long words = blocks * SIDE;
    float *packed = room_for(M * words);
    if (!packed) return 1;
    for (long t = 0; t < tiles_of(M); t++) pack_tile((const float *)x, M, t, stride / 4, words, packed);
    panels_pairs(packed, M, words, w, 4 * SIDE, panel_bytes, panels, next, fresh, NULL, out, width, 0);
    return 0;
}

static void end_products(void) {
#ifdef TILES
    if (with_tiles) release_tiles();
#endif
}
