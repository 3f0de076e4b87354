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
    AHEAD = 4,                /* blocks of a panel from the one that is used to the one that is prefetched */
    TILES_ROWS = 512,         /* most rows that are multiplied with a panel before the next one */
    TILES_DEPTH = 32,         /* most blocks of their input features, which then stay in the second cache */
    PANELS_DEPTH = 10,        /* most blocks of two panels that are multiplied with all rows before the next ones: with
                                 as many of two tiles of rows they stay in the first cache */
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
    long stride, K;
    char *to;
};

static int round_one(void *job, long unit) {
    const struct rounding *a = job;
    round_row(a->x + unit * a->stride, a->K, a->to + unit * blocks_of(a->K) * 2 * BLOCK);
    return 0;
}

/* Round M rows of K numbers, `stride` apart, in memory of this thread, where they follow each other; NULL if there is
   not enough. */
static const char *rounded_rows(const float *x, long M, long stride, long K, int threads) {
    struct rounding a = {x, stride, K, (char *)grown(&rounded, M * blocks_of(K) * SIDE)};
    if (a.to) share(M, M > MANY ? threads : 1, round_one, &a);
    return a.to;
}

/* --- tiles of AMX ------------------------------------------------------------------------------------------------- */

#ifdef EMULATED_TILES
#include EMULATED_TILES
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define TILES
/* The compiler is not told what memory the instructions read. */
#define READ_BY_NEXT(p) __asm__ volatile("" ::"r"(p) : "memory")
#define CONFIGURE(p) READ_BY_NEXT(p); _tile_loadconfig(p)
#define LOAD(t, p, stride) READ_BY_NEXT(p); _tile_loadd(t, p, stride)
#define STORE(t, p, stride) _tile_stored(t, p, stride)
#define CLEAR(t) _tile_zero(t)
#define MULTIPLY(sums, a, b) _tile_dpbf16ps(sums, a, b)
#define RELEASE _tile_release()
/* Linux lets a process use tiles after it has asked: ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA. */
#define ALLOWED (!syscall(SYS_arch_prctl, 0x1023, 18))
#endif

#ifdef TILES

/* A product, or the part of it that is computed at a time: `rows` rows of x from `m` on, and `num` blocks of the input
   features from `k` on. A unit of packing is a tile of rows, and one of multiplying is `run` panels. */
struct tiled {
    const float *x; /* M rows of K numbers, `stride` apart */
    long M, K, stride, blocks;
    const char *rounded; /* or these rows, rounded, of whole blocks; also if there is but a tile of them */
    const char *w;
    long panel_bytes, panels; /* from a panel to the next one, and their number */
    int fresh, cold;          /* whether the products are not added to the outputs; whether panels come from memory */
    const float *bias;
    float *out;
    long N; /* outputs of a row */
    char *packed; /* [tile of rows][block][16][32] */
    long m, rows, k, num, run;
};

INLINE long row_tiles_of(long rows) { return (rows + SIDE - 1) / SIDE; }

/* Round and pack a tile of rows. */
static int pack_row_tile(void *job, long unit) {
    const struct tiled *a = job;
    const long first = unit * SIDE, rows = a->rows - first < SIDE ? a->rows - first : SIDE;
    char *to = a->packed + unit * a->num * TILE_BYTES;
    for (long b = 0; b < a->num; b++, to += TILE_BYTES) {
        const long at = (a->k + b) * BLOCK, num = a->K - at < BLOCK ? a->K - at : BLOCK;
        if (a->rounded) {
            const char *block = a->rounded + ((a->m + first) * a->blocks * BLOCK + at) * 2;
            for (long r = 0; r < rows; r++) memcpy(to + r * 2 * BLOCK, block + r * a->blocks * 2 * BLOCK, 2 * BLOCK);
            memset(to + rows * 2 * BLOCK, 0, (SIDE - rows) * 2 * BLOCK);
            continue;
        }
        const float *from = a->x + (a->m + first) * a->stride + at;
        for (long r = 0; r < rows; r++) {
            if (num == BLOCK) round_row(from + r * a->stride, BLOCK, to + r * 2 * BLOCK);
            else round_row(from + r * a->stride, num, to + r * 2 * BLOCK);
        }
        memset(to + rows * 2 * BLOCK, 0, (SIDE - rows) * 2 * BLOCK);
    }
    return 0;
}

