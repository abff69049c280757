/* Attention of one query a sequence to its keys and values in a cache of blocks: scores, softmax as it goes (Milakov and
 * Gimelshein 2018, "Online normalizer calculation for softmax"), and the weighted sum of the values, all in float32.
 */
#include "vectors.h"
#ifndef FORM

enum { PIECE = 64 }; /* tokens between two looks at the largest score */

struct attention {
    const void *queries;      /* [tokens, heads, size], a token `query_stride` numbers after the one before */
    const void *keys, *values; /* [blocks, groups, block_size, size] */
    void *mixed;              /* out: [tokens, heads, size] */
    const int64_t *tokens;    /* of the sequences: where their queries are */
    const int64_t *lengths;   /* of the sequences: tokens in the cache, at least 1 */
    const int64_t *tables;    /* [sequences, table_stride]: their blocks */
    int64_t query_stride, table_stride, sequences, groups, heads, size; /* heads: of one group */
    const int64_t *parts;     /* [sequences + 1]: how many parts the sequences before have */
    float *partial;           /* [parts, groups, heads * (size + 2)]: sums, largest score and total of each part */
    int64_t *done;            /* [sequences, groups]: how many of their parts are computed; 0 at first */
    int64_t share;            /* tokens of a part: a multiple of PIECE */
    int64_t block_size;       /* tokens of a block: a multiple of PIECE */
    int64_t dtype;            /* of all numbers */
    int64_t next;             /* the next pair of part and group that a thread takes; 0 at first */
    int64_t failed;           /* no memory */
};

/* Where a sequence's keys and values from token `t` on are. */
static inline int64_t start_of(const struct attention *at, int64_t sequence, int64_t group, int64_t t) {
    int64_t block = at->tables[sequence * at->table_stride + t / at->block_size];
    return ((block * at->groups + group) * at->block_size + t % at->block_size) * at->size;
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (NAME(bits)){__VA_ARGS__})
#endif

#define SELF "decode_attention.c"
#include "forms.h"

const char *decode_attention_forms(void) { return forms(); }

#else /* one form */

#define EACH4(f, s, i) f(i, s), f(i + 1, s), f(i + 2, s), f(i + 3, s)
#if LANES == 4
#define HEADS 4 /* at once, whose sums stay in registers */
#define EACH(f, s) EACH4(f, s, 0)
#elif LANES == 8
#define HEADS 4
#define EACH(f, s) EACH4(f, s, 0), EACH4(f, s, 4)
#else
#define HEADS 8
#define EACH(f, s) EACH4(f, s, 0), EACH4(f, s, 4), EACH4(f, s, 8), EACH4(f, s, 12)
#endif

/* Lane i of the sum of both: of `a` and of `b` in turns, each `stride` lanes wide, the neighbours added. */
#define FIRST(i, s) ((i) & (s) ? LANES + (i) - (s) : (i))
#define SECOND(i, s) ((i) & (s) ? LANES + (i) : (i) + (s))
#define FOLD(a, b, stride) (SHUFFLE(a, b, EACH(FIRST, stride)) + SHUFFLE(a, b, EACH(SECOND, stride)))

/* The sum of each vector's lanes, in a vector. */
INLINE VECTOR NAME(sums)(VECTOR *of) {
    UNROLL for (int i = 0; i < LANES / 2; i++) of[i] = FOLD(of[2 * i], of[2 * i + 1], 1);
    UNROLL for (int i = 0; i < LANES / 4; i++) of[i] = FOLD(of[2 * i], of[2 * i + 1], 2);
#if LANES > 4
    UNROLL for (int i = 0; i < LANES / 8; i++) of[i] = FOLD(of[2 * i], of[2 * i + 1], 4);
#endif
#if LANES > 8
    of[0] = FOLD(of[0], of[1], 8);
#endif
    return of[0];
}

