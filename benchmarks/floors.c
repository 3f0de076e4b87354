/* Reads memory as fast as a core can, for `benchmarks.floors`. */

#include <string.h>

typedef float v8 __attribute__((vector_size(32)));

/* The sum of n numbers, a multiple of 256, read from `streams` places at a time: 1 or 4. Which is faster depends on the
   processor. */
float read_all(const float *x, long n, int streams) {
    v8 sums[8] = {{0}};
    const long part = n / streams;
    for (long i = 0; i < part; i += 64)
        for (int stream = 0; stream < streams; stream++) {
            const float *at = x + stream * part + i;
            for (int j = 0; j < 8; j++) __builtin_prefetch(at + 512 + 16 * (j / 2), 0, 2);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                v8 each;
                memcpy(&each, at + 8 * j, sizeof each);
                sums[j] += each;
            }
        }
    float sum = 0;
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < 8; i++) sum += sums[j][i];
    return sum;
}
