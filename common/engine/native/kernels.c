/* Matrix products with weights, and attention of decode tokens, for CPUs. Compiled at first use (`common.engine.native`); portable C with GCC's vectors.

   Every output is one chain of fused multiply-adds in the order of the input features, whatever the number of rows: a
   row's result does not depend on the rows beside it.

   Weights are packed in panels of 16 outputs, `[panel][input feature][16]`, in their own type; the last panel is padded
   with zeros. A tile of up to 6 rows and 16 outputs is held in registers (after Goto and van de Geijn, "Anatomy of
   High-Performance Matrix Multiplication", ACM TOMS 34(3), 2008, section 4). */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float v8 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef _Float16 h8 __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

enum { F32, BF16, F16 };
enum {
    PANEL = 16,   /* outputs of a panel */
    GROUP = 4,    /* panels that one row is multiplied with at a time: one chain would wait for itself */
    TILE = 6,     /* most rows of a tile */
    UNPACK = 24,  /* rows from which on it pays to widen a panel once rather than for each tile */
    ROWS = 192,   /* rows that are multiplied with a panel while it is in the cache */
};

INLINE long size_of(int type) { return type == F32 ? 4 : 2; }

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

INLINE v8 splat(float x) { return (v8){x, x, x, x, x, x, x, x}; }

