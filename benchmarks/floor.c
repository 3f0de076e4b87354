/* What a core can do at most: read memory, and multiply and add. For `benchmarks.decode_floor`. */

#include <string.h>

typedef float v8 __attribute__((vector_size(32)));

/* The sum of n floats, a multiple of 64, in eight chains. One stream, without asking ahead, is what the hardware is made
   for: four streams, and prefetches, were slower. */
float read_all(const float *x, long n) {
    v8 sums[8] = {{0}};
    for (long i = 0; i < n; i += 64) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            v8 part;
            memcpy(&part, x + i + 8 * j, sizeof part);
            sums[j] += part;
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