/* Where the sums of four pairs of a tile of rows and a panel are: among the outputs, in rows `stride` bytes apart. */
struct sums {
    char *at[4];
    long stride[4];
};

/* A tile of rows of x: its blocks are `step` bytes apart, and a block's rows `stride`. */
struct row_tile {
    const char *at;
    long step, stride;
};

/* Prefetch the block that is AHEAD blocks behind block b of a part of a panel, of which `left` of `whole` blocks are
   not multiplied yet, or of the panel `further` bytes behind. */
INLINE void prefetch_block(const char *part, long b, long left, long whole, long further) {
    const char *at = part + (b + AHEAD) * TILE_BYTES + (b + AHEAD < left ? 0 : further - whole * TILE_BYTES);
    UNROLL for (int i = 0; i < SIDE; i++) __builtin_prefetch(at + 4 * SIDE * i, 0, 2);
}

#define LOAD_SUMS(t, i) if (fresh) { CLEAR(t); } else { LOAD(t, sums->at[i], sums->stride[i]); }
#define STORE_SUMS(t, i) STORE(t, sums->at[i], sums->stride[i])

/* Where panels come from memory, the next ones are `further` bytes behind these; else it is 0. See `prefetch_block`. */
struct behind {
    long left, whole, further;
};

#define PREFETCH(i) if (behind.further) prefetch_block(w[i], b, behind.left, behind.whole, behind.further)

/* Products of one tile of rows with `num` blocks of two or four panels, or of two tiles with two. */
INLINE void one_tile(int panels, struct row_tile x, const char *const *w, long num, struct behind behind, int fresh,
                     const struct sums *sums) {
    LOAD_SUMS(0, 0)
    LOAD_SUMS(1, 1)
    if (panels == 4) {
        LOAD_SUMS(2, 2)
        LOAD_SUMS(3, 3)
    }
    for (long b = 0; b < num; b++) {
        LOAD(4, x.at + b * x.step, x.stride);
        PREFETCH(0);
        LOAD(5, w[0] + b * TILE_BYTES, 4 * SIDE);
        MULTIPLY(0, 4, 5);
        PREFETCH(1);
        LOAD(6, w[1] + b * TILE_BYTES, 4 * SIDE);
        MULTIPLY(1, 4, 6);
        if (panels == 2) continue;
        PREFETCH(2);
        LOAD(7, w[2] + b * TILE_BYTES, 4 * SIDE);
        MULTIPLY(2, 4, 7);
        PREFETCH(3);
        LOAD(5, w[3] + b * TILE_BYTES, 4 * SIDE);
        MULTIPLY(3, 4, 5);
    }
    STORE_SUMS(0, 0);
    STORE_SUMS(1, 1);
    if (panels == 2) return;
    STORE_SUMS(2, 2);
    STORE_SUMS(3, 3);
}

INLINE void two_tiles(struct row_tile x, const char *other, const char *const *w, long num, struct behind behind,
                      int fresh, const struct sums *sums) {
    LOAD_SUMS(0, 0)
    LOAD_SUMS(1, 1)
    LOAD_SUMS(2, 2)
    LOAD_SUMS(3, 3)
    for (long b = 0; b < num; b++) {
        LOAD(4, x.at + b * x.step, x.stride);
        PREFETCH(0);
        LOAD(6, w[0] + b * TILE_BYTES, 4 * SIDE);
        MULTIPLY(0, 4, 6);
        LOAD(5, other + b * x.step, x.stride);
        MULTIPLY(2, 5, 6);
        PREFETCH(1);
        LOAD(7, w[1] + b * TILE_BYTES, 4 * SIDE);
        MULTIPLY(1, 4, 7);
        MULTIPLY(3, 5, 7);
    }
    STORE_SUMS(0, 0);
    STORE_SUMS(1, 1);
    STORE_SUMS(2, 2);
    STORE_SUMS(3, 3);
}

/* Multiply tile t of the rows, and with `two` the next one, too, with up to `panels` panels from p on, 2 or 4, of which
   `left` are there: `num` blocks from `skipped` on. The sums of whole tiles are computed in the outputs, and others
   beside them. */
