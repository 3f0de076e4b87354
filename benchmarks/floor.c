/* What a core can do at most: read memory, and multiply and add. For `benchmarks.decode_floor`. */

#include <string.h>

typedef float v8 __attribute__((vector_size(32)));

/* The sum of n floats, a multiple of 256: four streams, since one does not keep the memory busy, and two chains for each,
   with what is 2 KiB ahead asked for. */
float read_all(const float *x, long n) {
    const long quarter = n / 4;
    v8 sums[8] = {{0}};
    for (long i = 0; i < quarter; i += 16) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const float *at = x + j * quarter + i;
            __builtin_prefetch(at + 512);
            v8 parts[2];
            memcpy(parts, at, sizeof parts);
            sums[2 * j] += parts[0];
            sums[2 * j + 1] += parts[1];
        }
    }
    v8 all = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    float sum = 0;
    for (int i = 0; i < 8; i++) sum += all[i];
    return sum;
}

/* n rounds of 12 independent multiply-adds of 8 floats: 192 n operations. */
float multiply_add(long n, float factor) {
    v8 sums[12], by = {factor, factor, factor, factor, factor, factor, factor, factor};
    for (int j = 0; j < 12; j++) sums[j] = by + (float)j;
    for (long i = 0; i < n; i++) {
#pragma GCC unroll 12
        for (int j = 0; j < 12; j++) sums[j] = sums[j] * by + by;
    }
    float sum = 0;
    for (int j = 0; j < 12; j++) sum += sums[j][0];
    return sum;
}
