/* What a step does to its tokens' rows between two products: the norm of a row by its root mean square, and of query and
 * key of each head the norm, where a model has one, the rotation by the token's position, and the place in the cache.
 * Sums and factors are float32. Sizes are multiples of LANES, those of heads that are turned of 2 * LANES.
 */
#include "vectors.h"

enum { SHARE = 16 }; /* rows that a thread takes at once */

#if defined(__x86_64__) && defined(__linux__) /* one of these is chosen when the library is loaded */
#define FORMS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FORMS
#endif
#define FORM any
#define TARGET
#define LANES 16
#include "vectors.h"

struct norm {
    const void *x;       /* [rows, size], a row `x_stride` numbers after the one before */
    const float *weight; /* [size] */
    void *y;             /* out: [rows, size] */
    int64_t rows, size, x_stride;
    int64_t dtype;       /* of x and y: FLOAT32 or BFLOAT16 */
    int64_t next;        /* the next row that a thread takes; 0 at first */
    float eps;           /* added to the mean square */
};

struct turn {
    void *qkv;                      /* in and out: [tokens, heads + 2 * groups, size]: queries, keys, values */
    const void *angles;             /* [tokens, size]: the cosines of a token's position, then the sines */
    const float *weight;            /* of the norm: [heads + groups, size], or NULL */
    void *keys, *values;            /* out: [blocks, groups, block_size, size] */
    const int64_t *slots;           /* [2, tokens]: block, and place in it, of each token's keys and values */
    int64_t tokens, heads, groups, size, block_size;
    int64_t dtype; /* of qkv, angles, keys and values: FLOAT32 or BFLOAT16 */
    int64_t next;  /* the next token that a thread takes; 0 at first */
    float eps;
};

INLINE void normalise(const void *x, int64_t from, const float *weight, void *y, int64_t to, int64_t size, float eps,
                      enum dtype dtype) {
    VECTOR squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        VECTOR numbers = NAME(read)(x, from + i, dtype);
        squares += numbers * numbers;
    }
    float sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += squares[i];
    float factor = 1 / sqrtf(sum / size + eps);
    for (int64_t i = 0; i < size; i += LANES)
        NAME(write)(y, to + i, NAME(read)(x, from + i, dtype) * factor * NAME(read)(weight, i, FLOAT32), dtype);
}

/* The numbers i and i + size / 2 of a head are turned by the same angle. */
INLINE void rotate(void *head, int64_t start, const void *angles, int64_t angle, int64_t size, enum dtype dtype) {
    for (int64_t i = 0; i < size / 2; i += LANES) {
        VECTOR cos = NAME(read)(angles, angle + i, dtype), sin = NAME(read)(angles, angle + size / 2 + i, dtype);
        VECTOR first = NAME(read)(head, start + i, dtype), second = NAME(read)(head, start + size / 2 + i, dtype);
        NAME(write)(head, start + i, first * cos - second * sin, dtype);
        NAME(write)(head, start + size / 2 + i, second * cos + first * sin, dtype);
    }
}

INLINE void turn_token(const struct turn *at, int64_t token, enum dtype dtype) {
    int64_t size = at->size, width = dtype == FLOAT32 ? 4 : 2, turned = at->heads + at->groups;
    int64_t start = token * (turned + at->groups) * size;
    for (int64_t h = 0; h < turned; h++) {
        if (at->weight != NULL)
            normalise(at->qkv, start + h * size, at->weight + h * size, at->qkv, start + h * size, size, at->eps,
                      dtype);
        rotate(at->qkv, start + h * size, at->angles, token * size, size, dtype);
    }
    for (int64_t g = 0; g < at->groups; g++) {
        const char *key = (const char *)at->qkv + (start + (at->heads + g) * size) * width;
        int64_t to = ((at->slots[token] * at->groups + g) * at->block_size + at->slots[at->tokens + token]) * size * width;
        memcpy((char *)at->keys + to, key, size * width);
        memcpy((char *)at->values + to, key + at->groups * size * width, size * width);
    }
}

/* Both: until no row is left. Any number of threads may do so at once, on the same struct. */

FORMS void decode_rows_norm(struct norm *at) {
    int64_t first;
    while ((first = __atomic_fetch_add(&at->next, SHARE, __ATOMIC_RELAXED)) < at->rows)
        for (int64_t row = first; row < least(first + SHARE, at->rows); row++)
            if (at->dtype == BFLOAT16)
                normalise(at->x, row * at->x_stride, at->weight, at->y, row * at->size, at->size, at->eps, BFLOAT16);
            else
                normalise(at->x, row * at->x_stride, at->weight, at->y, row * at->size, at->size, at->eps, FLOAT32);
}

FORMS void decode_rows_turn(struct turn *at) {
    int64_t first;
    while ((first = __atomic_fetch_add(&at->next, SHARE, __ATOMIC_RELAXED)) < at->tokens)
        for (int64_t token = first; token < least(first + SHARE, at->tokens); token++)
            if (at->dtype == BFLOAT16)
                turn_token(at, token, BFLOAT16);
            else
                turn_token(at, token, FLOAT32);
}
