/* Products with tiles of AMX, for `pairs.h`, which includes this. Two tiles of rows are multiplied with two panels, or
   one with four, block by block: four tiles of sums are held in registers. (The last of an odd number of tiles is
   multiplied with two panels, too.)

   Many rows are packed at a time, and stay in the second cache. A part of two panels, which stays in the first one, is
   multiplied with all of them before the next part, and the sums wait beside. Meanwhile the panels that come next are
   prefetched, and rows whose sums are complete are written, or gated: so memory is waited for as little as may be. */

#ifdef EMULATED_TILES
#include EMULATED_TILES
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#define TILES
/* The compiler is not told what memory the instructions read. */
#define READ_BY_NEXT(p) __asm__ volatile("" ::"r"(p) : "memory")
#define CONFIGURE(p) READ_BY_NEXT(p); _tile_loadconfig(p)
#define LOAD(t, p, stride) READ_BY_NEXT(p); _tile_loadd(t, p, stride)
#define LOAD_ONCE(t, p, stride) READ_BY_NEXT(p); _tile_stream_loadd(t, p, stride) /* hardly cached */
#define STORE(t, p, stride) _tile_stored(t, p, stride)
#define CLEAR(t) _tile_zero(t)
#define MULTIPLY(sums, a, b) _tile_dpbf16ps(sums, a, b)
#define RELEASE _tile_release()
/* Linux lets a process use tiles after it has asked: ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA. */
#define ALLOWED (!syscall(SYS_arch_prctl, 0x1023, 18))
#endif

#ifdef TILES

enum {
    TILE_SUMS = SIDE * SIDE,
    AHEAD = 1,         /* blocks of a panel from the one that is used to the one that is prefetched, of few rows */
    FEW = 2,           /* tiles of rows that are multiplied with all blocks of a panel at once */
    TILES_ROWS = 512,  /* most rows that are multiplied with a panel before the next one */
    TILES_DEPTH = 32,  /* most blocks of their input features, which then stay in the second cache */
    PANELS_DEPTH = 16, /* most blocks of two panels, which then stay in the first one */
    PANELS_WAITING = 256, /* most panels whose sums wait: 8 MiB */
};

static __thread struct room summed, waiting;

/* A product, or the part of it that is computed at a time: `rows` rows of x from `m` on, and `num` blocks of the input
   features from `k` on. A unit of packing is a tile of rows, and one of multiplying is `run` panels. */
struct tiled {
    const float *x; /* M rows of K numbers */
    long M, K, blocks;
    const char *rounded; /* or these rows, rounded, of whole blocks; also if there is but a tile of them */
    const char *w;
    long panel_bytes, panels; /* from a panel to the next one, and their number */
    const float *bias;
    char *out;
    long N;       /* outputs of a row */
    int gates;    /* whether panels of gates and of ups alternate, and the N outputs are gated, and rounded to bf16 */
    char *packed; /* [tile of rows][block][16][32] */
    float *sums;  /* [pair of panels][pair of tiles][4][16][16]: where sums wait for more blocks; NULL: all are here */
    long first, end; /* panels that are multiplied with all blocks before the next ones */
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
        for (long r = 0, row = a->m + first; r < rows; r++, row++) {
            char *packed = to + r * 2 * BLOCK;
            if (a->rounded) memcpy(packed, a->rounded + (row * a->blocks * BLOCK + at) * 2, 2 * BLOCK);
            else if (num == BLOCK) round_row(a->x + row * a->K + at, BLOCK, packed); /* a constant: no loop */
            else round_row(a->x + row * a->K + at, num, packed);
        }
        memset(to + rows * 2 * BLOCK, 0, (SIDE - rows) * 2 * BLOCK);
    }
    return 0;
}

/* Sums that are complete: twice those of up to 16 rows with two panels. */
struct complete {
    const float *sums; /* [2][panel][16][16]; NULL: there are none */
    long row[2], rows[2], panel[2]; /* the first row and how many there are, and the first of the two panels */
};

/* Write the sums of a row with two panels, or gate those of one with the other. */
INLINE void write_row(const struct tiled *a, const float *left, const float *right, long row, long panel) {
    const long first = panel * SIDE, num = a->N - first;
    const float *bias = a->bias ? a->bias + first : NULL;
    float *to = (float *)a->out + row * a->N + first;
    if (num >= 2 * SIDE)
        UNROLL for (int i = 0; i < 2 * SIDE; i += LANE) {
            lane x = lanes(i < SIDE ? left + i : right + i - SIDE);
            if (bias) x += lanes(bias + i);
            memcpy(to + i, &x, sizeof(x));
        }
    else
        for (long n = 0; n < num; n++) to[n] = (n < SIDE ? left[n] : right[n - SIDE]) + (bias ? bias[n] : 0);
}

