/* Products of bf16 for CPUs that multiply it: the inputs are rounded to bf16, and their products are exact and summed
   in float32. Included by `kernels.c`.

   Weights are packed in panels of 16 outputs, `[panel][half of the input features][16][2]`: an output's weights of two
   adjacent input features are one word. The input features are padded with zeros to whole blocks of 32, so that a block
   of a panel is a tile of AMX, and a row of it is a vector of AVX-512.

   With AVX-512 a sum is one chain in the order of the pairs. With AMX a block has a chain for each half of its pairs,
   and the sums of blocks are added in their order (Intel's Software Developer's Manual, TDPBF16PS). Both are the same
   whatever the number of rows, so all products of a CPU are computed with one of them. */

#include <sys/syscall.h>
#include <unistd.h>

enum {
    SIDE = 16,                /* rows of a tile, and the words of each: a tile of sums has 16 rows and 16 outputs */
    BLOCK = 2 * SIDE,         /* input features of a tile */
    TILE_BYTES = 4 * SIDE * SIDE,
    AHEAD_BYTES = 4096,       /* of a panel, from the block that is used to the one that is prefetched */
    TILES_ROWS = 256,         /* most rows that are multiplied with a panel before the next one */
    TILES_DEPTH = 64,         /* most blocks of their input features, which then stay in the second cache */
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
    long M, K;
    char *to;
};

/* Round a row; the rows follow each other. */
static int round_rows(void *job, long unit) {
    const struct rounding *a = job;
    round_row(a->x + unit * a->K, a->K, a->to + unit * blocks_of(a->K) * 2 * BLOCK);
    return 0;
}

/* --- tiles of AMX ------------------------------------------------------------------------------------------------- */

#ifdef EMULATED_TILES
#include EMULATED_TILES
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define TILES
/* The compiler is not told what memory the instructions read. */
#define READ_BY_NEXT(p) __asm__ volatile("" ::"r"(p) : "memory")
#define CONFIGURE(p) READ_BY_NEXT(p); _tile_loadconfig(p)
#define LOAD(t, p) READ_BY_NEXT(p); _tile_loadd(t, p, 4 * SIDE)
#define STORE(t, p) _tile_stored(t, p, 4 * SIDE)
#define MULTIPLY(sums, a, b) _tile_dpbf16ps(sums, a, b)
#define RELEASE _tile_release()
/* Linux lets a process use tiles after it has asked: ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA. */
#define ALLOWED (!syscall(SYS_arch_prctl, 0x1023, 18))
#endif

#ifdef TILES

/* A product, or the part of it that is computed at a time: `rows` rows of x from `m` on, and `num` blocks of the input
   features from `k` on. A unit of packing is a tile of rows, and one of multiplying is `run` panels. */
struct tiled {
    const char *x; /* rounded */
    long M, blocks;
    const char *w;
    const float *bias;
    float *out;
    char *packed; /* [tile of rows][block][16][32] */
    long N, m, rows, k, num, panels, run;
};

INLINE long row_tiles_of(long rows) { return (rows + SIDE - 1) / SIDE; }

static int pack_row_tile(void *job, long unit) {
    const struct tiled *a = job;
    const long row_bytes = a->blocks * 2 * BLOCK;
    for (long r = 0; r < SIDE; r++) {
        const char *from = a->x + (a->m + unit * SIDE + r) * row_bytes + a->k * 2 * BLOCK;
        char *to = a->packed + unit * a->num * TILE_BYTES + r * 2 * BLOCK;
        for (long b = 0; b < a->num; b++) {
            if (unit * SIDE + r < a->rows) memcpy(to + b * TILE_BYTES, from + b * 2 * BLOCK, 2 * BLOCK);
            else memset(to + b * TILE_BYTES, 0, 2 * BLOCK);
        }
    }
    return 0;
}

/* Copy the sums of a tile of rows and a panel from the outputs, or to them, at last with the bias. */
INLINE void exchange(const struct tiled *a, long t, long panel, float *sums, int out) {
    const long rows = a->rows - t * SIDE < SIDE ? a->rows - t * SIDE : SIDE;
    const long num = a->N - panel * SIDE < SIDE ? a->N - panel * SIDE : SIDE;
    const float *bias = a->bias && a->k + a->num == a->blocks ? a->bias + panel * SIDE : NULL;
    for (long r = 0; r < rows; r++) {
        float *at = a->out + (a->m + t * SIDE + r) * a->N + panel * SIDE, *sum = sums + r * SIDE;
        if (!out) memcpy(sum, at, num * sizeof(float));
        else if (!bias && num == SIDE) memcpy(at, sum, SIDE * sizeof(float));
        else if (num == SIDE)
            UNROLL for (int i = 0; i < SIDE; i += 8) store((char *)(at + i), floats(sum + i) + floats(bias + i), F32);
        else
            for (long i = 0; i < num; i++) at[i] = sum[i] + (bias ? bias[i] : 0);
    }
}

/* Products of one tile of rows with four panels, or of two with two: `x` and `w` are the operands' blocks. The panels
   of few rows come from memory, so that they are prefetched. */
INLINE void one_by_four(const char *x, const char *const *w, long num, float *sums) {
    LOAD(0, sums);
    LOAD(1, sums + SIDE * SIDE);
    LOAD(2, sums + 2 * SIDE * SIDE);
    LOAD(3, sums + 3 * SIDE * SIDE);
    for (long b = 0; b < num * TILE_BYTES; b += TILE_BYTES) {
        for (long i = 0; i < 4 * TILE_BYTES; i += 64)
            __builtin_prefetch(w[i / TILE_BYTES] + b + AHEAD_BYTES + i % TILE_BYTES, 0, 2);
        LOAD(4, x + b);
        LOAD(5, w[0] + b);
        MULTIPLY(0, 4, 5);
        LOAD(6, w[1] + b);
        MULTIPLY(1, 4, 6);
        LOAD(7, w[2] + b);
        MULTIPLY(2, 4, 7);
        LOAD(5, w[3] + b);
        MULTIPLY(3, 4, 5);
    }
    STORE(0, sums);
    STORE(1, sums + SIDE * SIDE);
    STORE(2, sums + 2 * SIDE * SIDE);
    STORE(3, sums + 3 * SIDE * SIDE);
}