INLINE void tiled_sums(const struct tiled *a, int panels, long t, int two, long p, long left, long skipped, long num) {
    float room[4][SIDE * SIDE] __attribute__((aligned(64)));
    const long row_bytes = a->N * sizeof(float), k = a->k + skipped;
    const int fresh = a->fresh && !k, last = k + num == a->blocks;
    const char *w[4];
    int whole[4];
    struct sums sums;
    for (int i = 0; i < 4; i++) { /* with two tiles, the last two are those of the second */
        const long tile = t + i / panels, panel = p + i % panels, row = tile * SIDE;
        const int used = i % panels < left && (i < panels || two);
        w[i] = a->w + (i % panels < left ? panel : p + left - 1) * a->panel_bytes + k * TILE_BYTES;
        char *at = (char *)(a->out + (a->m + row) * a->N + panel * SIDE);
        whole[i] = used && (panel + 1) * SIDE <= a->N && (row + SIDE <= a->rows || a->rows < SIDE);
        sums.at[i] = whole[i] ? at : (char *)room[i];
        sums.stride[i] = whole[i] ? row_bytes : 4 * SIDE;
        if (whole[i] || fresh || !used) continue;
        for (long r = 0; r < SIDE && row + r < a->rows; r++)
            for (long n = 0; n < SIDE && panel * SIDE + n < a->N; n++)
                room[i][r * SIDE + n] = a->out[(a->m + row + r) * a->N + panel * SIDE + n];
    }
    struct row_tile x = {a->packed + (t * a->num + skipped) * TILE_BYTES, TILE_BYTES, 4 * SIDE};
    if (!a->packed) x = (struct row_tile){a->rounded + k * 2 * BLOCK, 2 * BLOCK, a->blocks * 2 * BLOCK};
    const struct behind behind = {a->num - skipped, a->num, a->cold && !t ? panels * a->panel_bytes : 0};
    if (two) two_tiles(x, x.at + a->num * TILE_BYTES, w, num, behind, fresh, &sums);
    else if (panels == 2) one_tile(2, x, w, num, behind, fresh, &sums);
    else one_tile(4, x, w, num, behind, fresh, &sums);
    for (int i = 0; i < 4; i++) {
        const long row = (t + i / panels) * SIDE, first = (p + i % panels) * SIDE;
        const float *bias = last && a->bias ? a->bias + first : NULL;
        if (i % panels >= left || (i >= panels && !two) || (whole[i] && !bias)) continue;
        for (long r = 0; r < SIDE && row + r < a->rows; r++) {
            const char *from = sums.at[i] + r * sums.stride[i];
            float *to = a->out + (a->m + row + r) * a->N + first;
            if (first + SIDE <= a->N && bias)
                UNROLL for (int n = 0; n < SIDE; n += 8)
                    store((char *)(to + n), load(from + 4 * n, F32) + floats(bias + n), F32);
            else
                for (long n = 0; n < SIDE && first + n < a->N; n++)
                    to[n] = ((const float *)from)[n] + (bias ? bias[n] : 0);
        }
    }
}

/* Multiply the rows with the panels of a unit. */
static int tiled_panels(void *job, long unit) {
    const struct tiled *a = job;
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = 4 * SIDE;
        config.rows[t] = t < 5 && a->rows < SIDE ? a->rows : SIDE; /* the sums and the rows of x */
    }
    CONFIGURE(&config);
    const long end = (unit + 1) * a->run < a->panels ? (unit + 1) * a->run : a->panels;
    const long tiles = row_tiles_of(a->rows);
    for (long p = unit * a->run; p < end && tiles == 1; p += 4) tiled_sums(a, 4, 0, 0, p, end - p, 0, a->num);
    const long depth = tiles > 2 ? PANELS_DEPTH : a->num; /* two tiles of rows meet a panel once */
    for (long p = unit * a->run; p < end && tiles > 1; p += 2)
        for (long k = 0; k < a->num; k += depth)
            for (long t = 0; t < tiles; t += 2)
                tiled_sums(a, 2, t, t + 1 < tiles, p, end - p, k, a->num - k < depth ? a->num - k : depth);
    RELEASE;
    return 0;
}

/* Make room for packing `height` rows of `depth` blocks; up to a tile of rows is rounded at once. Returns 0, or 1 if
   there is not enough memory. */
static int hold_rows(struct tiled *a, long height, long depth) {
    if (a->M > SIDE) return !(a->packed = (char *)room_for(row_tiles_of(height) * depth * TILE_BYTES / 4));
    a->packed = NULL;
    return !a->rounded && !(a->rounded = rounded_rows(a->x, a->M, a->stride, a->K, 1));
}