INLINE void gate_row(const struct tiled *a, const float *gates, const float *ups, long row, long panel) {
    const float *bias = a->bias ? a->bias + panel * SIDE : NULL;
    char *to = a->out + row * bytes_of_row(a->N, 1) + panel * SIDE;
    float gated[SIDE];
    UNROLL for (int i = 0; i < SIDE; i += LANE) {
        lane gate = lanes(gates + i), up = lanes(ups + i);
        if (bias) gate += lanes(bias + i), up += lanes(bias + SIDE + i);
        gate = silu_of_lanes(gate) * up;
        memcpy(gated + i, &gate, sizeof(gate));
    }
    round_side(gated, to);
    if (panel + 2 == a->panels && panel % 4 == 0) memset(to + 2 * SIDE, 0, 2 * SIDE); /* the rest of a block */
}

/* Write or gate some of the rows, `[r, end)` of 32. */
static __attribute__((noinline)) void finish(const struct tiled *a, const struct complete *c, long r, long end) {
    for (; r < end && r < 2 * SIDE; r++) {
        const long part = r / SIDE, at = r % SIDE;
        if (at >= c->rows[part]) continue;
        const float *left = c->sums + 2 * part * TILE_SUMS + at * SIDE, *right = left + TILE_SUMS;
        if (a->gates) gate_row(a, left, right, c->row[part] + at, c->panel[part]);
        else write_row(a, left, right, c->row[part] + at, c->panel[part]);
    }
}

/* What is done while blocks are multiplied: what is `done` is written, and panels `further` bytes behind these are
   prefetched. Of many rows, `lines` lines for each block, behind the `skipped` ones of earlier rows. */
struct meanwhile {
    const struct tiled *product;
    struct complete done;
    long further, lines, skipped;
};

INLINE void prefetch_lines(const struct meanwhile *also, const char *panel, long b) {
    const char *at = panel + also->further + 64 * (also->skipped + b * also->lines);
    for (long i = 0; i < also->lines; i++) __builtin_prefetch(at + 64 * i, 0, 2);
}

/* Prefetch the block that is AHEAD blocks behind block b of a panel of `num` blocks, or of the panel that follows. Of
   the orders that were tried, memory comes soonest in this one: on an Intel Xeon a product of one row takes 0.90 of
   what it takes with the lines in turn. */
INLINE void prefetch_block(const struct meanwhile *also, const char *panel, long b, long num) {
    const char *at = panel + (b + AHEAD) * TILE_BYTES + (b + AHEAD < num ? 0 : also->further - num * TILE_BYTES);
    UNROLL for (int i = 0; i < SIDE; i++) __builtin_prefetch(at + 64 * (i * 13 % SIDE), 0, 2);
}

/* Rows of x: the blocks of a tile are `step` bytes apart, their rows `stride`, and the second tile `other`. */
struct row_tiles {
    const char *at;
    long step, stride, other;
};

#define LOAD_ROWS(t, p)                                                                                                \
    if (many) {                                                                                                        \
        LOAD_ONCE(t, p, x.stride);                                                                                     \
    } else {                                                                                                           \
        LOAD(t, p, x.stride);                                                                                          \
    }
#define LOAD_PANEL(t, i)                                                                                               \
    if (also && many) prefetch_lines(also, w[i], b);                                                                   \
    else if (also) prefetch_block(also, w[i], b, num);                                                                 \
    LOAD(t, w[i] + b * TILE_BYTES, 4 * SIDE)

/* Products of `tiles` tiles of rows with `num` blocks of `panels` panels: 2 and 2, 1 and 2, or 1 and 4. They are added
   to the sums, in rows `stride` bytes apart, unless they are `fresh`. */