/* Numbers of the cache or of queries as float32: where they are, or put into `buffer`. */
INLINE const float *NAME(floats)(const struct attention *at, const void *from, int64_t start, int64_t count, float *buffer) {
    if (at->dtype == FLOAT32)
        return (const float *)from + start;
    for (int64_t i = 0; i < count; i += LANES)
        AT(buffer + i) = NAME(read)(from, start + i, at->dtype == FLOAT16 ? FLOAT16 : BFLOAT16); /* no branch for FLOAT32 */
    return buffer;
}

/* The products of one query with LANES keys. */
INLINE VECTOR NAME(score)(const float *query, const float *keys, int64_t size) {
    VECTOR sums[LANES];
    UNROLL for (int i = 0; i < LANES; i++) sums[i] = (VECTOR){0};
    for (int64_t d = 0; d < size; d += LANES) {
        VECTOR q = READ(query + d);
        UNROLL for (int i = 0; i < LANES; i++) sums[i] += q * READ(keys + i * size + d);
    }
    return NAME(sums)(sums);
}

/* sums = sums * factor + weights * values, of some heads and 1 or 2 vectors of the values' numbers. */
INLINE void NAME(mix_some)(float *sums, const float *factors, const float *weights, const float *values, int64_t tokens,
                           int64_t size, const int heads, const int wide) {
    VECTOR mixed[HEADS][2];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int c = 0; c < wide; c++) mixed[h][c] = READ(sums + h * size + c * LANES) * factors[h];
    for (int64_t t = 0; t < tokens; t++)
        UNROLL for (int h = 0; h < heads; h++)
            UNROLL for (int c = 0; c < wide; c++)
                mixed[h][c] += READ(values + t * size + c * LANES) * weights[h * PIECE + t];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int c = 0; c < wide; c++) AT(sums + h * size + c * LANES) = mixed[h][c];
}

static TARGET void NAME(mix)(float *sums, const float *factors, const float *weights, const float *values, int64_t tokens,
                             int64_t size, int64_t heads) {
#define MIX(count)                                                                                                     \
    case count:                                                                                                        \
        for (; d + 2 * LANES <= size; d += 2 * LANES)                                                                  \
            NAME(mix_some)(sums + d, factors, weights, values + d, tokens, size, count, 2);                            \
        if (d < size)                                                                                                  \
            NAME(mix_some)(sums + d, factors, weights, values + d, tokens, size, count, 1);                            \
        break;
    int64_t d = 0;
    switch (heads) {
        MIX(1) MIX(2) MIX(3) MIX(4)
#if HEADS == 8
        MIX(5) MIX(6) MIX(7) MIX(8)
#endif
    }
#undef MIX
}

/* Scores of a piece become weights e^(score - largest). Returns by what earlier sums are multiplied. */
INLINE float NAME(weigh)(float *scores, int64_t tokens, float *largest, float *total) {
    int64_t padded = (tokens + LANES - 1) / LANES * LANES;
    for (int64_t t = tokens; t < padded; t++)
        scores[t] = -INFINITY;
    VECTOR most = READ(scores), sum = {0};
    for (int64_t t = LANES; t < padded; t += LANES)
        most = NAME(larger)(READ(scores + t), most);
    float before = *largest;
    UNROLL for (int i = 0; i < LANES; i++) *largest = most[i] > *largest ? most[i] : *largest;
    for (int64_t t = 0; t < padded; t += LANES)
        sum += AT(scores + t) = NAME(power)(NAME(larger)((VECTOR){0} - 87, READ(scores + t) - *largest)); /* NaN stays */
    float factor = expf(before - *largest);
    *total *= factor;
    UNROLL for (int i = 0; i < LANES; i++) *total += sum[i];
    return factor;
}

struct NAME(memory) { /* of a thread */
    float *queries, *sums;                                  /* [heads, size] */
    float *numbers;                                         /* [PIECE, size] */
    float *scores, *largest, *totals, *factors;             /* [heads, PIECE], [heads] */
    float *tiles;                                           /* [16, 16], [16, size], and [16, PIECE] of bfloat16 */
};

#ifdef TILES
/* Where all is bfloat16: products of up to 16 heads at once by AMX, whose tiles are 16 rows of 64 bytes. The left matrix
 * lies as it is; of the right one each two rows are interleaved, so that a pair of its numbers is 4 bytes.
 */
