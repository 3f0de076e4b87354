/* The instructions of AMX for `pairs.h`, computed without it, as Intel's Software Developer's Manual describes them. They
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

static float emulated_half(uint32_t word, int upper) {
    const uint32_t bits = upper ? word & 0xffff0000 : word << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

static void emulated_multiply(int sums, int a, int b) {
    assert(emulated.configured && emulated.rows[sums] == emulated.rows[a] && emulated.rows[b] == 16);
    for (int r = 0; r < emulated.rows[a]; r++)
        for (int n = 0; n < 16; n++) {
            float chains[2] = {0, 0}, sum;
            for (int k = 0; k < 16; k++)
                for (int half = 0; half < 2; half++)
                    chains[half] = __builtin_fmaf(emulated_half(emulated.words[a][r][k], half),
                                                  emulated_half(emulated.words[b][k][n], half), chains[half]);
            memcpy(&sum, &emulated.words[sums][r][n], 4);
            sum += chains[0] + chains[1];
            memcpy(&emulated.words[sums][r][n], &sum, 4);
        }
}

#define CONFIGURE(p) emulated_configure(p)
#define LOAD(t, p, stride) emulated_load(t, p, stride)
#define STORE(t, p, stride) emulated_store(t, p, stride)
#define CLEAR(t) emulated_clear(t)
#define MULTIPLY(sums, a, b) emulated_multiply(sums, a, b)
#define RELEASE (emulated.configured = 0)