INLINE void multiply_blocks(int tiles, int panels, int many, struct row_tiles x, const char *const *w, long num,
                            int fresh, char *const *sums, long stride, const struct meanwhile *also) {
    const long rows = (2 * SIDE + num - 1) / num; /* that are written beside each block */
    if (fresh) {
        CLEAR(0);
        CLEAR(1);
        CLEAR(2);
        CLEAR(3);
    } else {
        LOAD(0, sums[0], stride);
        LOAD(1, sums[1], stride);
        if (tiles * panels == 4) {
            LOAD(2, sums[2], stride);
            LOAD(3, sums[3], stride);
        }
    }
    if (also && !many && also->done.sums) finish(also->product, &also->done, 0, 2 * SIDE);
    for (long b = 0; b < num; b++) {
        LOAD_ROWS(4, x.at + b * x.step)
        LOAD_PANEL(6, 0);
        MULTIPLY(0, 4, 6);
        if (tiles == 2) {
            LOAD_ROWS(5, x.at + x.other + b * x.step)
            MULTIPLY(2, 5, 6);
        }
        LOAD_PANEL(7, 1);
        MULTIPLY(1, 4, 7);
        if (tiles == 2) {
            MULTIPLY(3, 5, 7);
        }
        if (panels == 4) {
            LOAD_PANEL(5, 2);
            MULTIPLY(2, 4, 5);
            LOAD_PANEL(6, 3);
            MULTIPLY(3, 4, 6);
        }
        if (also && many && also->done.sums) finish(also->product, &also->done, b * rows, (b + 1) * rows);
    }
    STORE(0, sums[0], stride);
    STORE(1, sums[1], stride);
    if (tiles * panels < 4) return;
    STORE(2, sums[2], stride);
    STORE(3, sums[3], stride);
}

/* Rows for which this thread's tiles are configured; 0: they are not. */
static __thread long configured;

/* Configure tiles of up to `rows` rows of x, unless they are: it takes some hundred cycles. */
static void configure_tiles(long rows) {
    if (rows > SIDE) rows = SIDE;
    if (configured == rows) return;
    configured = rows;
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = 4 * SIDE;
        config.rows[t] = t < 5 ? rows : SIDE; /* the sums and the rows of x */
    }
    CONFIGURE(&config);
}

static void release_tiles(void) {
    configured = 0;
    RELEASE;
}

/* Multiply two tiles of rows from t on with two panels from p on, or one with four, as far as they are there: `num`
   blocks from `begin` on. The sums are computed in `room`. Meanwhile write what is done, which these sums are in the
   end if they are complete. */
INLINE void multiply_some(const struct tiled *a, long t, long p, long end, long begin, long num, float *room,
                          struct meanwhile *also) {
    const long tiles = row_tiles_of(a->rows), pairs = (tiles + 1) / 2, k = a->k + begin;
    const int panels = tiles == 1 ? 4 : 2;
    const char *w[4];
    char *sums[4];
    for (int i = 0; i < 4; i++) {
        const long panel = p + i % panels;
        w[i] = a->w + (panel < end ? panel : end - 1) * a->panel_bytes + k * TILE_BYTES;
        sums[i] = (char *)(room + i * TILE_SUMS);
    }
    struct row_tiles x = {a->packed + (t * a->num + begin) * TILE_BYTES, TILE_BYTES, 4 * SIDE, a->num * TILE_BYTES};
    if (!a->packed) x = (struct row_tiles){a->rounded + k * 2 * BLOCK, 2 * BLOCK, a->blocks * 2 * BLOCK, 0};
    also->further = panels * a->panel_bytes;
    const long lines = (SIDE + pairs - 1) / pairs, before = t / 2 * lines, left = before < SIDE ? SIDE - before : 0;
    also->lines = lines < left ? lines : left;
    also->skipped = before * num;
    if (tiles == 1) multiply_blocks(1, 4, 0, x, w, num, !k, sums, 4 * SIDE, also);
    else if (tiles <= FEW) multiply_blocks(2, 2, 0, x, w, num, !k, sums, 4 * SIDE, also);
    else if (t + 1 < tiles) multiply_blocks(2, 2, 1, x, w, num, !k, sums, 4 * SIDE, also);
    else multiply_blocks(1, 2, 1, x, w, num, !k, sums, 4 * SIDE, also);
    also->done.sums = k + num == a->blocks ? room : NULL;
    for (int i = 0; i < 2; i++) {
        const long row = panels == 2 ? (t + i) * SIDE : 0, panel = panels == 2 ? p : p + 2 * i;
        also->done.row[i] = a->m + row;
        also->done.rows[i] = panel < end ? a->rows - row : 0;
        also->done.panel[i] = panel;
    }
}

