/* The CPU's part of a decoder: products with weights, attention, and the small operations between them. Compiled at
   first use (`common.engine.native`), with GCC's vector types.

   Sums are in a fixed order, whatever the number of rows, so a row's result does not depend on the rows beside it, nor
   on whether it is a row of a decode step or of a chunk. A product is one chain of additions in the order of the input
   features; a score is one in the order of the dimensions, and a sum of values one in the order of the slots.

   Weights are packed in panels of 16 outputs, `[panel][input feature][16]`, in their own type. Panels of bf16 are in
   the order of `load_pair`; or they are PAIRS (`pairs.h`). The last panel is padded with zeros. The inputs of a product
   are packed, too, and a tile of up to 6 rows and 16 outputs, or 10 and 32, is held in registers (after Goto and van de
   Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 34(3), 2008, sections 4 and 5). */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "crew.h"

typedef float v8 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef _Float16 h8 __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#ifdef __AVX__
#define HOLD(x) __asm__("" : "+v"(x)) /* keep x in a register: GCC would load it again for each of its uses */
#else
#define HOLD(x)
#endif

enum { F32, BF16, F16, PAIRS };
enum {
    PANEL = 16,   /* outputs of a panel */
    GROUP = 4,    /* panels that are multiplied with a single row at a time */
    ROWS = 192,   /* most rows that are multiplied with a panel before the next one */
    DEPTH = 512,  /* input features of each, if these do not stay in the second cache */
    FEW_NUMBERS = 6144, /* numbers of few rows that stay in the first one */
    MANY = 32,    /* rows beyond which threads take few panels at a time */
    RUN_BYTES = 1 << 19, /* most bytes of the adjacent panels that a thread takes for fewer rows */
    PARTS = 4,    /* least number of these for each thread */
    MAX_HEAD_DIM = 512,
    PART = 512,  /* numbers of a row among which the largest one is looked for */
    STREAMS = 4, /* places from which memory is prefetched in turn: a core reads several streams faster than one */
};

INLINE long size_of(int type) { return type == F32 || type == PAIRS ? 4 : 2; }

INLINE v8 load(const char *p, int type) {
    v8 wide;
    if (type == F32) {
        memcpy(&wide, p, 32);
        return wide;
    }
    if (type == BF16) {
        u16x8 half;
        memcpy(&half, p, 16);
        return (v8)(__builtin_convertvector(half, u32x8) << 16);
    }
    h8 half;
    memcpy(&half, p, 16);
    return __builtin_convertvector(half, v8);
}

INLINE void store(char *p, v8 x, int type) {
    if (type == F32) memcpy(p, &x, 32);
    if (type == BF16) { /* rounds to the nearest, ties to even; a NaN stays one */
        u32x8 bits = (u32x8)x, nan = (u32x8)(x != x);
        bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        u16x8 half = __builtin_convertvector((nan & 0x7fc0) | (~nan & bits), u16x8);
        memcpy(p, &half, 16);
    }
    if (type == F16) {
        h8 half = __builtin_convertvector(x, h8);
        memcpy(p, &half, 16);
    }
}

INLINE v8 floats(const float *p) { return load((const char *)p, F32); }

INLINE v8 splat(float x) { return (v8){x, x, x, x, x, x, x, x}; }

/* to = from times the factor, n numbers, a multiple of 8. */
INLINE void multiply_by(const float *from, float factor, long n, float *to) {
    for (long i = 0; i < n; i += 8) store((char *)(to + i), floats(from + i) * splat(factor), F32);
}

/* Load 16 numbers. In bf16, the first 8 are the lower halves of 8 words and the others are the upper halves, so that
   widening a half takes one instruction. */
INLINE void load_pair(const char *p, int type, v8 *first, v8 *second) {
    if (type == BF16) {
        u32x8 both;
        memcpy(&both, p, 32);
        *first = (v8)(both << 16);
        *second = (v8)(both & 0xffff0000);
    } else {
        *first = load(p, type);
        *second = load(p + 8 * size_of(type), type);
    }
}

#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (i32x8){__VA_ARGS__})