static int for_tiles(const struct attention *at) { return at->dtype == BFLOAT16 && at->size % 32 == 0; }

struct ahead { /* what the next piece reads: its keys, then its values */
    const uint16_t *keys, *values;
    int64_t at, count; /* numbers */
};

/* So many cache lines more of it. Few at a time: a core waits for 16 at most, and computes meanwhile. */
INLINE void NAME(prefetch)(struct ahead *of, int lines) {
    for (; lines > 0 && of->at < 2 * of->count; lines--, of->at += 32)
        __builtin_prefetch(of->at < of->count ? of->keys + of->at : of->values + (of->at - of->count), 0, 2);
}

/* out: float32 [16, 16]. left: [16, 32 * steps], right: [16 * steps, 16 pairs]. Strides are bytes from row to row. */
INLINE void NAME(multiply)(float *out, int64_t out_stride, const uint16_t *left, int64_t left_stride,
                           const uint16_t *right, int64_t right_stride, int64_t steps) {
    _tile_zero(0);
    for (int64_t s = 0; s < steps; s++) {
        _tile_loadd(1, left + s * 32, left_stride);
        _tile_loadd(2, (const char *)right + s * 16 * right_stride, right_stride);
        _tile_dpbf16ps(0, 1, 2);
    }
    _tile_stored(0, out, out_stride);
}

INLINE __m512i NAME(widened)(const uint16_t *values, int64_t t, int64_t tokens, int64_t place) {
    /* what lies behind the tokens may be no numbers */
    return t < tokens ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(values + place))) : _mm512_setzero_si512();
}

static TARGET void NAME(piece_by_tiles)(const struct attention *at, struct NAME(memory) *of, int64_t start, int64_t tokens,
                                        int64_t next) {
    const int64_t size = at->size;
    const uint16_t *keys = (const uint16_t *)at->keys + start, *values = (const uint16_t *)at->values + start;
    struct ahead ahead = {(const uint16_t *)at->keys + next, (const uint16_t *)at->values + next, 0, PIECE * size};
    const __m512i rows = _mm512_slli_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 4);
    float *products = of->tiles, *mixed = products + 16 * 16;                                  /* [16, 16], [16, size] */
    uint16_t *weights = (uint16_t *)(mixed + 16 * size), *pairs = (uint16_t *)of->numbers; /* [PIECE / 2, size] pairs */
    for (int64_t t = 0; t < PIECE; t += 2) {
        NAME(prefetch)(&ahead, 1);
        for (int64_t d = 0, place = t * size; d < size; d += 16, place += 16) {
            __m512i one = NAME(widened)(values, t, tokens, place), other = NAME(widened)(values, t + 1, tokens, place + size);
            _mm512_storeu_si512(pairs + t * size + 2 * d, _mm512_or_si512(one, _mm512_slli_epi32(other, 16)));
        }
    }
    for (int64_t first = 0; first < at->heads; first += 16) {
        const uint16_t *queries = (const uint16_t *)of->queries + first * size;
        int64_t heads = least(16, at->heads - first);
        float *scores = of->scores + first * PIECE, *sums = of->sums + first * size, *factors = of->factors + first;
        for (int64_t t = 0; t < tokens; t += 16) {
            NAME(prefetch)(&ahead, 8);
            NAME(multiply)(products, 64, keys + t * size, 2 * size, queries, 64, size / 32);
            for (int64_t h = 0; h < heads; h++)
                _mm512_storeu_ps(scores + h * PIECE + t, _mm512_i32gather_ps(rows, products + h, 4));
        }
        for (int64_t h = 0; h < heads; h++) {
            NAME(prefetch)(&ahead, 16);
            factors[h] = NAME(weigh)(scores + h * PIECE, tokens, of->largest + first + h, of->totals + first + h);
            __m512 rounding = _mm512_setzero_ps(); /* their total is that of the rounded ones */
            for (int64_t t = 0; t < PIECE; t += 16) {
                __m512 some = t < tokens ? _mm512_loadu_ps(scores + h * PIECE + t) : _mm512_setzero_ps();
                __m256i rounded = (__m256i)_mm512_cvtneps_pbh(some);
                _mm256_storeu_si256((__m256i *)(weights + h * PIECE + t), rounded);
                rounding += (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16) - some;
            }
            of->totals[first + h] += _mm512_reduce_add_ps(rounding);
        }
        for (int64_t d = 0; d < size; d += 16) {
            NAME(prefetch)(&ahead, 16);
            NAME(multiply)(mixed + d, 4 * size, weights, 2 * PIECE, pairs + 2 * d, 4 * size, PIECE / 32);
        }
        for (int64_t h = 0; h < heads; h++)
            for (int64_t d = h * size; d < (h + 1) * size; d += LANES)
                AT(sums + d) = READ(sums + d) * factors[h] + READ(mixed + d);
    }
}