/* Multiply the rows with the panels of a unit. */
static int tiled_panels(void *job, long unit) {
    const struct tiled *a = job;
    const long tiles = row_tiles_of(a->rows), pairs = (tiles + 1) / 2, size = 4 * TILE_SUMS;
    const long first = a->first + unit * a->run, end = first + a->run < a->end ? first + a->run : a->end;
    const long parts = tiles > FEW ? (a->num + PANELS_DEPTH - 1) / PANELS_DEPTH : 1;
    const long depth = (a->num + parts - 1) / parts;
    float *room = a->sums ? a->sums : grown(&summed, pairs * size);
    if (!room) return 1;
    struct meanwhile also = {.product = a};
    configure_tiles(a->rows);
    for (long p = first; p < end; p += tiles == 1 ? 4 : 2) {
        float *sums = a->sums ? room + (p - a->first) / 2 * pairs * size : room;
        for (long k = 0; k < a->num; k += depth)
            for (long t = 0; t < tiles; t += 2)
                multiply_some(a, t, p, end, k, a->num - k < depth ? a->num - k : depth, sums + t / 2 * size, &also);
    }
    if (also.done.sums) finish(a, &also.done, 0, 2 * SIDE);
    release_tiles();
    return 0;
}

/* Compute a product; the members up to `gates` are given, but for either `x` or `rounded`. Returns 0, or 1 if there is
   not enough memory. */
static int multiply_tiles(struct tiled *a, int threads) {
    const long height = a->M < TILES_ROWS ? a->M : TILES_ROWS, pairs = (row_tiles_of(height) + 1) / 2;
    const int at_once = height <= FEW * SIDE || height * a->blocks <= TILES_ROWS * TILES_DEPTH;
    const long depth = at_once ? a->blocks : TILES_DEPTH;
    if (a->M <= SIDE) { /* a tile is rounded, and not packed */
        if (!a->rounded && !(a->rounded = rounded_rows(a->x, a->M, a->K, 1))) return 1;
    } else if (!(a->packed = (char *)room_for(row_tiles_of(height) * depth * TILE_BYTES / 4))) {
        return 1;
    }
    const long most = at_once || a->panels < PANELS_WAITING ? a->panels : PANELS_WAITING;
    if (!at_once && !(a->sums = grown(&waiting, (most + 1) / 2 * pairs * 4 * TILE_SUMS))) return 1;
    a->run = a->M > MANY && threads > 1 ? GROUP : run_of(a->panels, a->blocks * TILE_BYTES, threads);
    for (a->m = 0; a->m < a->M; a->m += height)
        for (a->first = 0; a->first < a->panels; a->first = a->end) {
            a->rows = a->M - a->m < height ? a->M - a->m : height;
            a->end = a->panels - a->first < most ? a->panels : a->first + most;
            for (a->k = 0; a->k < a->blocks; a->k += depth) {
                a->num = a->blocks - a->k < depth ? a->blocks - a->k : depth;
                if (a->packed) share(row_tiles_of(a->rows), a->rows > MANY ? threads : 1, pack_row_tile, a);
                if (share((a->end - a->first + a->run - 1) / a->run, threads, tiled_panels, a)) return 1;
            }
        }
    return 0;
}

/* Products for attention by one thread, with the arguments of `pairs_product`. Tiles stay configured. */
static void attend_tiles(const char *x, long M, long stride, long blocks, const char *w, long panel_bytes, long panels,
                         int fresh, float *out, long width) {
    for (long m = 0; m < M; m += 2 * SIDE, x += 2 * SIDE * stride, out += 2 * SIDE * width) {
        const long left = M - m, beside = left > SIDE ? 2 : 4;
        const struct row_tiles rows = {x, 2 * BLOCK, stride, SIDE * stride};
        configure_tiles(left);
        for (long p = 0; p < panels; p += beside) {
            const char *at[4];
            char *sums[4];
            for (int i = 0; i < 4; i++) { /* panels that are not there are the last one, which is written again */
                const long panel = p + i % beside < panels ? p + i % beside : panels - 1;
                at[i] = w + panel * panel_bytes;
                sums[i] = (char *)(out + i / beside * SIDE * width + panel * SIDE);
            }
            if (beside == 2) multiply_blocks(2, 2, 0, rows, at, blocks, fresh, sums, 4 * width, NULL);
            else multiply_blocks(1, 4, 0, rows, at, blocks, fresh, sums, 4 * width, NULL);
        }
    }
}

#endif