INLINE void two_by_two(const char *x, const char *const *w, long num, float *sums) {
    LOAD(0, sums);
    LOAD(1, sums + SIDE * SIDE);
    LOAD(2, sums + 2 * SIDE * SIDE);
    LOAD(3, sums + 3 * SIDE * SIDE);
    for (long b = 0; b < num * TILE_BYTES; b += TILE_BYTES) {
        LOAD(4, x + b);
        LOAD(6, w[0] + b);
        MULTIPLY(0, 4, 6);
        LOAD(5, x + num * TILE_BYTES + b);
        MULTIPLY(2, 5, 6);
        LOAD(7, w[1] + b);
        MULTIPLY(1, 4, 7);
        MULTIPLY(3, 5, 7);
    }
    STORE(0, sums);
    STORE(1, sums + SIDE * SIDE);
    STORE(2, sums + 2 * SIDE * SIDE);
    STORE(3, sums + 3 * SIDE * SIDE);
}

/* Multiply the packed rows with the panels of a unit. What is missing of two or four panels is the last one again. */
static int tiled_panels(void *job, long unit) {
    const struct tiled *a = job;
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    const long tiles = row_tiles_of(a->rows), beside = tiles == 1 ? 4 : 2;
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = 4 * SIDE;
        config.rows[t] = t < 5 && a->rows < SIDE ? a->rows : SIDE; /* the sums and the rows of x */
    }
    CONFIGURE(&config);
    const long end = (unit + 1) * a->run < a->panels ? (unit + 1) * a->run : a->panels;
    float sums[4 * SIDE * SIDE] __attribute__((aligned(64)));
    for (long p = unit * a->run; p < end; p += beside)
        for (long t = 0; t < tiles; t += 2) {
            const int two = t + 1 < tiles;
            const char *x = a->packed + t * a->num * TILE_BYTES, *w[4];
            for (long i = 0; i < 4; i++) {
                const long panel = p + i % beside < end ? p + i % beside : end - 1;
                w[i] = a->w + (panel * a->blocks + a->k) * TILE_BYTES;
            }
            if (!a->k) memset(sums, 0, sizeof(sums));
            for (long i = 0; i < 4 && a->k; i++)
                if (p + i % beside < end && (i < beside || two))
                    exchange(a, t + i / beside, p + i % beside, sums + i * SIDE * SIDE, 0);
            if (two) two_by_two(x, w, a->num, sums);
            else one_by_four(x, w, a->num, sums);
            for (long i = 0; i < 4; i++)
                if (p + i % beside < end && (i < beside || two))
                    exchange(a, t + i / beside, p + i % beside, sums + i * SIDE * SIDE, 1);
        }
    RELEASE;
    return 0;
}

/* See `baton_linear_pairs`, for rows that are rounded. */
static int linear_tiles(const char *x, long M, long blocks, const char *w, const float *bias, float *out, long N,
                        int threads) {
    const long height = M < TILES_ROWS ? M : TILES_ROWS, depth = M > SIDE && blocks > TILES_DEPTH ? TILES_DEPTH : blocks;
    struct tiled a = {.x = x, .M = M, .blocks = blocks, .w = w, .bias = bias, .out = out, .N = N};
    a.packed = (char *)room_for(row_tiles_of(height) * depth * TILE_BYTES / 4);
    if (!a.packed) return 1;
    a.panels = (N + SIDE - 1) / SIDE;
    a.run = M > MANY ? 2 : run_of(a.panels, blocks * TILE_BYTES, threads);
    for (a.m = 0; a.m < M; a.m += height)
        for (a.k = 0; a.k < blocks; a.k += depth) {
            a.rows = M - a.m < height ? M - a.m : height;
            a.num = blocks - a.k < depth ? blocks - a.k : depth;
            share(row_tiles_of(a.rows), threads, pack_row_tile, &a);
            share((a.panels + a.run - 1) / a.run, threads, tiled_panels, &a);
        }
    return 0;
}

#endif

/* --- either ------------------------------------------------------------------------------------------------------- */

#ifdef TILES
static int with_tiles;
#endif

/* Whether products of bf16 are to be computed by `baton_linear_pairs`. To be called once, before it. */
int baton_multiplies_pairs(void) {
#ifdef TILES
    with_tiles = ALLOWED;
#endif
#ifdef __AVX512BF16__
    return 1;
#elif defined(TILES)
    return with_tiles;
#else
    return 0;
#endif
}

/* out `[M, N]` = x `[M, K]`, rounded to bf16, times the packed weights, plus bias `[N]` unless that is NULL. Returns 0,
   or 1 if there is not enough memory. */
int baton_linear_pairs(const float *x, long M, long K, const char *w, const float *bias, float *out, long N,
                       int threads) {
    const long blocks = blocks_of(K);
    struct rounding a = {x, M, K, (char *)grown(&rounded, M * blocks * SIDE)};
    if (!a.to) return 1;
    share(M, M > MANY ? threads : 1, round_rows, &a);
#ifdef TILES
    if (with_tiles) return linear_tiles(a.to, M, blocks, w, bias, out, N, threads);
#endif
    return linear_words((const float *)a.to, M, blocks * SIDE, w, bias, out, N, threads);
}
