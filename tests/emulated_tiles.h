/* The instructions of AMX for `tiles.h`, computed without it, as Intel's Software Developer's Manual describes them. They
   check that a tile is used only while tiles are configured, and with fitting rows. */

#include <assert.h>

#define TILES
#define ALLOWED 1

static __thread struct {
    int configured;
    uint8_t rows[8];
    uint32_t words[8][16][16];
} emulated;

static void emulated_configure(const void *config) {
    const uint8_t *at = config;
    assert(at[0] == 1 && at[1] == 0);
    for (int i = 2; i < 16; i++) assert(!at[i]);
    for (int t = 0; t < 16; t++) {
        uint16_t row_bytes;
        memcpy(&row_bytes, at + 16 + 2 * t, 2);
        assert(row_bytes == (t < 8 ? 64 : 0) && at[48 + t] <= 16 && !at[48 + t] == (t >= 8));
        if (t < 8) emulated.rows[t] = at[48 + t];
    }
    memset(emulated.words, 0, sizeof(emulated.words));
    emulated.configured = 1;
}

static void emulated_clear(int t) {
    assert(emulated.configured);
    memset(emulated.words[t], 0, sizeof(emulated.words[t]));
}

static void emulated_load(int t, const char *from, long stride) {
    emulated_clear(t);
    for (int r = 0; r < emulated.rows[t]; r++) memcpy(emulated.words[t][r], from + r * stride, 64);
}

static void emulated_store(int t, char *to, long stride) {
    assert(emulated.configured);
    for (int r = 0; r < emulated.rows[t]; r++) memcpy(to + r * stride, emulated.words[t][r], 64);
}

static void emulated_multiply(int sums, int a, int b) {
    typedef uint32_t words __attribute__((vector_size(64)));
    typedef float numbers __attribute__((vector_size(64)));
    assert(emulated.configured && emulated.rows[sums] == emulated.rows[a] && emulated.rows[b] == 16);
    numbers weights[16][2];
    for (int k = 0; k < 16; k++) {
        words row;
        memcpy(&row, emulated.words[b][k], 64);
        weights[k][0] = (numbers)(row << 16);
        weights[k][1] = (numbers)(row & 0xffff0000);
    }
    for (int r = 0; r < emulated.rows[a]; r++) {
        numbers chains[2] = {{0}, {0}}, sum;
        for (int k = 0; k < 16; k++)
            for (int half = 0; half < 2; half++) {
                const uint32_t bits = half ? emulated.words[a][r][k] & 0xffff0000 : emulated.words[a][r][k] << 16;
                float x;
                memcpy(&x, &bits, 4);
                chains[half] += x * weights[k][half];
            }
        memcpy(&sum, emulated.words[sums][r], 64);
        sum += chains[0] + chains[1];
        memcpy(emulated.words[sums][r], &sum, 64);
    }
}

#define CONFIGURE(p) emulated_configure(p)
#define LOAD(t, p, stride) emulated_load(t, p, stride)
#define LOAD_ONCE(t, p, stride) emulated_load(t, p, stride)
#define STORE(t, p, stride) emulated_store(t, p, stride)
#define CLEAR(t) emulated_clear(t)
#define MULTIPLY(sums, a, b) emulated_multiply(sums, a, b)
#define RELEASE (emulated.configured = 0)
