/* Reads memory as fast as a core can, for `benchmarks.floors`. */

#include <string.h>

typedef float v8 __attribute__((vector_size(32)));

enum { LINES = 16, LINE = 16, SOME = LINES * LINE, AHEAD = 3 * SOME }; /* numbers of a line, and of a kilobyte */

/* The sum of n numbers, read from `streams` places at a time, a kilobyte each: of those that come next, the lines are
   prefetched in steps of `step`. */
static inline __attribute__((always_inline)) float read_in_steps(const float *x, long n, int streams, int step) {
    v8 sums[8] = {{0}};
    const long part = n / streams;
    for (long i = 0; i < part; i += SOME)
        for (int stream = 0; stream < streams; stream++) {
            const float *at = x + stream * part + i;
#pragma GCC unroll 16
            for (int j = 0; j < LINES; j++) __builtin_prefetch(at + AHEAD + LINE * (j * step % LINES), 0, 2);
#pragma GCC unroll 32
            for (int j = 0; j < SOME / 8; j++) {
                v8 each;
                memcpy(&each, at + 8 * j, sizeof each);
                sums[j % 8] += each;
            }
        }
    float sum = 0;
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < 8; i++) sum += sums[j][i];
    return sum;
}

/* The sum of n numbers, a multiple of 1024: read from 1, 2 or 4 places at a time, with lines prefetched in turn or not.
   Which is fastest depends on the processor. */
float read_all(const float *x, long n, int streams, int in_turn) {
    return in_turn ? read_in_steps(x, n, streams, 1) : read_in_steps(x, n, streams, 13);
}
