/* All layers of a model in one call. Included by `kernels.c`.

   In a step of few tokens a layer's kernels are short, and an interpreter between them, whose code the weights have
   driven out of the caches, would take a good part of the time. What is computed is what the other functions compute,
   called one after another. */

enum { NO_MEMORY = 1, GROUP_ENDED = 2, NO_SUCH_POSITION = 3 };

/* The packed weights of a product, and its outputs; those of a gated one are gated. */
struct product {
    const char *w;
    const float *bias;
    long outputs, type;
};

struct layer {
    const float *input_norm, *mlp_norm, *q_norm, *k_norm; /* the last two are NULL if there are none */
    struct product qkv, output, gate_up, down;
    long window; /* 0: none */
};

struct forward {
    const struct layer *layers;
    long num_layers;
    float *h, *delta; /* the tokens' hidden states `[T, E]`; what is to be added to them in the end */
    long T, E, heads, kv_heads, head_dim;
    const float *angles;                      /* of `num_positions`; see `baton_rotate` */
    long num_positions;
    const int64_t *positions;                 /* `[T]` */
    const int64_t *slot_blocks, *slot_offsets; /* `[T]` */
    const int64_t *starts, *lens;             /* of the slices: `[slices + 1]`, `[slices]` */
    const int64_t *tables;                    /* of their blocks, `[slices, width]` */
    long slices, width;
    char *cache; /* the first head of block 0 in the first layer */
    long layer_bytes, block_bytes, head_bytes, block_size, kv_type;
    struct member *group; /* NULL: this is the only rank */
    float scale, eps;
    int threads;
};

typedef int (*product_of)(const float *, long, long, const char *, const float *, float *, long, int);
typedef int (*decode_of)(const float *, long, const char *, long, long, const int64_t *, long, const int64_t *, long,
                         long, long, long, long, long, float, float *, int);
typedef int (*prefill_of)(const float *, long, const char *, long, long, const int64_t *, long, long, long, long, long,
                          long, long, float, float *, int);
typedef void (*write_of)(const float *, const float *, long, char *, long, long, const int64_t *, const int64_t *, long,
                         long, long, long, int);

/* By type. What is normalised or gated for pairs is rounded; pairs are written as bf16. */
static const product_of products[] = {baton_linear_float32, baton_linear_bfloat16, baton_linear_float16,
                                      baton_linear_rounded};
static const product_of gates[] = {baton_gated_float32, baton_gated_bfloat16, baton_gated_float16, gated_rounded};
static const decode_of decodes[] = {baton_decode_float32, baton_decode_bfloat16, baton_decode_float16,
                                    baton_decode_pairs};
static const prefill_of prefills[] = {baton_prefill_float32, baton_prefill_bfloat16, baton_prefill_float16,
                                      baton_prefill_pairs};
static const write_of writes[] = {baton_write_float32, baton_write_bfloat16, baton_write_float16,
                                  baton_write_bfloat16};

static __thread struct room normed, projected, attended, let_through;

/* Attention of all slices. Adjacent ones of one token share a call. */
static int attend_slices(const struct forward *a, const char *cache, long window, const float *q, long row_size,
                         float *out) {
    const long group = a->heads / a->kv_heads, width = a->heads * a->head_dim;
    for (long b = 0, last, failed; b < a->slices; b = last) {
        const long first = a->starts[b], num = a->starts[b + 1] - first;
        const int64_t *table = a->tables + b * a->width;
        last = b + 1;
        while (num == 1 && last < a->slices && a->starts[last + 1] - a->starts[last] == 1) last++;
        if (num == 1)
            failed = decodes[a->kv_type](q + first * row_size, row_size, cache, a->block_bytes, a->head_bytes, table,
                                         a->width, a->lens + b, last - b, a->kv_heads, group, a->block_size,
                                         a->head_dim, window, a->scale, out + first * width, a->threads);
        else
            failed = prefills[a->kv_type](q + first * row_size, row_size, cache, a->block_bytes, a->head_bytes, table,
                                          a->lens[b] - num, num, a->kv_heads, group, a->block_size, a->head_dim,
                                          window, a->scale, out + first * width, a->threads);
        if (failed) return NO_MEMORY;
    }
    return 0;
}

/* The sum over the ranks of what a product adds to the hidden states. `attended` values are not rounded. */
static int multiply_onto(const struct forward *a, const struct product *p, const float *x, long inputs, int attended) {
    const product_of product = attended && p->type == PAIRS ? baton_linear_pairs : products[p->type];
    if (product(x, a->T, inputs, p->w, p->bias, a->delta, a->E, a->threads)) return NO_MEMORY;
    return a->group && baton_group_add(a->group, a->delta, a->T * a->E) ? GROUP_ENDED : 0;
}

/* `delta` is what is still to be added to the hidden states: NULL, or what the layer before has left. */
static int compute_layer(const struct forward *a, const struct layer *layer, char *cache, const float *delta) {
    const struct product *p = &layer->qkv, *gate_up = &layer->gate_up;
    const long width = a->heads * a->head_dim, keys_end = width + a->kv_heads * a->head_dim;
    float *x = grown(&normed, a->T * (a->E + BLOCK)), *qkv = grown(&projected, a->T * p->outputs);
    float *values = grown(&attended, a->T * width);
    float *gated = grown(&let_through, a->T * bytes_of_row(gate_up->outputs, gate_up->type == PAIRS) / 4);
    if (!x || !qkv || !values || !gated) return NO_MEMORY;

    add_norm(a->h, delta, layer->input_norm, a->eps, a->T, a->E, x, p->type == PAIRS, a->threads);
    if (products[p->type](x, a->T, a->E, p->w, p->bias, qkv, p->outputs, a->threads)) return NO_MEMORY;
    if (baton_rotate(qkv, p->outputs, a->heads + a->kv_heads, a->heads, a->head_dim, layer->q_norm, layer->k_norm,
                     a->eps, a->angles, a->num_positions, a->positions, a->T, a->threads))
        return NO_SUCH_POSITION;
    writes[a->kv_type](qkv + width, qkv + keys_end, p->outputs, cache, a->block_bytes, a->head_bytes, a->slot_blocks,
                       a->slot_offsets, a->T, a->kv_heads, a->block_size, a->head_dim, a->threads);
    int failed = attend_slices(a, cache, layer->window, qkv, p->outputs, values);
    if (failed || (failed = multiply_onto(a, &layer->output, values, width, 1))) return failed;

    add_norm(a->h, a->delta, layer->mlp_norm, a->eps, a->T, a->E, x, gate_up->type == PAIRS, a->threads);
    if (gates[gate_up->type](x, a->T, a->E, gate_up->w, gate_up->bias, gated, gate_up->outputs, a->threads))
        return NO_MEMORY;
    return multiply_onto(a, &layer->down, gated, gate_up->outputs, 0);
}

/* Compute the tokens' hidden states, and store their keys and values. Returns 0, or why not. */
int baton_forward(const struct forward *a) {
    const float *delta = NULL;
    for (long i = 0; i < a->num_layers; i++, delta = a->delta) {
        const int failed = compute_layer(a, a->layers + i, a->cache + i * a->layer_bytes, delta);
        if (failed) return failed;
    }
    return 0;
}