/* `rows` rows of x, `[rows, K]`, times `panels` panels: outputs `[first, first + 16 * panels)` of N. */
INLINE void tile(int rows, int panels, int type, const float *x, long K, const char *w, const float *bias, float *out,
                 long N, long first) {
    const long row_bytes = PANEL * size_of(type), panel_bytes = K * row_bytes;
    v8 sums[TILE][2 * GROUP];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < 2 * panels; p++) sums[r][p] = splat(0);
    for (long k = 0; k < K; k++) {
        UNROLL for (int p = 0; p < panels; p++) {
            const char *at = w + p * panel_bytes + k * row_bytes;
            v8 low = load(at, type), high = load(at + row_bytes / 2, type);
            UNROLL for (int r = 0; r < rows; r++) {
                v8 value = splat(x[r * K + k]);
                sums[r][2 * p] += value * low;
                sums[r][2 * p + 1] += value * high;
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < panels; p++) {
        float both[PANEL];
        memcpy(both, &sums[r][2 * p], 32);
        memcpy(both + 8, &sums[r][2 * p + 1], 32);
        long begin = first + PANEL * p, num = N - begin < PANEL ? N - begin : PANEL;
        for (long i = 0; i < num; i++) out[r * N + begin + i] = both[i] + (bias ? bias[begin + i] : 0);
    }
}

/* One panel, for all rows, in tiles of nearly equal height. The type is a constant in each of these functions: that is
   what lets the compiler keep a tile in registers. */
#define ONE_PANEL(NAME, TYPE)                                                                                          \
    static void NAME(const float *x, long M, long K, const char *w, const float *bias, float *out, long N,             \
                     long first) {                                                                                     \
        for (long m = 0, rows, tiles = (M + TILE - 1) / TILE; m < M; tiles--, m += rows) {                             \
            rows = (M - m + tiles - 1) / tiles;                                                                        \
            const float *from = x + m * K;                                                                             \
            float *to = out + m * N;                                                                                   \
            switch (rows) {                                                                                            \
            case 1: tile(1, 1, TYPE, from, K, w, bias, to, N, first); break;                                           \
            case 2: tile(2, 1, TYPE, from, K, w, bias, to, N, first); break;                                           \
            case 3: tile(3, 1, TYPE, from, K, w, bias, to, N, first); break;                                           \
            case 4: tile(4, 1, TYPE, from, K, w, bias, to, N, first); break;                                           \
            case 5: tile(5, 1, TYPE, from, K, w, bias, to, N, first); break;                                           \
            default: tile(6, 1, TYPE, from, K, w, bias, to, N, first);                                                 \
            }                                                                                                          \
        }                                                                                                              \
    }

static __thread float *scratch;
static __thread long scratch_size;

/* Room for so many numbers, for this thread; NULL when there is no memory. */
static float *room_for(long size) {
    if (scratch_size < size) {
        free(scratch);
        scratch = aligned_alloc(64, (size * 4 + 63) / 64 * 64);
        scratch_size = scratch ? size : 0;
    }
    return scratch;
}

/* A group of `panels` panels, for all rows. */
#define GROUP_OF_PANELS(NAME, ONE, TYPE)                                                                               \
    static void NAME(const float *x, long M, long K, const char *w, const float *bias, float *out, long N, long first, \
                     long panels) {                                                                                    \
        const long panel_bytes = K * PANEL * size_of(TYPE);                                                            \
        if (panels == GROUP && M == 1) {                                                                               \
            tile(1, 4, TYPE, x, K, w, bias, out, N, first);                                                            \
            return;                                                                                                    \
        }                                                                                                              \
        if (panels == GROUP && M <= 3) {                                                                               \
            for (int p = 0; p < GROUP; p += 2) {                                                                       \
                if (M == 2) tile(2, 2, TYPE, x, K, w + p * panel_bytes, bias, out, N, first + PANEL * p);              \
                if (M == 3) tile(3, 2, TYPE, x, K, w + p * panel_bytes, bias, out, N, first + PANEL * p);              \
            }                                                                                                          \
            return;                                                                                                    \
        }                                                                                                              \
        float *wide = TYPE != F32 && M >= UNPACK ? room_for(K * PANEL) : NULL;                                         \
        for (long p = 0; p < panels; p++, w += panel_bytes) {                                                          \
            if (wide) {                                                                                                \
                for (long i = 0; i < K * PANEL; i += 8) {                                                              \
                    v8 values = load(w + i * size_of(TYPE), TYPE);                                                     \
                    memcpy(wide + i, &values, 32);                                                                     \
                }                                                                                                      \
                one_panel_float32(x, M, K, (const char *)wide, bias, out, N, first + PANEL * p);                       \
            } else {                                                                                                   \
                ONE(x, M, K, w, bias, out, N, first + PANEL * p);                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

/* out `[M, N]` = x `[M, K]` times the packed weights, plus bias `[N]` unless that is NULL. */
#define LINEAR(NAME, GROUP_OF, TYPE)                                                                                   \
    void NAME(const float *x, long M, long K, const char *w, const float *bias, float *out, long N, int threads) {     \
        long panels = (N + PANEL - 1) / PANEL, groups = (panels + GROUP - 1) / GROUP;                                  \
        for (long m = 0; m < M; m += ROWS) {                                                                           \
            long rows = M - m < ROWS ? M - m : ROWS;                                                                   \
            _Pragma("omp parallel for num_threads(threads) schedule(static) if (threads > 1)")                         \
            for (long g = 0; g < groups; g++) {                                                                        \
                long p = GROUP * g, num = panels - p < GROUP ? panels - p : GROUP;                                     \
                const char *at = w + p * K * PANEL * size_of(TYPE);                                                    \
                GROUP_OF(x + m * K, rows, K, at, bias, out + m * N, N, PANEL * p, num);                                \
            }                                                                                                          \
        }                                                                                                              \
    }

#define KERNELS(NAME, TYPE)                                                                                            \
    ONE_PANEL(one_panel_##NAME, TYPE)                                                                                  \
    GROUP_OF_PANELS(group_##NAME, one_panel_##NAME, TYPE)                                                              \
    LINEAR(baton_linear_##NAME, group_##NAME, TYPE)

KERNELS(float32, F32)
KERNELS(bfloat16, BF16)
KERNELS(float16, F16)

/* --- attention of decode tokens ----------------------------------------------------------------------------------- */

INLINE float sum_of(v8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

typedef int32_t i32x8 __attribute__((vector_size(32)));

/* e to the power of x <= 0, within 2 units in the last place (Cody and Waite's reduction, a polynomial of degree 6). */
INLINE v8 exp_of(v8 x) {
    const i32x8 low = x < splat(-87.0f);
    x = (v8)((low & (i32x8)splat(-87.0f)) | (~low & (i32x8)x));
    v8 shifted = x * splat(1.44269504f) + splat(12582912.0f); /* 1.5 * 2^23: rounds to an integer in the low bits */
    i32x8 n = (i32x8)shifted - (i32x8)splat(12582912.0f);
    v8 whole = shifted - splat(12582912.0f);
    v8 r = (x - whole * splat(0.693359375f)) - whole * splat(-2.12194440e-4f);
    v8 y = splat(1.3888949e-3f);
    y = y * r + splat(8.3333610e-3f);
    y = y * r + splat(4.1666667e-2f);
    y = y * r + splat(0.16666667f);
    y = y * r + splat(0.5f);
    y = (y * r) * r + r + splat(1.0f);
    return (v8)((i32x8)y + (n << 23));
}

#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (i32x8){__VA_ARGS__})

/* The sums of four vectors, each in the order of `sum_of`. */
INLINE void sums_of(v8 a, v8 b, v8 c, v8 d, float scale, float *out) {
    v8 ab = SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    v8 cd = SHUFFLE(c, d, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(c, d, 4, 5, 6, 7, 12, 13, 14, 15);
    v8 all = SHUFFLE(ab, cd, 0, 1, 4, 5, 8, 9, 12, 13) + SHUFFLE(ab, cd, 2, 3, 6, 7, 10, 11, 14, 15);
    for (int i = 0; i < 4; i++) out[i] = (all[2 * i] + all[2 * i + 1]) * scale;
}

/* What all tokens of a step and layer have in common. */
struct cache {
    const char *layer;     /* the layer's part of block 0: [2, kv_heads, block_size, head_dim] */
    long block_bytes;      /* from a block to the next */
    long kv_heads, group;  /* query heads of one KV head */
    long block_size, head_dim;
    float scale;
};

/* Scores of one query against consecutive slots of a block, of which there are `num` to ask for and `room` in all. */
INLINE void scores_of(int type, const struct cache *c, const float *q, const char *k, long num, long room, float *out) {
    const long D = c->head_dim, step = D * size_of(type);
    long s = 0;
    for (; s < num && s + 4 <= room; s += 4) {
        v8 sums[4] = {splat(0), splat(0), splat(0), splat(0)};
        for (long d = 0; d < D; d += 8) {
            v8 part;
            memcpy(&part, q + d, 32);
            UNROLL for (int i = 0; i < 4; i++) sums[i] += part * load(k + (s + i) * step + d * size_of(type), type);
        }
        sums_of(sums[0], sums[1], sums[2], sums[3], c->scale, out + s);
    }
    for (; s < num; s++) {
        v8 sum = splat(0);
        for (long d = 0; d < D; d += 8) {
            v8 part;
            memcpy(&part, q + d, 32);
            sum += part * load(k + s * step + d * size_of(type), type);
        }
        out[s] = sum_of(sum) * c->scale;
    }
}

/* The weights e^(score - most), in place, zero in the padding; one over their sum. */
INLINE float softmax(float *row, long num, long size) {
    float most = row[0];
    for (long s = 1; s < num; s++) most = row[s] > most ? row[s] : most;
    for (long s = num; s < size; s++) row[s] = -1e30f;
    v8 total = splat(0);
    for (long s = 0; s < size; s += 8) {
        v8 x;
        memcpy(&x, row + s, 32);
        x = exp_of(x - splat(most));
        total += x;
        memcpy(row + s, &x, 32);
    }
    return 1.0f / sum_of(total);
}

/* `rows` outputs' dimensions `[d, d + 8 * width)`: the values of slots `[begin, end)`, weighted. */
INLINE void weigh(int rows, int width, int type, const struct cache *c, const int64_t *table, long values, long begin,
                  long end, const float *weights, long size, const float *factors, long d, float *out) {
    const long step = c->head_dim * size_of(type);
    v8 sums[3][4];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int i = 0; i < width; i++) sums[r][i] = splat(0);
    for (long s = begin; s < end;) {
        const long block = s / c->block_size, stop = (block + 1) * c->block_size < end ? (block + 1) * c->block_size : end;
        const char *v = c->layer + table[block] * c->block_bytes + values + s % c->block_size * step + d * size_of(type);
        for (; s < stop; s++, v += step) {
            v8 parts[4];
            UNROLL for (int i = 0; i < width; i++) parts[i] = load(v + 8 * i * size_of(type), type);
            UNROLL for (int r = 0; r < rows; r++) {
                v8 weight = splat(weights[r * size + s - begin]);
                UNROLL for (int i = 0; i < width; i++) sums[r][i] += weight * parts[i];
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int i = 0; i < width; i++) {
        v8 result = sums[r][i] * splat(factors[r]);
        memcpy(out + r * c->head_dim + d + 8 * i, &result, 32);
    }
}

/* One token's queries of one KV head's group against its slots `[begin, end)`. `scores` has room for a row of `size` for
   each query, and for one more number each. */
INLINE void attend(int type, const struct cache *c, const float *q, const int64_t *table, long head, long begin, long end,
                   float *scores, long size, float *out) {
    const long D = c->head_dim, step = D * size_of(type);
    const long keys = head * c->block_size * step, values = keys + c->kv_heads * c->block_size * step;
    float *factors = scores + c->group * size;
    for (long s = begin; s < end;) {
        const long block = s / c->block_size, room = (block + 1) * c->block_size - s, num = room < end - s ? room : end - s;
        const char *k = c->layer + table[block] * c->block_bytes + keys + s % c->block_size * step;
        for (long g = 0; g < c->group; g++) scores_of(type, c, q + g * D, k, num, room, scores + g * size + s - begin);
        s += num;
    }
    for (long g = 0; g < c->group; g++) factors[g] = softmax(scores + g * size, end - begin, size);
    for (long g = 0; g < c->group;) {
        const long rows = c->group - g >= 3 ? 3 : c->group - g;
        const float *weights = scores + g * size;
        for (long d = 0; d < D;) {
            const long width = D - d >= 32 ? 4 : 1;
            float *to = out + g * D;
#define WEIGH(R, W) weigh(R, W, type, c, table, values, begin, end, weights, size, factors + g, d, to)
            if (width == 4) {
                if (rows == 3) WEIGH(3, 4);
                if (rows == 2) WEIGH(2, 4);
                if (rows == 1) WEIGH(1, 4);
            } else {
                if (rows == 3) WEIGH(3, 1);
                if (rows == 2) WEIGH(2, 1);
                if (rows == 1) WEIGH(1, 1);
            }
            d += 8 * width;
        }
        g += rows;
    }
}

/* out `[N, H, D]` for tokens with queries `[N, H, D]`; token i is the last of `lens[i]` tokens of the sequence whose
   blocks are `tables + i * width`, and sees the last `window` of them, or all if that is 0. Returns 0, or 1 without memory. */
#define DECODE(NAME, TYPE)                                                                                             \
    int NAME(const float *q, const char *layer, long block_bytes, const int64_t *tables, long width,                   \
             const int64_t *lens, long N, long kv_heads, long group, long block_size, long head_dim, long window,      \
             float scale, float *out, int threads) {                                                                   \
        const struct cache c = {layer, block_bytes, kv_heads, group, block_size, head_dim, scale};                     \
        int failed = 0;                                                                                                \
        _Pragma("omp parallel for num_threads(threads) schedule(dynamic) reduction(|:failed) if (threads > 1)")        \
        for (long item = 0; item < N * kv_heads; item++) {                                                             \
            long i = item / kv_heads, head = item % kv_heads, end = lens[i];                                           \
            long begin = window && end > window ? end - window : 0, size = (end - begin + 15) / 8 * 8;                 \
            float *scores = room_for(group * (size + 1));                                                              \
            if (!scores) {                                                                                             \
                failed = 1;                                                                                            \
                continue;                                                                                              \
            }                                                                                                          \
            long at = (i * kv_heads + head) * group * head_dim;                                                        \
            attend(TYPE, &c, q + at, tables + i * width, head, begin, end, scores, size, out + at);                    \
        }                                                                                                              \
        return failed;                                                                                                 \
    }

DECODE(baton_decode_float32, F32)
DECODE(baton_decode_bfloat16, BF16)
DECODE(baton_decode_float16, F16)