/* Compute a product; the members up to N are given, but for either `x` or `rounded`. Returns 0, or 1 if there is not
   enough memory. */
static int multiply_tiles(struct tiled *a, int threads) {
    const long height = a->M < TILES_ROWS ? a->M : TILES_ROWS;
    const long depth = height * a->blocks > TILES_ROWS * TILES_DEPTH ? TILES_DEPTH : a->blocks;
    if (hold_rows(a, height, depth)) return 1;
    a->run = a->M > MANY ? 2 : run_of(a->panels, a->blocks * TILE_BYTES, threads);
    for (a->m = 0; a->m < a->M; a->m += height)
        for (a->k = 0; a->k < a->blocks; a->k += depth) {
            a->rows = a->M - a->m < height ? a->M - a->m : height;
            a->num = a->blocks - a->k < depth ? a->blocks - a->k : depth;
            if (a->packed) share(row_tiles_of(a->rows), a->rows > MANY ? threads : 1, pack_row_tile, a);
            share((a->panels + a->run - 1) / a->run, threads, tiled_panels, a);
        }
    return 0;
}

#endif

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

static int multiply_pairs(const float *x, const char *rounded, long M, long K, const char *w, const float *bias,
                          float *out, long N, int threads) {
    const long blocks = blocks_of(K);
#ifdef TILES
    if (with_tiles) {
        struct tiled product = {.x = x, .M = M, .K = K, .stride = K, .blocks = blocks, .rounded = rounded, .w = w,
                                .panel_bytes = blocks * TILE_BYTES, .panels = (N + SIDE - 1) / SIDE, .fresh = 1,
                                .cold = 1, .bias = bias, .out = out, .N = N};
        return multiply_tiles(&product, threads);
    }
#endif
    const char *rows = rounded ? rounded : rounded_rows(x, M, K, K, threads);
    return rows ? baton_linear_words((const float *)rows, M, blocks * SIDE, w, bias, out, N, threads) : 1;
}

/* out `[M, N]` = x `[M, K]`, rounded to bf16, times the packed weights, plus bias `[N]` unless that is NULL. Returns 0,
   or 1 if there is not enough memory. */
int baton_linear_pairs(const float *x, long M, long K, const char *w, const float *bias, float *out, long N,
                       int threads) {
    return multiply_pairs(x, NULL, M, K, w, bias, out, N, threads);
}

/* The same of rows that are rounded already, and padded with zeros to whole blocks. */
int baton_linear_rounded(const char *x, long M, long K, const char *w, const float *bias, float *out, long N,
                         int threads) {
    return multiply_pairs(NULL, x, M, K, w, bias, out, N, threads);
}

/* The same by one thread, for attention: M rows of x, `stride` apart, with `panels` panels, `panel_bytes` apart, to
   rows of `out`, `width` apart, a multiple of 16. The products are added to what is there unless they are `fresh`.
   Meanwhile prefetch a share of `next`, unless that is NULL. */
static int pairs_product(const float *x, long M, long stride, long K, const char *w, long panel_bytes, long panels,
                         const struct ahead *next, int fresh, float *out, long width) {
    const long blocks = blocks_of(K), words = blocks * SIDE;
#ifdef TILES
    if (with_tiles) {
        for (long at = 0; next && at < panels * panel_bytes / 64 * next->pace / STREAMS; at += 64)
            UNROLL for (int i = 0; i < STREAMS; i++) __builtin_prefetch(next->at[i] + at, 0, 2);
        struct tiled product = {.x = x, .M = M, .K = K, .stride = stride, .blocks = blocks, .w = w,
                                .panel_bytes = panel_bytes, .panels = panels, .fresh = fresh, .out = out, .N = width};
        return multiply_tiles(&product, 1);
    }
#endif
    const char *rows = rounded_rows(x, M, stride, K, 1);
    float *packed = room_for(M * words);
    if (!rows || !packed) return 1;
    for (long t = 0; t < tiles_of(M); t++) pack_tile((const float *)rows, M, t, words, words, packed);
    panels_pairs(packed, M, words, w, 4 * SIDE, panel_bytes, panels, next, fresh, NULL, out, width, 0);
    return 0;
}