/* [heads, size] become pairs of numbers that lie side by side, [size / 2, 16 heads] for each 16 heads. */
static TARGET void NAME(queries_for_tiles)(const struct attention *at, uint16_t *queries, const uint16_t *from) {
    for (int64_t h = 0; h < at->heads; h++)
        for (int64_t d = 0; d < at->size; d += 2)
            memcpy(queries + h / 16 * 16 * at->size + d * 16 + h % 16 * 2, from + h * at->size + d, 4);
}
#endif

static TARGET void NAME(piece)(const struct attention *at, struct NAME(memory) *of, const float *queries, int64_t start,
                               int64_t tokens, int64_t next) {
#ifdef TILES
    if (for_tiles(at)) {
        NAME(piece_by_tiles)(at, of, start, tokens, next);
        return;
    }
#endif
    int64_t size = at->size, width = at->dtype == FLOAT32 ? 4 : 2;
    for (int64_t t = 0; t < tokens; t += LANES) {
        const char *values = (const char *)at->values + (start + t * size) * width;
        const char *further = (const char *)at->keys + (next + t * size) * width;
        int64_t bytes = LANES * size * width, share = (bytes / at->heads + 63) / 64 * 64;
        const float *keys = NAME(floats)(at, at->keys, start + t * size, LANES * size, of->numbers);
        for (int64_t h = 0; h < at->heads; h++) {
            for (int64_t line = h * share; line < least(bytes, (h + 1) * share); line += 64) { /* what is read next */
                __builtin_prefetch(values + line);
                __builtin_prefetch(further + line);
            }
            AT(of->scores + h * PIECE + t) = NAME(score)(queries + h * size, keys, size);
        }
    }
    for (int64_t h = 0; h < at->heads; h++)
        of->factors[h] = NAME(weigh)(of->scores + h * PIECE, tokens, of->largest + h, of->totals + h);
    const float *values = NAME(floats)(at, at->values, start, tokens * size, of->numbers);
    for (int64_t h = 0; h < at->heads; h += HEADS)
        NAME(mix)(of->sums + h * size, of->factors + h, of->scores + h * PIECE, values, tokens, size,
                  least(HEADS, at->heads - h));
}

/* Put what was computed of a part beside the other parts of its sequence and group. Whoever is last adds them up, and
 * gets 1.
 */
static TARGET int NAME(merge)(const struct attention *at, struct NAME(memory) *of, int64_t sequence, int64_t group, int64_t part) {
    int64_t heads = at->heads, numbers = heads * at->size, first = at->parts[sequence], count = at->parts[sequence + 1] - first;
    float *own = at->partial + (part * at->groups + group) * (numbers + 2 * heads);
    memcpy(own, of->sums, numbers * sizeof(float));
    memcpy(own + numbers, of->largest, heads * sizeof(float));
    memcpy(own + numbers + heads, of->totals, heads * sizeof(float));
    if (__atomic_add_fetch(at->done + sequence * at->groups + group, 1, __ATOMIC_ACQ_REL) < count)
        return 0;
    memset(of->sums, 0, numbers * sizeof(float));
    for (int64_t h = 0; h < heads; h++)
        of->largest[h] = -INFINITY, of->totals[h] = 0;
    for (int64_t p = first; p < first + count; p++) {
        const float *some = at->partial + (p * at->groups + group) * (numbers + 2 * heads);
        for (int64_t h = 0; h < heads; h++) {
            float most = some[numbers + h] > of->largest[h] ? some[numbers + h] : of->largest[h];
            float before = expf(of->largest[h] - most), factor = expf(some[numbers + h] - most);
            of->largest[h] = most, of->totals[h] = of->totals[h] * before + some[numbers + heads + h] * factor;
            for (int64_t i = h * at->size; i < (h + 1) * at->size; i += LANES)
                AT(of->sums + i) = READ(of->sums + i) * before + READ(some + i) * factor;
        }
    }
    return 1;
}