/* Swap the rows and columns of eight vectors. */
INLINE void transpose(const v8 *x, v8 *y) {
    v8 two[8], four[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        two[i] = SHUFFLE(x[i], x[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        two[i + 1] = SHUFFLE(x[i], x[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    UNROLL for (int i = 0; i < 8; i++) {
        const v8 *from = two + i / 4 * 4 + i % 4 / 2;
        four[i] = i % 2 ? SHUFFLE(from[0], from[2], 2, 3, 10, 11, 6, 7, 14, 15)
                        : SHUFFLE(from[0], from[2], 0, 1, 8, 9, 4, 5, 12, 13);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        y[i] = SHUFFLE(four[i], four[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        y[i + 4] = SHUFFLE(four[i], four[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

struct room {
    float *at;
    long size;
};
static __thread struct room scratch, rounded, attending;

/* Make room for `size` numbers, for this thread; NULL if there is not enough memory. */
static float *grown(struct room *room, long size) {
    if (room->size < size) {
        free(room->at);
        room->at = aligned_alloc(64, (size * 4 + 63) / 64 * 64);
        room->size = room->at ? size : 0;
    }
    return room->at;
}

static float *room_for(long size) { return grown(&scratch, size); }

/* A panel's 16 numbers are one vector, or two. A tile's sums are in vectors of a register's width: the compiler would
   keep wider ones in memory. */
#ifdef __AVX512F__
#include <immintrin.h>
typedef float lane __attribute__((vector_size(64)));
typedef lane reg;
#define LARGE_TILES
#elif defined(__AVX__)
typedef v8 lane, reg;
#else
typedef v8 lane;
typedef float reg __attribute__((vector_size(16)));
#endif
/* Most rows of a tile, and panels of a tile of many rows: as many as the registers hold. Then most bytes of a panel that
   are prefetched before their use, and of the panels of a single row, of which a core itself reads long ones ahead: as
   measured, with a second cache of 512 KiB, and with one of 1 MiB. */
#ifdef LARGE_TILES
enum { TILE = 10, BESIDE = 2, PANEL_BYTES = 1 << 19, SHORT_BYTES = 1 << 17 };
#else
enum { TILE = 6, BESIDE = 1, PANEL_BYTES = 1 << 17, SHORT_BYTES = 0 };
#endif
enum { LANE = sizeof(lane) / 4, LANES = PANEL / LANE, TILE_SIZE = TILE * PANEL * BESIDE };
enum { REG = sizeof(reg) / 4, REGS = PANEL / REG };

INLINE void load_panel(const char *p, int type, reg *parts) {
    if (type == PAIRS) type = F32; /* 16 words */
#ifdef __AVX512F__
    if (type == F32) {
        memcpy(parts, p, sizeof(reg));
    } else {
        v8 low, high;
        load_pair(p, type, &low, &high);
        *parts = (reg)_mm512_insertf64x4(_mm512_castpd256_pd512((__m256d)low), (__m256d)high, 1);
    }
#elif defined(__AVX__)
    load_pair(p, type, parts, parts + 1);
#else
    v8 both[2];
    load_pair(p, type, both, both + 1);
    UNROLL for (int i = 0; i < REGS; i++) memcpy(parts + i, (char *)both + i * sizeof(reg), sizeof(reg));
#endif
}

/* sum + x * parts. Of PAIRS, x and each of the parts are two bf16 numbers, whose upper product is added first, as
   VDPBF16PS does it. */
INLINE reg add_product(int type, reg sum, float x, reg parts) {
    if (type != PAIRS) return sum + x * parts;
#ifdef __AVX512BF16__
    return (reg)_mm512_dpbf16_ps((__m512)sum, (__m512bh)parts, (__m512bh)_mm512_set1_ps(x));
#else
    typedef uint32_t words __attribute__((vector_size(sizeof(reg))));
    uint32_t pair;
    memcpy(&pair, &x, sizeof(pair));
    const uint32_t halves[2] = {pair & 0xffff0000, pair << 16};
    float upper, lower;
    memcpy(&upper, halves, 4);
    memcpy(&lower, halves + 1, 4);
    sum += upper * (reg)((words)parts & 0xffff0000);
    return sum + lower * (reg)((words)parts << 16);
#endif
}

/* Memory that will be needed soon, in parts. For each row of each panel, `pace` bytes are prefetched, from each part in
   turn; then the parts begin behind them. Or, if they are `in_steps`, the panels themselves. */
struct ahead {
    const char *at[STREAMS];
    long pace;
    int in_steps;
};

/* Parts `apart` bytes from each other. */
INLINE struct ahead ahead_of(const char *first, long apart, long pace) {
    struct ahead ahead = {.pace = pace};
    UNROLL for (int i = 0; i < STREAMS; i++) ahead.at[i] = first + i * apart;
    return ahead;
}

/* Parts of the `num_bytes` of each of `wide` panels, `panel_bytes` apart. */
INLINE struct ahead panels_ahead(const char *first, long wide, long num_bytes, long panel_bytes, long pace) {
    struct ahead ahead = {.pace = pace};
    UNROLL for (int i = 0; i < STREAMS; i++)
        ahead.at[i] = first + i * wide / STREAMS * panel_bytes + i * wide % STREAMS * num_bytes / STREAMS;
    return ahead;
}

/* With one row, weights are waited for. On an Intel Xeon with AMX they come soonest if the rows of a panel, from 16 to
   47 ahead, are prefetched in steps of 13: in 0.90 to 0.93 of the time. (It was tried on no other CPU.) */
#ifdef __AMX_TILE__
enum { IN_STEPS = 1 };
#else
enum { IN_STEPS = 0 };
#endif
INLINE long in_steps(long k) { return (k & ~15L) + 32 + (k * 13 & 15); }

/* Products of `rows` rows of x, packed as `[K][rows]`, with K rows, `row_bytes` apart, of each of `panels` panels,
   `panel_bytes` apart. They are added to `out`, in rows `stride` apart, unless `fresh`. At last add the bias, unless it
   is NULL. */
INLINE void tile(int rows, int panels, int type, const float *x, long K, const char *w, long row_bytes,
                 long panel_bytes, struct ahead *ahead, int fresh, const float *bias, float *out, long stride) {
    const int regs = REGS * panels;
    const char *next[STREAMS];
    for (int i = 0; i < STREAMS; i++) next[i] = ahead->at[i];
    reg held[TILE][REGS * GROUP];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < regs; i++) {
            held[r][i] = (reg){0};
            if (!fresh) memcpy(&held[r][i], out + r * stride + i * REG, sizeof(reg));
        }
    if (!fresh && rows > 2)
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int i = 0; i < panels; i++) __builtin_prefetch(out + (rows + r) * stride + i * PANEL, 1, 2);
    for (long k = 0; k < K; k++, x += rows, w += row_bytes)
        UNROLL for (int p = 0; p < panels; p++) {
            const char *first = next[0];
            if (rows == 1 && ahead->in_steps) {
                __builtin_prefetch(w + p * panel_bytes + (in_steps(k) - k) * row_bytes, 0, 2);
            } else {
                __builtin_prefetch(first, 0, 2);
                UNROLL for (int i = 0; i + 1 < STREAMS; i++) next[i] = next[i + 1];
                next[STREAMS - 1] = first + ahead->pace;
            }
            reg parts[REGS];
            load_panel(w + p * panel_bytes, type, parts);
            UNROLL for (int i = 0; i < REGS; i++)
                if (rows > 2) HOLD(parts[i]);
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int i = 0; i < REGS; i++)
                    held[r][p * REGS + i] = add_product(type, held[r][p * REGS + i], x[r], parts[i]);
        }
    UNROLL for (int i = 0; i < STREAMS; i++) ahead->at[i] = next[i];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < regs; i++) {
            reg more = {0};
            if (bias) memcpy(&more, bias + i * REG, sizeof(reg));
            if (bias) held[r][i] += more;
            memcpy(out + r * stride + i * REG, &held[r][i], sizeof(reg));
        }
}

/* The tiles that are used, with constant type and size, so that the compiler can keep them in registers. One and two
   rows are multiplied with several panels at a time, because with one panel each addition would wait for the one before
   it in its chain. */
#define CASE(TYPE, R, P)                                                                                               \
    case 16 * P + R: tile(R, P, TYPE, x, K, w, row_bytes, panel_bytes, ahead, fresh, bias, out, stride); break;
#define SIX(TYPE, P)                                                                                                   \
    CASE(TYPE, 1, P) CASE(TYPE, 2, P) CASE(TYPE, 3, P) CASE(TYPE, 4, P) CASE(TYPE, 5, P) CASE(TYPE, 6, P)
#define TEN(TYPE, P) SIX(TYPE, P) CASE(TYPE, 7, P) CASE(TYPE, 8, P) CASE(TYPE, 9, P) CASE(TYPE, 10, P)
#ifdef LARGE_TILES
#define CASES(TYPE) CASE(TYPE, 1, 4) CASE(TYPE, 1, 3) TEN(TYPE, 1) TEN(TYPE, 2)
#else
#define CASES(TYPE) CASE(TYPE, 1, 4) CASE(TYPE, 1, 3) CASE(TYPE, 1, 2) CASE(TYPE, 2, 2) SIX(TYPE, 1)
#endif

#define TILE_OF(NAME, TYPE)                                                                                            \
    static void NAME(int rows, int panels, const float *x, long K, const char *w, long row_bytes, long panel_bytes,    \
                     struct ahead *ahead, int fresh, const float *bias, float *out, long stride) {                     \
        switch (16 * panels + rows) { CASES(TYPE) }                                                                    \
    }

TILE_OF(tile_float32, F32)
TILE_OF(tile_bfloat16, BF16)
TILE_OF(tile_float16, F16)
TILE_OF(tile_pairs, PAIRS)

/* M rows are divided into tiles of nearly equal height. */
INLINE long tiles_of(long M) { return (M + TILE - 1) / TILE; }
INLINE long tile_begin(long M, long t) { return t * (M / tiles_of(M)) + (t < M % tiles_of(M) ? t : M % tiles_of(M)); }

/* Pack tile t of M rows of x, `stride` apart, as `[K][rows]`. The packed tiles follow each other. */
INLINE void pack_tile(const float *x, long M, long t, long stride, long K, float *packed) {
    const long begin = tile_begin(M, t), rows = tile_begin(M, t + 1) - begin;
    x += begin * stride;
    packed += begin * K;
    if (rows == 1) {
        memcpy(packed, x, K * sizeof(float));
        return;
    }
    long k = 0;
    /* Eight columns of up to eight rows at a time. What is stored beyond the rows is overwritten by what follows. */
    for (; k + 16 <= K; k += 8)
        for (long first = (rows - 1) / 8 * 8; first >= 0; first -= 8) {
            v8 from[8], columns[8];
            UNROLL for (int i = 0; i < 8; i++)
                from[i] = floats(x + (first + i < rows ? first + i : rows - 1) * stride + k);
            transpose(from, columns);
            UNROLL for (int i = 0; i < 8; i++) memcpy(packed + (k + i) * rows + first, columns + i, 32);
        }
    for (packed += k * rows; k < K; k++)
        for (long r = 0; r < rows; r++) *packed++ = x[r * stride + k];
}

/* Products of M packed rows with `panels` panels, for the outputs from `first` on, of which there are N. See `tile`.
   Meanwhile each tile prefetches a share of `next`, or, if that is NULL, of the panels that follow. */
#define PANELS_OF(NAME, TILE_NAME, TYPE)                                                                               \
    static void NAME(const float *x, long M, long K, const char *w, long row_bytes, long panel_bytes, long panels,     \
                     const struct ahead *next, int fresh, const float *bias, float *out, long N, long first) {         \
        const long all = tiles_of(M), most = M == 1 ? GROUP : M == 2 ? 2 : BESIDE;                                     \
        struct ahead ahead = ahead_of(w, 0, 0);                                                                        \
        if (next) ahead = *next, ahead.pace /= all;                                                                    \
        for (long p = 0, wide; p < panels; p += wide, first += wide * PANEL) {                                         \
            wide = most <= panels - p ? most : panels - p;                                                             \
            const char *at = w + p * panel_bytes;                                                                      \
            const long num = N - first;                                                                                \
            if (!next && M == 1 && IN_STEPS) ahead.in_steps = 1;                                                       \
            else if (!next && (M > 1 || wide * K * row_bytes <= SHORT_BYTES))                                          \
                ahead = panels_ahead(at + wide * panel_bytes, wide, K * row_bytes, panel_bytes, row_bytes / all);      \
            for (long t = 0; t < all; t++) {                                                                           \
                const long begin = tile_begin(M, t), rows = tile_begin(M, t + 1) - begin;                              \
                const float *from = x + begin * K, *more = bias ? bias + first : NULL;                                 \
                float *to = out + begin * N + first, room[TILE_SIZE > GROUP * PANEL ? TILE_SIZE : GROUP * PANEL];      \
                if (num >= wide * PANEL) {                                                                             \
                    TILE_NAME(rows, wide, from, K, at, row_bytes, panel_bytes, &ahead, fresh, more, to, N);            \
                    continue;                                                                                          \
                }                                                                                                      \
                for (long r = 0; r < rows && !fresh; r++) memcpy(room + r * wide * PANEL, to + r * N, num * 4);        \
                TILE_NAME(rows, wide, from, K, at, row_bytes, panel_bytes, &ahead, fresh, NULL, room, wide * PANEL);   \
                for (long r = 0; r < rows; r++)                                                                        \
                    for (long i = 0; i < num; i++)                                                                     \
                        to[r * N + i] = room[r * wide * PANEL + i] + (more ? more[i] : 0);                             \
            }                                                                                                          \
        }                                                                                                              \
    }

PANELS_OF(panels_float32, tile_float32, F32)
PANELS_OF(panels_bfloat16, tile_bfloat16, BF16)
PANELS_OF(panels_float16, tile_float16, F16)
PANELS_OF(panels_pairs, tile_pairs, PAIRS)

INLINE void panels_of(int type, const float *x, long M, long K, const char *w, long row_bytes, long panel_bytes,
                      long panels, const struct ahead *next, int fresh, float *out, long N, long first) {
    if (type == F32) panels_float32(x, M, K, w, row_bytes, panel_bytes, panels, next, fresh, NULL, out, N, first);
    if (type == BF16) panels_bfloat16(x, M, K, w, row_bytes, panel_bytes, panels, next, fresh, NULL, out, N, first);
    if (type == F16) panels_float16(x, M, K, w, row_bytes, panel_bytes, panels, next, fresh, NULL, out, N, first);
}

/* How many adjacent panels a thread takes at a time, of few rows. */
static long run_of(long panels, long panel_bytes, int threads) {
    const long most = panels / (PARTS * threads), run = RUN_BYTES / panel_bytes;
    const long chosen = run < most ? run : most;
    return threads == 1 ? panels : chosen < GROUP ? GROUP : chosen / GROUP * GROUP;
}

/* A product, or the part of it that is multiplied at a time: `rows` rows of x from `m` on, and `num` input features
   from `k` on. A unit is `run` panels. */
struct linear {
    const float *x;
    long M, K;
    const char *w;
    const float *bias;
    float *out, *packed;
    long N, m, rows, k, num, panels, run;
};

static int pack_rows(void *job, long tile) {
    const struct linear *a = job;
    pack_tile(a->x + a->m * a->K + a->k, a->rows, tile, a->K, a->num, a->packed);
    return 0;
}

/* Input features that are multiplied with all panels before the next ones. If rows do not stay in a cache while the
   panels pass, they are cut: into parts for the first one if there are few rows, and for the second one else. A part of
   a panel stays there, too. */
static long depth_of(long rows, long K, int type) {
    const long few = FEW_NUMBERS / rows / 16 * 16, part = few < DEPTH ? DEPTH : few;
    const long most = PANEL_BYTES / PANEL / size_of(type);
    if (rows == 1) return K;
    const long depth = K > 2 * part || rows * K > ROWS * DEPTH ? part : K;
    return depth < most ? depth : most;
}

/* out `[M, N]` = x `[M, K]` times the packed weights, plus bias `[N]` unless that is NULL. Returns 0, or 1 if there is
   not enough memory. Up to ROWS rows are packed at a time, and `depth_of` input features of each. Of few rows a thread
   takes several adjacent panels, since it prefetches the next one. */
#define LINEAR(NAME, PANELS_NAME, TYPE)                                                                                \
    static int NAME##_panels(void *job, long unit) {                                                                   \
        const struct linear *a = job;                                                                                  \
        const long row_bytes = PANEL * size_of(TYPE), panel_bytes = a->K * row_bytes, first = unit * a->run;           \
        const long panels = a->panels - first < a->run ? a->panels - first : a->run;                                   \
        PANELS_NAME(a->packed, a->rows, a->num, a->w + first * panel_bytes + a->k * row_bytes, row_bytes, panel_bytes, \
                    panels, NULL, a->k == 0, a->k + a->num == a->K ? a->bias : NULL, a->out + a->m * a->N, a->N,       \
                    first * PANEL);                                                                                    \
        return 0;                                                                                                      \
    }                                                                                                                  \
    int NAME(const float *x, long M, long K, const char *w, const float *bias, float *out, long N, int threads) {      \
        const long height = M < ROWS ? M : ROWS, depth = depth_of(height, K, TYPE);                                    \
        struct linear a = {.x = x, .M = M, .K = K, .w = w, .bias = bias, .out = out, .N = N};                          \
        a.packed = M == 1 ? (float *)x : room_for(height * depth);                                                     \
        if (!a.packed) return 1;                                                                                       \
        a.panels = (N + PANEL - 1) / PANEL;                                                                            \
        a.run = M > MANY ? BESIDE : run_of(a.panels, K * PANEL * size_of(TYPE), threads);                              \
        for (a.m = 0; a.m < M; a.m += height)                                                                          \
            for (a.k = 0; a.k < K; a.k += depth) {                                                                     \
                a.rows = M - a.m < height ? M - a.m : height;                                                          \
                a.num = K - a.k < depth ? K - a.k : depth;                                                             \
                if (M > 1) share(tiles_of(a.rows), M > MANY ? threads : 1, pack_rows, &a);                             \
                share((a.panels + a.run - 1) / a.run, threads, NAME##_panels, &a);                                     \
            }                                                                                                          \
        return 0;                                                                                                      \
    }

LINEAR(baton_linear_float32, panels_float32, F32)
LINEAR(baton_linear_bfloat16, panels_bfloat16, BF16)
LINEAR(baton_linear_float16, panels_float16, F16)
LINEAR(baton_linear_words, panels_pairs, PAIRS)

/* --- attention ---------------------------------------------------------------------------------------------------- */

INLINE float sum_of(v8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

/* The larger numbers, those of `old` where `each` has NaN: one instruction, also of 16 numbers, which a compiler that
   prefers vectors of 8 would take apart in memory. */
INLINE v8 larger(v8 each, v8 old) {
    for (int i = 0; i < 8; i++) old[i] = each[i] > old[i] ? each[i] : old[i];
    return old;
}
#ifdef __AVX512F__
INLINE lane larger_lanes(lane each, lane old) { return (lane)_mm512_max_ps((__m512)each, (__m512)old); }
#endif

/* For vectors of a width: e^x for x <= 0, within 3 units in the last place (Cody and Waite's reduction, a polynomial of
   degree 6); and x / (1 + e^-x). */
#define FUNCTIONS(LARGER, EXP, SILU, floats, integers)                                                                 \
    INLINE floats EXP(floats x) {                                                                                      \
        const floats zeros = {0};                                                                                      \
        x = LARGER(zeros - 87.0f, x);                                                                                  \
        floats shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to an integer in the low bits */         \
        integers n = (integers)shifted - (integers)(zeros + 12582912.0f);                                              \
        floats whole = shifted - 12582912.0f;                                                                          \
        floats r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;                                               \
        floats y = 1.3888949e-3f * r + 8.3333610e-3f;                                                                  \
        y = y * r + 4.1666667e-2f;                                                                                     \
        y = y * r + 0.16666667f;                                                                                       \
        y = y * r + 0.5f;                                                                                              \
        y = (y * r) * r + r + 1.0f;                                                                                    \
        return y * (floats)((n + 127) << 23); /* a NaN stays one */                                                    \
    }                                                                                                                  \
    INLINE floats SILU(floats x) {                                                                                     \
        const floats zeros = {0}, one = zeros + 1.0f;                                                                  \
        const integers negative = x < zeros;                                                                           \
        const floats least = (floats)((negative & (integers)x) | (~negative & (integers)-x));                          \
        const floats e = (floats)(~(least < zeros - 87.0f) & (integers)EXP(least));                                    \
        return x * ((floats)((negative & (integers)e) | (~negative & (integers)one)) / (one + e));                     \
    }

FUNCTIONS(larger, exp_of, silu_of, v8, i32x8)
#ifdef __AVX512F__
typedef int32_t i32x16 __attribute__((vector_size(64)));
FUNCTIONS(larger_lanes, exp_of_lanes, silu_of_lanes, lane, i32x16)
/* Add the lower half, then the upper one. */
INLINE v8 add_lanes(v8 sum, lane x) {
    sum += (v8)_mm512_castps512_ps256((__m512)x);
    return sum + (v8)_mm512_extractf32x8_ps((__m512)x, 1);
}
#else
#define larger_lanes larger
#define exp_of_lanes exp_of
#define silu_of_lanes silu_of
INLINE v8 add_lanes(v8 sum, lane x) { return sum + x; }
#endif

INLINE lane lanes(const float *p) {
    lane x;
    memcpy(&x, p, sizeof(x));
    return x;
}

#include "pairs.h"

#include "gates.h"

/* Properties of the cache that all tokens of a step and layer have in common. */
struct cache {
    const char *layer;     /* the layer's part of the first head of block 0: [2, block_size, head_dim] */
    long block_bytes;      /* from a block to the next */
    long head_bytes;       /* from a KV head of a block to the next, over all layers */
    long kv_heads, group;  /* query heads of one KV head */
    long block_size, head_dim;
    float scale;
};

/* The dimensions of whole panels. */
INLINE long dims_of(long D) { return (D + PANEL - 1) / PANEL * PANEL; }

/* `load_pair` gives the even ones of 16 adjacent bf16 numbers first. `gather` brings D numbers back into their order,
   and multiplies them by a factor. */
INLINE void gather(int type, const float *from, long D, float factor, float *to) {
    for (long d = 0; d < D; d += 16)
        for (long i = 0; i < 16 && d + i < D; i++)
            to[d + i] = from[d + (type == BF16 ? i / 2 + i % 2 * 8 : i)] * factor;
}

enum { SLOTS = 32 }; /* slots whose keys are unpacked at a time */

/* Unpack the dimensions `[d, d + num)`, 8 or 16 of them, of eight slots, to the rows of a panel. Meanwhile prefetch
   half as much of the slots at `next`. */
INLINE void load_slots(int type, const char *k, long D, long d, int num, const char *next, float *to) {
    const long step = D * size_of(type);
    const int words = type == BF16 && num == 16; /* pairs of numbers change places before they are widened */
    k += d * size_of(type);
    const long half_bytes = 4 * num * size_of(type);
    for (long i = 0; next && i < half_bytes; i += 64) __builtin_prefetch(next + 4 * d * size_of(type) + i, 0, 2);
    v8 rows[8], columns[8];
    for (int half = 0; half < (words ? 1 : num / 8); half++) {
        UNROLL for (int s = 0; s < 8; s++) {
            if (words) memcpy(rows + s, k + s * step, 32);
            else rows[s] = load(k + s * step + half * 8 * size_of(type), type);
        }
        transpose(rows, columns);
        UNROLL for (int i = 0; i < 8; i++) {
            if (words) load_pair((const char *)(columns + i), BF16, columns + i, rows + i);
            memcpy(to + (words ? 2 * i : 8 * half + i) * PANEL, columns + i, 32);
            if (words) memcpy(to + (2 * i + 1) * PANEL, rows + i, 32);
        }
    }
}

/* Scores of the packed queries of `rows` heads against `num` slots of a block, in which `left` slots are left, to
   `out + first` for the first head and `size` numbers later for the next. A score is one chain of additions in the
   order of the dimensions, as for the tokens of a chunk. Meanwhile prefetch as many bytes at `next`, unless that is
   NULL: half of them while keys are unpacked, and half during the products, because many requests at once would
   stall. */
INLINE void scores_of(int type, const float *queries, long rows, long D, const char *k, long num, long left,
                      const char *next, float *keys, float *out, long size, long first) {
    const long step = D * size_of(type), width = PANEL * sizeof(float);
    for (long s = 0, some; s < num; s += some) {
        some = num - s < SLOTS ? num - s : SLOTS;
        for (long g = 0; g < some; g += 8) {
            char last[8 * MAX_HEAD_DIM * sizeof(float)]; /* the last slots of a block, if fewer than eight */
            const char *at = k + (s + g) * step;
            float *to = keys + g / PANEL * PANEL * D + g % PANEL;
            if (left - s - g < 8) {
                memset(last, 0, 8 * step);
                memcpy(last, at, (some - g) * step);
                at = last;
            }
            long d = 0;
            const char *near = next ? next + s * step + g * step / 2 : NULL;
            for (; d + 16 <= D; d += 16) load_slots(type, at, D, d, 16, near, to + d * PANEL);
            if (d < D) load_slots(type, at, D, d, 8, near, to + d * PANEL);
        }
        const long half = some * step / 2;
        const struct ahead ahead = ahead_of(next + s * step + half, half / STREAMS, PANEL / 2 * size_of(type));
        panels_of(F32, queries, rows, D, (const char *)keys, width, D * width, (some + PANEL - 1) / PANEL,
                  next ? &ahead : NULL, 1, out, size, first + s);
    }
}

/* Turn the first `num` of `size` scores, a multiple of 8, into weights e^(score - largest score), in place. Return 1
   over their sum. Scores beyond `num` become too small to count. */
INLINE float softmax(float *row, long num, long size) {
    for (long s = num; s < size; s++) row[s] = -__builtin_inff();
    const lane none = (lane){0} - __builtin_inff();
    lane most = none, other = none;
    long s = 0;
    for (; s + 2 * LANE <= size; s += 2 * LANE) {
        most = larger_lanes(lanes(row + s), most);
        other = larger_lanes(lanes(row + s + LANE), other);
    }
    most = larger_lanes(most, other);
    float top = most[0];
    for (int i = 1; i < LANE; i++) top = most[i] > top ? most[i] : top;
    for (; s < size; s++) top = row[s] > top ? row[s] : top;
    v8 total = splat(0);
    for (s = 0; s + LANE <= size; s += LANE) {
        const lane x = exp_of_lanes(lanes(row + s) - top);
        total = add_lanes(total, x);
        memcpy(row + s, &x, sizeof(x));
    }
    for (; s < size; s += 8) {
        const v8 x = exp_of(floats(row + s) - top);
        total += x;
        memcpy(row + s, &x, 32);
    }
    return 1.0f / sum_of(total);
}

/* Add `num` slots' values, weighted, to the sums of `rows` heads, unless they are `fresh`. `packed` has room for the
   weights, and then for the last dimensions of the values, if these are no whole panel. Meanwhile prefetch as many
   bytes at `next`, unless that is NULL. */
INLINE void weigh(int type, const float *weights, long size, long rows, long D, const char *v, long num,
                  const char *next, float *packed, int fresh, float *sums) {
    const long step = D * size_of(type), width = PANEL * size_of(type), panels = D / PANEL, row_size = dims_of(D);
    char *last = (char *)(packed + rows * num);
    for (long t = 0; t < tiles_of(rows); t++) pack_tile(weights, rows, t, size, num, packed);
    const struct ahead ahead = ahead_of(next, num * step / STREAMS, width);
    panels_of(type, packed, rows, num, v, step, width, panels, next ? &ahead : NULL, fresh, sums, row_size, 0);
    if (D % PANEL == 0) return;
    for (long s = 0; s < num; s++) {
        memcpy(last + s * width, v + s * step + panels * width, width / 2);
        memset(last + s * width + width / 2, 0, width / 2);
    }
    panels_of(type, packed, rows, num, last, width, width, 1, NULL, fresh, sums, row_size, panels * PANEL);
}

/* The keys of a head in a block; its values follow them. */
INLINE const char *keys_of(const struct cache *c, int64_t block, long head) {
    return c->layer + block * c->block_bytes + head * c->head_bytes;
}

/* Attention of one token, for the KV heads `[first, first + heads)`, to its slots `[begin, end)`: first all scores,
   then their weights, then the values. The order is block by block, and head by head within a block. The keys of a head
   in a block are one piece, and so are its values. Pieces lie apart, so the next one is prefetched meanwhile. */
INLINE void attend(int type, const struct cache *c, const float *q, const int64_t *table, long first, long heads,
                   long begin, long end, float *room, long size, float *out) {
    const long D = c->head_dim, G = c->group, rows = heads * G, step = D * size_of(type), bytes = c->block_size * step;
    float *scores = room, *queries = scores + rows * size, *sums = queries + rows * D, *scaled = sums;
    float *keys = sums + rows * dims_of(D), *packed = keys; /* first the keys of some slots, then weights */
    const long base = begin / 8 * 8; /* weights are summed in eight chains, by position, as in a chunk */
    multiply_by(q, c->scale, rows * D, scaled);
    for (long h = 0; h < heads; h++)
        for (long t = 0; t < tiles_of(G); t++) pack_tile(scaled + h * G * D, G, t, D, D, queries + h * G * D);
    /* Do `DO` for the slots of each head in each block, in the keys or in the values, which are `WHERE` bytes behind
       the keys. `num` slots of this block are used, and `rest` are left in it. */
#define EACH(WHERE, DO)                                                                                                \
    for (long s = begin, num; s < end; s += num) {                                                                     \
        const long rest = c->block_size - s % c->block_size, block = s / c->block_size;                                \
        num = rest < end - s ? rest : end - s;                                                                         \
        for (long h = 0; h < heads; h++) {                                                                             \
            const char *slots = keys_of(c, table[block], first + h) + WHERE + s % c->block_size * step, *next = NULL;  \
            if (h + 1 < heads) next = slots + c->head_bytes;                                                           \
            else if (s + num < end) next = keys_of(c, table[block + 1], first) + WHERE;                                \
            float *of_head = scores + h * G * size;                                                                    \
            DO;                                                                                                        \
        }                                                                                                              \
    }
#define SCORE scores_of(type, queries + h * G * D, G, D, slots, num, rest, next, keys, of_head, size, s - base)
#define WEIGH                                                                                                          \
    weigh(type, of_head + s - base, size, G, D, slots, num, next, packed, s == begin, sums + h * G * dims_of(D))
    EACH(0, SCORE)
    float factors[rows];
    for (long r = 0; r < rows; r++) {
        for (long s = base; s < begin; s++) scores[r * size + s - base] = -__builtin_inff();
        factors[r] = softmax(scores + r * size, end - base, (end - base + 7) / 8 * 8);
    }
    EACH(bytes, WEIGH)
#undef EACH
#undef SCORE
#undef WEIGH
    for (long r = 0; r < rows; r++) gather(type, sums + r * dims_of(D), D, factors[r], out + r * D);
}

struct decode {
    struct cache cache;
    const float *q;
    long q_stride;
    const int64_t *tables;
    long width;
    const int64_t *lens;
    long window, parts; /* units of a token */
    float *out;
    long units, threads;
};

/* Attention of single tokens: out `[N, H, D]` for queries `[H, D]` in rows `q_stride` apart. Token i is the last of
   `lens[i]` tokens of the sequence whose blocks are `tables + i * width`. It sees the last `window` of them, or all if
   `window` is 0. Returns 0, or 1 if there is not enough memory. The heads of a token stay together, unless there are
   few tokens for the threads. */
#define DECODE(NAME, TYPE)                                                                                             \
    static int NAME##_part(void *job, long unit) {                                                                     \
        const struct decode *a = job;                                                                                  \
        const struct cache *c = &a->cache;                                                                             \
        const long i = unit / a->parts, part = unit % a->parts, end = a->lens[i], D = c->head_dim;                     \
        const long first = part * c->kv_heads / a->parts, heads = (part + 1) * c->kv_heads / a->parts - first;         \
        const long begin = a->window && end > a->window ? end - a->window : 0;                                         \
        const long size = (end - begin / 8 * 8 + 7) / 8 * 8, packed = (c->group + PANEL) * c->block_size;              \
        const long least = heads * c->group * (size + D + dims_of(D)), at = first * c->group * D;                      \
        float *room = grown(&attending, least + (SLOTS * D > packed ? SLOTS * D : packed));                            \
        if (!room) return 1;                                                                                           \
        attend(TYPE, c, a->q + i * a->q_stride + at, a->tables + i * a->width, first, heads, begin, end, room, size,   \
               a->out + i * c->kv_heads * c->group * D + at);                                                          \
        return 0;                                                                                                      \
    }                                                                                                                  \
    int NAME(const float *q, long q_stride, const char *layer, long block_bytes, long head_bytes,                      \
             const int64_t *tables, long width, const int64_t *lens, long N, long kv_heads, long group,                \
             long block_size, long head_dim, long window, float scale, float *out, int threads) {                      \
        const struct cache c = {layer, block_bytes, head_bytes, kv_heads, group, block_size, head_dim, scale};         \
        const long parts = threads > 1 ? (2 * threads + N - 1) / N : 1;                                                \
        struct decode a = {c, q, q_stride, tables, width, lens, window, parts < kv_heads ? parts : kv_heads, out, 0, 0};\
        return share(N * a.parts, threads, NAME##_part, &a);                                                           \
    }

DECODE(baton_decode_float32, F32)
DECODE(baton_decode_bfloat16, BF16)
DECODE(baton_decode_float16, F16)

enum {
    QUERIES = 24, /* queries whose scores are computed together, so that the keys are read once for all */
    RUN = 4,      /* panels of keys that a thread packs at a time */
};

struct prefill {
    struct cache cache;
    const float *q;
    long q_stride;
    const int64_t *table;
    long start, first, end, window;  /* position of the first token; the slots that tokens see, the window */
    long panels, size, rows;         /* of these slots, their number in whole panels; queries of a KV head */
    long head, queries;              /* the KV head, and how many of its queries are computed together */
    int (*attend)(const struct prefill *, long, long); /* by this */
    char *keys, *values;
    float *out;
};

/* Query i of the head's group, counted over tokens and heads of the group, and where what it attends to is written. */
INLINE const float *query_of(const struct prefill *a, long i) {
    const struct cache *c = &a->cache;
    return a->q + i / c->group * a->q_stride + (a->head * c->group + i % c->group) * c->head_dim;
}
INLINE float *attended_by(const struct prefill *a, long i) {
    const struct cache *c = &a->cache;
    return a->out + ((i / c->group * c->kv_heads + a->head) * c->group + i % c->group) * c->head_dim;
}

/* The packed slots that it sees. */
struct seen {
    long begin, end;
};
INLINE struct seen seen_by(const struct prefill *a, long i) {
    const long end = a->start + i / a->cache.group + 1 - a->first;
    return (struct seen){a->window && end > a->window ? end - a->window : 0, end};
}

/* Pack the keys `[first, first + 16)` of a head as a panel `[head_dim][16]`. Pack their values as rows of panels of 16
   dimensions, `[panel][size][16]`, the first of which starts at `values`. Slots from `end` on give zeros. */
INLINE void pack_slots(int type, const struct cache *c, const int64_t *table, long head, long first, long end,
                       float *keys, float *values, long size) {
    const long D = c->head_dim, step = D * size_of(type);
    for (long s = 0; s < PANEL; s++) {
        const long slot = first + s, block = slot < end ? table[slot / c->block_size] : 0;
        const char *k = keys_of(c, block, head) + slot % c->block_size * step;
        for (long d = 0; d < D; d += 8) {
            v8 key = splat(0), value = splat(0);
            if (slot < end) {
                key = load(k + d * size_of(type), type);
                value = load(k + c->block_size * step + d * size_of(type), type);
            }
            for (int i = 0; i < 8; i++) keys[(d + i) * PANEL + s] = key[i];
            memcpy(values + (d / PANEL * size + s) * PANEL + d % PANEL, &value, 32);
        }
        if (D % PANEL) memset(values + (D / PANEL * size + s) * PANEL + 8, 0, 32);
    }
}

/* Attention of the queries `[begin, end)` of a head's group, counted over tokens and heads of the group, to the packed
   slots. Returns 0, or 1 if there is not enough memory. */
static int attend_tile(const struct prefill *a, long begin, long end) {
    const struct cache *c = &a->cache;
    const long D = c->head_dim, G = c->group, num = end - begin, width = PANEL * sizeof(float), all = dims_of(D);
    const long seen = a->start + (end - 1) / G + 1 - a->first, panels = (seen + PANEL - 1) / PANEL;
    const long row_size = panels * PANEL;
    float *scores = grown(&attending, num * (row_size + DEPTH + 3 * all + 1));
    if (!scores) return 1;
    float *queries = scores + num * row_size, *sums = queries + num * D, *factors = sums + num * all;
    float *packed = factors + num;
    for (long r = 0; r < num; r++) multiply_by(query_of(a, begin + r), c->scale, D, queries + r * D);
    for (long t = 0; t < tiles_of(num); t++) pack_tile(queries, num, t, D, D, packed);
    panels_of(F32, packed, num, D, a->keys, width, D * width, panels, NULL, 1, scores, row_size, 0);
    for (long r = 0; r < num; r++) {
        const struct seen slots = seen_by(a, begin + r);
        const long whole = slots.begin / 8 * 8;
        float *row = scores + r * row_size;
        for (long s = whole; s < slots.begin; s++) row[s] = -__builtin_inff();
        factors[r] = softmax(row + whole, slots.end - whole, (slots.end - whole + 7) / 8 * 8);
        memset(row, 0, slots.begin * sizeof(float));
        memset(row + slots.end, 0, (row_size - slots.end) * sizeof(float));
    }
    for (long s = 0, deep; s < row_size; s += deep) {
        deep = row_size - s < DEPTH ? row_size - s : DEPTH;
        for (long t = 0; t < tiles_of(num); t++) pack_tile(scores + s, num, t, row_size, deep, packed);
        panels_of(F32, packed, num, deep, a->values + s * width, width, a->size * width, all / PANEL, NULL, s == 0,
                  sums, all, 0);
    }
    for (long r = 0; r < num; r++) multiply_by(sums + r * all, factors[r], D, attended_by(a, begin + r));
    return 0;
}

/* The queries of a tile, the longest first. */
static int attend_queries(void *job, long unit) {
    const struct prefill *a = job;
    const long num = a->queries, begin = ((a->rows + num - 1) / num - 1 - unit) * num;
    return a->attend(a, begin, begin + num < a->rows ? begin + num : a->rows);
}

/* Attend to the packed slots, head by head, so that only one head's keys and values are unpacked at a time. */
static int attend_prompt(struct prefill *a, work pack, int threads) {
    int failed = 0;
    for (a->head = 0; a->head < a->cache.kv_heads; a->head++) {
        share((a->panels + RUN - 1) / RUN, threads, pack, a);
        failed |= share((a->rows + a->queries - 1) / a->queries, threads, attend_queries, a);
    }
    free(a->keys);
    return failed;
}

/* Attention of a chunk: out `[N, H, D]` for the tokens at positions `[start, start + N)` of the sequence whose blocks
   are `table`, with queries `[H, D]` in rows `q_stride` apart. A token sees itself and the tokens before it: the last
   `window` of these, or all if `window` is 0. Returns 0, or 1 if there is not enough memory. */
#define PREFILL(NAME, TYPE)                                                                                            \
    static int NAME##_pack(void *job, long unit) {                                                                     \
        const struct prefill *a = job;                                                                                 \
        const long D = a->cache.head_dim, stop = (unit + 1) * RUN < a->panels ? (unit + 1) * RUN : a->panels;          \
        for (long p = unit * RUN; p < stop; p++)                                                                       \
            pack_slots(TYPE, &a->cache, a->table, a->head, a->first + p * PANEL, a->end,                               \
                       (float *)a->keys + p * D * PANEL, (float *)a->values + p * PANEL * PANEL, a->size);             \
        return 0;                                                                                                      \
    }                                                                                                                  \
    int NAME(const float *q, long q_stride, const char *layer, long block_bytes, long head_bytes,                      \
             const int64_t *table, long start, long N, long kv_heads, long group, long block_size, long head_dim,      \
             long window, float scale, float *out, int threads) {                                                      \
        const struct cache c = {layer, block_bytes, head_bytes, kv_heads, group, block_size, head_dim, scale};         \
        const long first = window && start + 1 > window ? (start + 1 - window) / PANEL * PANEL : 0, end = start + N;   \
        const long panels = (end - first + PANEL - 1) / PANEL, size = panels * PANEL;                                  \
        char *keys = aligned_alloc(64, size * (head_dim + dims_of(head_dim)) * sizeof(float));                         \
        if (!keys) return 1;                                                                                           \
        struct prefill a = {c, q, q_stride, table, start, first, end, window, panels, size, N * group, 0, QUERIES,     \
                            attend_tile, keys, keys + size * head_dim * sizeof(float), out};                           \
        return attend_prompt(&a, NAME##_pack, threads);                                                                \
    }

PREFILL(baton_prefill_float32, F32)
PREFILL(baton_prefill_bfloat16, BF16)
PREFILL(baton_prefill_float16, F16)

#include "paired_attention.h"

/* --- between the products ----------------------------------------------------------------------------------------- */

enum {
    WORTH_THREADS = 1 << 16, /* numbers from which on it pays to ask other threads */
    AT_A_TIME = 1 << 14,     /* numbers of the rows that a thread takes at a time, at least one row */
};

/* The rows of a job, which begins with this. */
struct rows {
    long all, step;
};

INLINE long stop_of(const struct rows *rows, long unit) {
    return (unit + 1) * rows->step < rows->all ? (unit + 1) * rows->step : rows->all;
}

/* The rows t of a unit. */
#define EACH_ROW(t, a, unit)                                                                                           \
    for (long t = unit * (a)->rows.step, stop = stop_of(&(a)->rows, unit); t < stop; t++)

static int share_rows(struct rows *job, long all, long width, int threads, work run) {
    *job = (struct rows){all, width < AT_A_TIME ? AT_A_TIME / width : 1};
    return share((all + job->step - 1) / job->step, all * width > WORTH_THREADS ? threads : 1, run, job);
}

/* The factor that brings `x [n]` to a root mean square of 1. */
INLINE float norm_factor(const float *x, long n, float eps) {
    v8 sums = splat(0);
    long i = 0;
    for (; i + 8 <= n; i += 8) sums += floats(x + i) * floats(x + i);
    float sum = sum_of(sums);
    for (; i < n; i++) sum += x[i] * x[i];
    return 1.0f / __builtin_sqrtf(sum / n + eps);
}

/* out = x times the factor times the weights, n of each. */
INLINE void scale_by(const float *x, float factor, const float *weight, long n, float *out) {
    long i = 0;
    for (; i + 8 <= n; i += 8) store((char *)(out + i), floats(x + i) * splat(factor) * floats(weight + i), F32);
    for (; i < n; i++) out[i] = x[i] * factor * weight[i];
}

struct add_norm {
    struct rows rows;
    float *h;
    const float *delta, *weight;
    float eps;
    long E;
    char *out;
    int rounded; /* whether the outputs are those of `round_row` */
};

static int add_norm_rows(void *job, long unit) {
    const struct add_norm *a = job;
    const long E = a->E;
    EACH_ROW(t, a, unit) {
        float *x = a->h + t * E;
        if (a->delta) {
            const float *more = a->delta + t * E;
            long i = 0;
            for (; i + 8 <= E; i += 8) store((char *)(x + i), floats(x + i) + floats(more + i), F32);
            for (; i < E; i++) x[i] += more[i];
        }
        const float factor = norm_factor(x, E, a->eps);
        char *to = a->out + t * bytes_of_row(E, a->rounded);
        if (!a->rounded) scale_by(x, factor, a->weight, E, (float *)to);
        for (long i = 0; a->rounded && i < E; i += BLOCK) {
            const long num = E - i < BLOCK ? E - i : BLOCK;
            float scaled[BLOCK];
            scale_by(x + i, factor, a->weight + i, num, scaled);
            round_row(scaled, num, to + 2 * i);
        }
    }
    return 0;
}

static void add_norm(float *h, const float *delta, const float *weight, float eps, long T, long E, void *out,
                     int rounded, int threads) {
    struct add_norm a = {{0}, h, delta, weight, eps, E, out, rounded};
    share_rows(&a.rows, T, E, threads, add_norm_rows);
}

/* h `[T, E]` += delta, unless that is NULL; out = weight times h, each row brought to a root mean square of 1. */
void baton_add_norm(float *h, const float *delta, const float *weight, float eps, long T, long E, float *out,
                    int threads) {
    add_norm(h, delta, weight, eps, T, E, out, 0, threads);
}

/* Whether all `num` numbers are below `end`, and none is negative. */
INLINE int all_within(const int64_t *numbers, long num, long end) {
    for (long i = 0; i < num; i++)
        if (numbers[i] < 0 || numbers[i] >= end) return 0;
    return 1;
}

struct norm_some {
    struct rows rows;
    const float *h, *delta;
    const int64_t *chosen;
    const float *weight;
    float eps;
    long E;
    float *out;
};

static int norm_some_rows(void *job, long unit) {
    const struct norm_some *a = job;
    const long E = a->E;
    EACH_ROW(r, a, unit) {
        const float *x = a->h + a->chosen[r] * E, *more = a->delta ? a->delta + a->chosen[r] * E : NULL;
        float *out = a->out + r * E;
        for (long i = 0; i < E; i++) out[i] = more ? x[i] + more[i] : x[i];
        scale_by(out, norm_factor(out, E, a->eps), a->weight, E, out);
    }
    return 0;
}

/* out `[R, E]`: what `baton_add_norm` gives for some of the T rows of h, without changing h. Returns 0, or 1 if there
   is no such row. */
int baton_norm_some(const float *h, const float *delta, const int64_t *chosen, const float *weight, float eps, long T,
                    long R, long E, float *out, int threads) {
    if (!all_within(chosen, R, T)) return 1;
    struct norm_some a = {{0}, h, delta, chosen, weight, eps, E, out};
    return share_rows(&a.rows, R, E, threads, norm_some_rows);
}

struct unpack {
    struct rows rows;
    const char *w;
    const int64_t *chosen;
    long type, K, panel_bytes;
    float *out;
};

static int unpack_rows(void *job, long unit) {
    const struct unpack *a = job;
    EACH_ROW(r, a, unit) {
        const long place = a->chosen[r] % PANEL, of_halves = place % (PANEL / 2) * 2 + place / (PANEL / 2);
        const char *panel = a->w + a->chosen[r] / PANEL * a->panel_bytes;
        float *out = a->out + r * a->K;
        for (long k = 0; k < a->K; k++) {
            uint16_t bits;
            _Float16 number;
            if (a->type == F32) {
                memcpy(out + k, panel + (k * PANEL + place) * 4, 4);
            } else if (a->type == F16) {
                memcpy(&number, panel + (k * PANEL + place) * 2, 2);
                out[k] = number;
            } else {
                /* as `load_pair` takes them; or two features of an output beside each other */
                const long at = a->type == BF16 ? k * PANEL + of_halves : (k / 2 * PANEL + place) * 2 + k % 2;
                memcpy(&bits, panel + at * 2, 2);
                const uint32_t wide = (uint32_t)bits << 16;
                memcpy(out + k, &wide, 4);
            }
        }
    }
    return 0;
}

/* out `[R, K]`: rows of a packed weight that has N of them. Returns 0, or 1 if there is no such row. */
int baton_unpack(const char *w, long type, const int64_t *chosen, long R, long N, long K, float *out, int threads) {
    const long panel_bytes = type == PAIRS ? blocks_of(K) * BLOCK * PANEL * 2 : K * PANEL * size_of(type);
    if (!all_within(chosen, R, N)) return 1;
    struct unpack a = {{0}, w, chosen, type, K, panel_bytes, out};
    return share_rows(&a.rows, R, K, threads, unpack_rows);
}

struct rotate {
    struct rows rows;
    float *x;
    long row_size, heads, q_heads, D;
    const float *q_norm, *k_norm;
    float eps;
    const float *table;
    const int64_t *positions;
};

static int rotate_rows(void *job, long unit) {
    const struct rotate *a = job;
    const long D = a->D, half = D / 2;
    EACH_ROW(t, a, unit) {
        const float *cosine = a->table + a->positions[t] * D, *sine = cosine + half;
        for (long head = 0; head < a->heads; head++) {
            float *x = a->x + t * a->row_size + head * D, *y = x + half;
            const float *norm = head < a->q_heads ? a->q_norm : a->k_norm;
            if (norm) scale_by(x, norm_factor(x, D, a->eps), norm, D, x);
            long i = 0;
            for (; i + 8 <= half; i += 8) {
                const v8 left = floats(x + i), right = floats(y + i);
                store((char *)(x + i), left * floats(cosine + i) - right * floats(sine + i), F32);
                store((char *)(y + i), right * floats(cosine + i) + left * floats(sine + i), F32);
            }
            for (; i < half; i++) {
                const float left = x[i], right = y[i];
                x[i] = left * cosine[i] - right * sine[i];
                y[i] = right * cosine[i] + left * sine[i];
            }
        }
    }
    return 0;
}

/* Rotate the first `heads` heads of `D` numbers of each row of x, in place: every pair (i, i + D / 2) by its token's
   angle. The table has D / 2 cosines, then as many sines, for each of `num` positions. With `q_norm` and `k_norm`,
   `[D]` each, heads are normalised first: the first `q_heads` by `q_norm`, the others by `k_norm`. Returns 0, or 1 if a
   position is not in the table. */
int baton_rotate(float *x, long row_size, long heads, long q_heads, long D, const float *q_norm, const float *k_norm,
                 float eps, const float *table, long num, const int64_t *positions, long T, int threads) {
    if (!all_within(positions, T, num)) return 1;
    struct rotate a = {{0}, x, row_size, heads, q_heads, D, q_norm, k_norm, eps, table, positions};
    return share_rows(&a.rows, T, row_size, threads, rotate_rows);
}

struct write {
    struct rows rows;
    const float *k, *v;
    long row_size;
    char *layer;
    long block_bytes, head_bytes;
    const int64_t *blocks, *offsets;
    long kv_heads, block_size, head_dim;
};

/* Store keys and values in their tokens' slots. They have `kv_heads` heads of `head_dim` numbers each, in rows
   `row_size` apart. */
#define WRITE(NAME, TYPE)                                                                                              \
    static int NAME##_rows(void *job, long unit) {                                                                     \
        const struct write *a = job;                                                                                   \
        const long step = a->head_dim * size_of(TYPE);                                                                 \
        EACH_ROW(t, a, unit)                                                                                           \
            for (long head = 0; head < a->kv_heads; head++) {                                                          \
                char *block = a->layer + a->blocks[t] * a->block_bytes + head * a->head_bytes;                         \
                char *to = block + a->offsets[t] * step;                                                               \
                const long from = t * a->row_size + head * a->head_dim;                                                \
                for (long d = 0; d < a->head_dim; d += 8) {                                                            \
                    store(to + d * size_of(TYPE), floats(a->k + from + d), TYPE);                                      \
                    store(to + a->block_size * step + d * size_of(TYPE), floats(a->v + from + d), TYPE);               \
                }                                                                                                      \
            }                                                                                                          \
        return 0;                                                                                                      \
    }                                                                                                                  \
    void NAME(const float *k, const float *v, long row_size, char *layer, long block_bytes, long head_bytes,           \
              const int64_t *blocks, const int64_t *offsets, long T, long kv_heads, long block_size, long head_dim,    \
              int threads) {                                                                                           \
        struct write a = {{0}, k, v, row_size, layer, block_bytes, head_bytes, blocks, offsets, kv_heads, block_size,  \
                          head_dim};                                                                                   \
        share_rows(&a.rows, T, kv_heads * head_dim, threads, NAME##_rows);                                         \
    }

WRITE(baton_write_float32, F32)
WRITE(baton_write_bfloat16, BF16)
WRITE(baton_write_float16, F16)

struct silu_mul {
    struct rows rows;
    const float *gate_up;
    long F;
    float *out;
};

static int silu_mul_rows(void *job, long unit) {
    const struct silu_mul *a = job;
    const long F = a->F;
    EACH_ROW(t, a, unit) {
        const float *gate = a->gate_up + t * 2 * F, *up = gate + F;
        float *out = a->out + t * F;
        long i = 0;
        for (; i + LANE <= F; i += LANE) {
            const lane x = silu_of_lanes(lanes(gate + i)) * lanes(up + i);
            memcpy(out + i, &x, sizeof(x));
        }
        for (; i + 8 <= F; i += 8) store((char *)(out + i), silu_of(floats(gate + i)) * floats(up + i), F32);
        float rest[8] = {0};
        memcpy(rest, gate + i, (F - i) * sizeof(float));
        const v8 last = silu_of(floats(rest));
        for (long j = i; j < F; j++) out[j] = last[j - i] * up[j];
    }
    return 0;
}

/* out `[T, F]` = silu(gate) * up. A row of `gate_up` holds F gates, then F ups. */
void baton_silu_mul(const float *gate_up, long T, long F, float *out, int threads) {
    struct silu_mul a = {{0}, gate_up, F, out};
    share_rows(&a.rows, T, F, threads, silu_mul_rows);
}

/* The largest number of x `[num]`, of which none are NaN or `sum` becomes NaN. `num` is a multiple of 32. */
INLINE float largest(const float *x, long num, v8 sum[4]) {
    v8 best[4];
    for (int j = 0; j < 4; j++) best[j] = splat(-__builtin_inff());
    for (long i = 0; i < num; i += 32)
        UNROLL for (int j = 0; j < 4; j++) {
            const v8 each = floats(x + i + 8 * j);
            best[j] = larger(each, best[j]);
            sum[j] += each;
        }
    best[0] = larger(larger(best[0], best[1]), larger(best[2], best[3]));
    float top = best[0][0];
    for (int lane = 1; lane < 8; lane++) top = best[0][lane] > top ? best[0][lane] : top;
    return top;
}

struct best {
    struct rows rows;
    const float *x;
    long V;
    float *values;
    int64_t *indices;
};

static int best_rows(void *job, long unit) {
    const struct best *a = job;
    const long V = a->V, whole = V - V % 32;
    EACH_ROW(t, a, unit) {
        const float *row = a->x + t * V;
        v8 sums[4] = {0};
        float top = -__builtin_inff();
        long at = 0;
        for (long start = 0; start < whole; start += PART) {
            const float most = largest(row + start, whole - start < PART ? whole - start : PART, sums);
            if (most > top) top = most, at = start;
        }
        float sum = sum_of(sums[0] + sums[1] + sums[2] + sums[3]);
        for (long i = whole; i < V; i++) {
            sum += row[i];
            if (row[i] > top) top = row[i], at = i;
        }
        for (; at < V && row[at] != top; at++);
        if (sum != sum) /* a NaN, or two infinities */
            for (long i = V - 1; i >= 0; i--)
                if (row[i] != row[i]) top = row[i], at = i;
        a->values[t] = top;
        a->indices[t] = at;
    }
    return 0;
}

/* The largest number of each row of x `[T, V]`, NaN if the row has one, and its index. Of equal numbers, the first one
   counts. One pass finds the part of the row that has it, as fast as memory allows. */
void baton_best(const float *x, long T, long V, float *values, int64_t *indices, int threads) {
    struct best a = {{0}, x, V, values, indices};
    share_rows(&a.rows, T, V, threads, best_rows);
}

/* --- sampling ----------------------------------------------------------------------------------------------------- */

enum { BUCKETS = 2048, SEGMENT = 256 };

/* A key for numbers <= 0: the largest number has the least key. */
INLINE uint32_t key_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x7fffffff;
}

/* The largest number t of x, all <= 0, such that at least `count` numbers, or numbers with `mass` of the weights, are
   no less than t. It is found by its key: 11 bits first, then 10 and 10. */
static float threshold(const float *x, const float *weights, long V, long count, double mass) {
    uint32_t found = 0;
    for (int shift = 20, bits = 11; shift >= 0; shift -= 10, bits = 10) {
        long counts[BUCKETS] = {0};
        double masses[BUCKETS] = {0};
        for (long i = 0; i < V; i++) {
            const uint32_t key = key_of(x[i]);
            if (shift < 20 && key >> (shift + 10) != found) continue;
            counts[key >> shift & ((1 << bits) - 1)]++;
            masses[key >> shift & ((1 << bits) - 1)] += weights[i];
        }
        uint32_t bucket = 0, last = 0;
        for (; bucket < 1u << bits; bucket++) {
            if (!counts[bucket]) continue;
            last = bucket; /* rounding may leave the sum just below the mass */
            if (count > 0 ? counts[bucket] >= count : masses[bucket] >= mass) break;
            count -= count > 0 ? counts[bucket] : 0;
            mass -= masses[bucket];
        }
        found = found << bits | last;
    }
    float value;
    memcpy(&value, &found, 4);
    return -value;
}

/* The sum of up to SEGMENT weights. */
INLINE double segment(const float *weights, long num) {
    double sums[4] = {0};
    long i = 0;
    for (; i + 4 <= num; i += 4)
        for (int j = 0; j < 4; j++) sums[j] += weights[i + j];
    for (; i < num; i++) sums[0] += weights[i];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/* e^x for x `[V]`, padded to a multiple of 8; 0 below `least` and where e^x is negligible. Returns their sum. */
static double weigh_row(const float *x, float *weights, long V, float least) {
    const v8 lowest = splat(least > -87.0f ? least : -87.0f);
    for (long i = 0; i < V; i += 8) {
        const v8 each = floats(x + i);
        const i32x8 hidden = each < lowest;
        store((char *)(weights + i), (v8)(~hidden & (i32x8)exp_of(each)), F32);
    }
    double total = 0;
    for (long i = 0; i < V; i += SEGMENT) total += segment(weights + i, V - i < SEGMENT ? V - i : SEGMENT);
    return total;
}

/* The first token at which the cumulative weight reaches `wanted`, which is at most the sum that `weigh_row` has
   returned. */
static long token_at(const float *weights, long V, double wanted) {
    double before = 0;
    long i = 0, token = -1;
    for (; i + SEGMENT < V; i += SEGMENT) {
        const double sum = segment(weights + i, SEGMENT);
        if (before + sum >= wanted) break;
        before += sum;
    }
    for (const long end = i + SEGMENT < V ? i + SEGMENT : V; i < end && (before < wanted || token < 0); i++) {
        before += weights[i];
        if (weights[i] > 0) token = i;
    }
    return token < 0 ? 0 : token;
}

struct draw {
    const float *x;
    long V;
    const float *best, *temperature;
    const int64_t *top_k;
    const float *top_p, *min_p;
    const double *random;
    int64_t *tokens;
};

static int draw_row(void *job, long t) {
    const struct draw *a = job;
    const long V = a->V, padded = (V + 7) / 8 * 8;
    const float temperature = a->temperature[t], best = a->best[t], *row = a->x + t * V;
    float *scaled = room_for(2 * padded), *weights = scaled + padded;
    if (!scaled) return 1;
    long i = 0;
    for (; i + 8 <= V; i += 8)
        store((char *)(scaled + i), (floats(row + i) - splat(best)) / splat(temperature), F32);
    for (; i < padded; i++) scaled[i] = i < V ? (row[i] - best) / temperature : -__builtin_inff();
    float least = -__builtin_inff();
    double total = weigh_row(scaled, weights, V, least);
    if (a->top_k[t] > 0 && a->top_k[t] < V) {
        least = threshold(scaled, weights, V, a->top_k[t], 0);
        total = weigh_row(scaled, weights, V, least);
    }
    if (a->top_p[t] < 1) {
        const float cutoff = threshold(scaled, weights, V, 0, total * a->top_p[t]);
        least = cutoff > least ? cutoff : least;
        total = weigh_row(scaled, weights, V, least);
    }
    if (a->min_p[t] > least) {
        least = a->min_p[t];
        total = weigh_row(scaled, weights, V, least);
    }
    a->tokens[t] = token_at(weights, V, a->random[t] * total);
    return 0;
}

/* Draw a token for each row of x `[T, V]`. top_k, top_p and min_p remove tokens; the others have the weights
   `e^((x - best) / temperature)`. The token drawn is the first at which the cumulative weight reaches `random` times
   their sum. A top_k of 0, a top_p of 1, and a min_p of minus infinity (it is a logarithm) remove none. Returns 0, or 1
   if there is not enough memory. */
int baton_draw(const float *x, long T, long V, const float *best, const float *temperature, const int64_t *top_k,
               const float *top_p, const float *min_p, const double *random, int64_t *tokens, int threads) {
    struct draw a = {x, V, best, temperature, top_k, top_p, min_p, random, tokens};
    return share(T, threads, draw_row, &a);
}

#include "group.h"
#include "layers.h"