static TARGET void NAME(pair)(const struct attention *at, struct NAME(memory) *of, int64_t sequence, int64_t group, int64_t part) {
    int64_t size = at->size, numbers = at->heads * size, first = at->tokens[sequence] * at->query_stride + group * numbers;
    const float *queries = of->queries;
#ifdef TILES
    if (for_tiles(at))
        NAME(queries_for_tiles)(at, (uint16_t *)of->queries, (const uint16_t *)at->queries + first);
    else
#endif
        queries = NAME(floats)(at, at->queries, first, numbers, of->queries);
    memset(of->sums, 0, numbers * sizeof(float));
    for (int64_t h = 0; h < at->heads; h++)
        of->largest[h] = -INFINITY, of->totals[h] = 0;
    int64_t t = (part - at->parts[sequence]) * at->share, end = least(at->lengths[sequence], t + at->share), next;
    for (int64_t start = start_of(at, sequence, group, t); t < end; t += PIECE, start = next) {
        next = t + PIECE < end ? start_of(at, sequence, group, t + PIECE) : start;
        NAME(piece)(at, of, queries, start, least(PIECE, end - t), next);
    }
    if (at->lengths[sequence] > at->share && !NAME(merge)(at, of, sequence, group, part))
        return;
    int64_t out = (at->tokens[sequence] * at->groups + group) * numbers;
    for (int64_t i = 0; i < numbers; i += LANES)
        NAME(write)(at->mixed, out + i, READ(of->sums + i) / of->totals[i / size], at->dtype);
}

/* Compute pairs of part and group until none is left. Any number of threads may do so at once, on the same struct. */
TARGET void NAME(decode_attention)(struct attention *at) {
    int64_t size = at->size, heads = (at->heads + 15) / 16 * 16; /* AMX computes 16 */
    float *memory = aligned_alloc(64, (2 * heads * size + PIECE * size + heads * (PIECE + 3) + 16 * (16 + size + PIECE / 2)) * sizeof(float));
    if (memory == NULL) {
        __atomic_store_n(&at->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    struct NAME(memory) of = {.queries = memory, .sums = memory + heads * size, .numbers = memory + 2 * heads * size};
    of.scores = of.numbers + PIECE * size;
    of.tiles = of.scores + heads * PIECE;
    of.largest = of.tiles + 16 * (16 + size + PIECE / 2);
    of.totals = of.largest + heads;
    of.factors = of.totals + heads;
#ifdef TILES
    struct tile_shapes shapes = {.palette = 1, .bytes = {64, 64, 64}, .rows = {16, 16, 16}};
    if (for_tiles(at))
        _tile_loadconfig(&shapes);
#endif
    int64_t pair;
    while ((pair = __atomic_fetch_add(&at->next, 1, __ATOMIC_RELAXED)) < at->parts[at->sequences] * at->groups) {
        int64_t sequence = 0, part = pair / at->groups;
        while (at->parts[sequence + 1] <= part)
            sequence++;
        NAME(pair)(at, &of, sequence, pair % at->groups, part);
    }
#ifdef TILES
    if (for_tiles(at))
        _tile_release();
#endif
    free(memory);
}

#undef HEADS
#undef EACH4
#undef EACH
#undef FIRST
#undef SECOND
#undef FOLD
#endif
