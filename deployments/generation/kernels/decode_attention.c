/* Attention of one query a sequence to its keys and values in a cache of blocks: scores, softmax as it goes (Milakov and
 * Gimelshein 2018, "Online normalizer calculation for softmax"), and the weighted sum of the values, all in float32.
 */
#include "vectors.h"
#ifndef FORM

enum {
    PIECE = 128, /* tokens between two looks at the largest score */
    STEP = 32,   /* tokens whose values are added at a time */
    LEAD = 8192  /* bytes from what is computed to what is fetched */
};

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

struct ahead { /* what is read: keys and values of a piece, and keys of the next one */
    const char *keys, *values, *next;
    int64_t at, end, bytes; /* of all; of all; of each */
};

/* Fetch so many cache lines more of it. Few at a time: a core waits for few, and computes meanwhile. */
static inline __attribute__((always_inline)) void prefetch(struct ahead *of, int lines) {
    if (of->at >= of->end)
        return;
    const char *from = of->at < of->bytes ? of->keys : of->at < 2 * of->bytes ? of->values - of->bytes : of->next - 2 * of->bytes;
    UNROLL for (int i = 0; i < lines; i++) __builtin_prefetch(from + of->at + 64 * i, 0, 2);
    of->at += 64 * lines;
}

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

#if HEADS == 8
#define EACH_COUNT SOME(1) SOME(2) SOME(3) SOME(4) SOME(5) SOME(6) SOME(7) SOME(8)
#else
#define EACH_COUNT SOME(1) SOME(2) SOME(3) SOME(4)
#endif

/* Of each four lanes: the first and third (`s` 0), or the second and fourth (1), of `a` and then of `b`. */
#define SOME_LANES(i, s) ((i) % 4 / 2 * LANES + (i) / 4 * 4 + (i) % 2 * 2 + (s))
#define FOLD(a, b) (SHUFFLE(a, b, EACH(SOME_LANES, 0)) + SHUFFLE(a, b, EACH(SOME_LANES, 1)))
/* `a` becomes the first four lanes of each eight, `b` the other four. */
#define FOURS(i, s) ((i) / 4 * 8 + (i) % 4 + (s))
#define PART(a, b)                                                                                                     \
    do {                                                                                                               \
        BITS first = SHUFFLE(a, b, EACH(FOURS, 0));                                                                    \
        b = SHUFFLE(a, b, EACH(FOURS, 4)), a = first;                                                                  \
    } while (0)
/* Lanes in which the first has lane 0 of each four, the next LANES / 4 have lane 1, and so on. */
#define BY_FOURS(i, s) ((i) % (LANES / 4) * 4 + (i) / (LANES / 4))
#define OTHER(i, s) ((i) ^ (s))
#define EVERY(f, stride) f(SHUFFLE(all, all, EACH(OTHER, stride)))

/* The largest of a vector's lanes, in all of them; lanes without a number do not count unless all are so. */
INLINE VECTOR NAME(largest)(VECTOR all) {
#define LARGER(other) all = NAME(larger)(all, other)
    EVERY(LARGER, 1);
    EVERY(LARGER, 2);
#if LANES > 4
    EVERY(LARGER, 4);
#endif
#if LANES > 8
    EVERY(LARGER, 8);
#endif
#undef LARGER
    return all;
}

/* Whether keys and values are multiplied as they are: pairs of bfloat16. Otherwise they become float32. */
INLINE int NAME(is_paired)(const struct attention *at) {
#ifdef DOT
    return at->dtype == BFLOAT16 && at->size % 32 == 0;
#else
    (void)at;
    return 0;
#endif
}

/* sum + a * b: of float32, or of pairs of bfloat16. */
INLINE VECTOR NAME(add_product)(VECTOR sum, BITS a, BITS b, const int is_paired) {
#ifdef DOT
    if (is_paired)
        return DOT(sum, a, b);
#endif
    return sum + (VECTOR)a * (VECTOR)b;
}

/* Numbers of the cache or of queries as float32: where they are, or put into `buffer`. */
INLINE const float *NAME(floats)(const struct attention *at, const void *from, int64_t start, int64_t count, float *buffer) {
    if (at->dtype == FLOAT32)
        return (const float *)from + start;
    for (int64_t i = 0; i < count; i += LANES)
        AT(buffer + i) = NAME(read)(from, start + i, at->dtype == FLOAT16 ? FLOAT16 : BFLOAT16); /* no branch for FLOAT32 */
    return buffer;
}

/* Turn LANES keys of `width` numbers from `start` on, so that a vector of `turned`, [4, width / 4, LANES], has the same
 * four numbers of LANES / 4 tokens, and few sums over lanes are left.
 */
INLINE void NAME(turn)(uint32_t *turned, const void *from, int64_t start, int64_t width, const enum dtype dtype, struct ahead *ahead) {
    for (int64_t k = 0; k < 4; k++, start += LANES / 4 * width)
        for (int64_t n = 0; n < width; n += LANES) {
            BITS some[LANES / 4];
            if (n % 16 == 0)
                prefetch(ahead, LANES == 16 ? 2 : 4); /* narrow vectors: all of it here, since each call takes time */
            UNROLL for (int i = 0; i < LANES / 4; i++) some[i] = (BITS)NAME(read)(from, start + i * width + n, dtype);
#if LANES > 4
            PART(some[0], some[1]);
#endif
#if LANES > 8
            PART(some[2], some[3]);
            PART(some[0], some[2]);
            PART(some[1], some[3]);
#endif
            UNROLL for (int i = 0; i < LANES / 4; i++, turned += LANES) AT(turned) = (VECTOR)some[i];
        }
}

/* The products of some queries with LANES keys. queries: [width / 4, heads, LANES], the same four in all of a vector. */
INLINE void NAME(score_some)(float *scores, const uint32_t *queries, const uint32_t *turned, int64_t width, const int heads,
                             const int is_paired, struct ahead *ahead) {
    VECTOR found[2][HEADS];
    for (int half = 0; half < 2; half++) {
        VECTOR sums[HEADS][2];
        UNROLL for (int h = 0; h < heads; h++) sums[h][0] = sums[h][1] = (VECTOR){0};
        const uint32_t *query = queries;
        const uint32_t *other = turned + width / 4 * LANES;
        for (int64_t n = 0; n < width; n += 4, turned += LANES, other += LANES) {
            if (LANES == 16)
                prefetch(ahead, 1);
            BITS first = (BITS)READ(turned), second = (BITS)READ(other);
            UNROLL for (int h = 0; h < heads; h++, query += LANES) {
                sums[h][0] = NAME(add_product)(sums[h][0], first, (BITS)READ(query), is_paired);
                sums[h][1] = NAME(add_product)(sums[h][1], second, (BITS)READ(query), is_paired);
            }
        }
        turned = other;
        UNROLL for (int h = 0; h < heads; h++) found[half][h] = FOLD(sums[h][0], sums[h][1]);
    }
    for (int h = 0; h < heads; h++) {
        VECTOR all = FOLD(found[0][h], found[1][h]);
        AT(scores + h * PIECE) = SHUFFLE(all, all, EACH(BY_FOURS, 0));
    }
}

/* [heads, width] become what `score_some` reads, for each HEADS of them. */
static TARGET void NAME(queries_for_scores)(uint32_t *to, const uint32_t *from, int64_t heads, int64_t width) {
    for (int64_t first = 0; first < heads; first += HEADS)
        for (int64_t n = 0; n < width; n += 4)
            for (int64_t h = first; h < least(first + HEADS, heads); h++)
                for (int64_t i = 0; i < LANES; i += 4, to += 4)
                    memcpy(to, from + h * width + n, 16);
}

#ifdef DOT
/* Pairs of 16 numbers of token `t` and of the next one, from number `d` on. */
INLINE BITS NAME(pairs)(const uint16_t *values, int64_t t, int64_t tokens, int64_t size, int64_t d) {
#define PLACE(i, s) (i) * 0x10001 + 0x200000
    const BITS in_turns = {EACH(PLACE, 0)};
#undef PLACE
    __m512i one = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(values + t * size + d))), other = {0};
    if (t + 1 < tokens) /* what lies behind the tokens may be no numbers */
        other = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(values + (t + 1) * size + d)));
    return (BITS)_mm512_permutex2var_epi16(one, (__m512i)in_turns, other);
}
#endif

#define WIDE(heads) (2 * HEADS / (heads) >= 8 ? 8 : 2 * HEADS / (heads) >= 4 ? 4 : 2) /* vectors at once */
/* Add weights * values to the sums, of some heads and `wide` vectors of the values' numbers from `d` on. */
INLINE void NAME(mix_some)(float *sums, const uint32_t *weights, const void *values, int64_t tokens, int64_t size, int64_t d,
                           const int heads, const int wide, const int is_paired, struct ahead *ahead) {
    VECTOR mixed[HEADS][8];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int c = 0; c < wide; c++) mixed[h][c] = READ(sums + h * size + d + c * LANES);
    for (int64_t t = 0; t < tokens; t += 1 + is_paired) {
        BITS some[8];
        if (LANES == 16)
            prefetch(ahead, wide);
        UNROLL for (int c = 0; c < wide; c++) {
#ifdef DOT
            if (is_paired) {
                some[c] = NAME(pairs)(values, t, tokens, size, d + c * LANES);
                continue;
            }
#endif
            some[c] = (BITS)READ((const float *)values + t * size + d + c * LANES);
        }
        UNROLL for (int h = 0; h < heads; h++) {
            BITS weight = (BITS){0} + weights[h * PIECE + t / (1 + is_paired)];
            UNROLL for (int c = 0; c < wide; c++)
                mixed[h][c] = NAME(add_product)(mixed[h][c], some[c], weight, is_paired);
        }
    }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int c = 0; c < wide; c++) AT(sums + h * size + d + c * LANES) = mixed[h][c];
}

/* Scores of a piece become weights e^(score - largest), in pairs of bfloat16 if `is_paired`. Where the largest
 * grew, earlier sums shrink. largest, totals: [LANES], the same in each, and sums of each.
 */
INLINE void NAME(weigh)(float *scores, int64_t tokens, float *largest, float *totals, float *sums, int64_t size,
                        const int is_paired) {
    const VECTOR lowest = (VECTOR){0} - 87;
    int64_t step = LANES * (1 + is_paired), padded = (tokens + step - 1) / step * step;
    for (int64_t t = tokens; t < padded; t++)
        scores[t] = -INFINITY;
    VECTOR before = READ(largest), most = before, sum = {0};
    for (int64_t t = 0; t < padded; t += LANES)
        most = NAME(larger)(READ(scores + t), most);
    most = NAME(largest)(most);
    for (int64_t t = 0; t < padded; t += step) {
        VECTOR score = NAME(larger)(lowest, READ(scores + t) - most); /* NaN stays */
#ifdef DOT
        if (is_paired) { /* rounded, and the total is that of these */
            VECTOR other = NAME(larger)(lowest, READ(scores + t + LANES) - most);
            BITS pairs = (BITS)_mm512_cvtne2ps_pbh((__m512)NAME(rough_power)(other), (__m512)NAME(rough_power)(score));
            AT(scores + t / 2) = (VECTOR)pairs;
            sum = DOT(sum, pairs, (BITS){0} + 0x3f803f80); /* ones */
            continue;
        }
#endif
        sum += AT(scores + t) = NAME(power)(score);
    }
    if (most[0] != before[0]) { /* seldom */
        VECTOR factor = NAME(power)(NAME(larger)(lowest, before - most));
        AT(largest) = most, AT(totals) = READ(totals) * factor;
        for (int64_t d = 0; d < size; d += LANES)
            AT(sums + d) = READ(sums + d) * factor;
    }
    AT(totals) = READ(totals) + sum;
}

struct NAME(memory) { /* of a thread */
    uint32_t *queries;                 /* see `score_some` */
    float *sums;                       /* [heads, size] */
    uint32_t *turned;                  /* see `turn` */
    float *numbers;                    /* [PIECE / 2, size] */
    float *scores, *largest, *totals;  /* [heads, PIECE]; [heads, LANES], or [heads] at the end of a part */
    float *tiles;                      /* [16, 16], [16, size] */
};

#ifdef TILES
/* Where all is bfloat16: products of up to 16 heads at once by AMX, whose tiles are 16 rows of 64 bytes. The left matrix
 * lies as it is; of the right one each two rows are interleaved, so that a pair of its numbers is 4 bytes.
 *
 * out: float32 [16, 16]. left: [16, 32 * steps], right: [16 * steps, 16 pairs]. Strides are bytes from row to row. */
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

static TARGET void NAME(piece_by_tiles)(const struct attention *at, struct NAME(memory) *of, int64_t start, int64_t tokens,
                                        int64_t next) {
    const int64_t size = at->size, padded = (tokens + 31) / 32 * 32;
    const uint16_t *keys = (const uint16_t *)at->keys + start, *values = (const uint16_t *)at->values + start;
    const int64_t bytes = 2 * PIECE * size;
    struct ahead ahead = {NULL, (const char *)at->keys + 2 * next, (const char *)at->values + 2 * next, bytes, 3 * bytes, bytes};
    const __m512i rows = _mm512_slli_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 4);
    float *products = of->tiles, *mixed = products + 16 * 16;                                  /* [16, 16], [16, size] */
    uint16_t *pairs = (uint16_t *)of->numbers;                                               /* [PIECE / 2, size] pairs */
    for (int64_t t = 0; t < padded; t += 2) {
        prefetch(&ahead, 1);
        for (int64_t d = 0; d < size; d += 16)
            AT(pairs + t * size + 2 * d) = t < tokens ? (VECTOR)NAME(pairs)(values, t, tokens, size, d) : (VECTOR){0};
    }
    for (int64_t first = 0; first < at->heads; first += 16) {
        const uint16_t *queries = (const uint16_t *)of->queries + first * size;
        int64_t heads = least(16, at->heads - first);
        float *scores = of->scores + first * PIECE, *sums = of->sums + first * size;
        for (int64_t t = 0; t < tokens; t += 16) {
            prefetch(&ahead, 8);
            NAME(multiply)(products, 64, keys + t * size, 2 * size, queries, 64, size / 32);
            for (int64_t h = 0; h < heads; h++)
                _mm512_storeu_ps(scores + h * PIECE + t, _mm512_i32gather_ps(rows, products + h, 4));
        }
        for (int64_t h = 0; h < heads; h++) {
            prefetch(&ahead, 16);
            NAME(weigh)(scores + h * PIECE, tokens, of->largest + (first + h) * LANES, of->totals + (first + h) * LANES,
                        sums + h * size, size, 1);
        }
        for (int64_t d = 0; d < size; d += 16) {
            prefetch(&ahead, 16);
            NAME(multiply)(mixed + d, 4 * size, (const uint16_t *)scores, 4 * PIECE, pairs + 2 * d, 4 * size, padded / 32);
        }
        for (int64_t d = 0; d < heads * size; d += LANES)
            AT(sums + d) = READ(sums + d) + READ(mixed + d);
    }
}

/* [heads, size] become pairs of numbers that lie side by side, [size / 2, 16 heads] for each 16 heads. */
static TARGET void NAME(queries_for_tiles)(const struct attention *at, uint16_t *queries, const uint16_t *from) {
    for (int64_t h = 0; h < at->heads; h++)
        for (int64_t d = 0; d < at->size; d += 2)
            memcpy(queries + h / 16 * 16 * at->size + d * 16 + h % 16 * 2, from + h * at->size + d, 4);
}
#endif

INLINE void NAME(piece)(const struct attention *at, struct NAME(memory) *of, int64_t start, int64_t tokens, int64_t next,
                        const int is_paired) {
    const int64_t size = at->size, width = size / (1 + is_paired);
    const int64_t number = at->dtype == FLOAT32 ? 4 : 2, bytes = PIECE * size * number;
    struct ahead ahead = {(const char *)at->keys + start * number, (const char *)at->values + start * number,
                          (const char *)at->keys + next * number, LEAD, 2 * bytes + LEAD, bytes};
#define SOME(count)                                                                                                    \
    case count:                                                                                                        \
        NAME(score_some)(scores, queries, of->turned, width, count, is_paired, &ahead);                                \
        break;
    for (int64_t t = 0; t < tokens; t += LANES) {
        if (is_paired)
            NAME(turn)(of->turned, at->keys, (start + t * size) / 2, width, FLOAT32, &ahead);
        else if (at->dtype == FLOAT32)
            NAME(turn)(of->turned, at->keys, start + t * size, width, FLOAT32, &ahead);
        else if (at->dtype == FLOAT16)
            NAME(turn)(of->turned, at->keys, start + t * size, width, FLOAT16, &ahead);
        else
            NAME(turn)(of->turned, at->keys, start + t * size, width, BFLOAT16, &ahead);
        for (int64_t h = 0; h < at->heads; h += HEADS) {
            float *scores = of->scores + h * PIECE + t;
            const uint32_t *queries = of->queries + h * width * (LANES / 4);
            switch (least(HEADS, at->heads - h)) { EACH_COUNT }
        }
    }
#undef SOME
    for (int64_t h = 0; h < at->heads; h++) {
        prefetch(&ahead, 8);
        NAME(weigh)(of->scores + h * PIECE, tokens, of->largest + h * LANES, of->totals + h * LANES, of->sums + h * size, size,
                    is_paired);
    }
#define SOME(count)                                                                                                    \
    case count:                                                                                                        \
        for (; d + WIDE(count) * LANES <= size; d += WIDE(count) * LANES)                                              \
            NAME(mix_some)(sums, weights, values, few, size, d, count, WIDE(count), is_paired, &ahead);                \
        for (; d + 2 * LANES <= size; d += 2 * LANES)                                                                  \
            NAME(mix_some)(sums, weights, values, few, size, d, count, 2, is_paired, &ahead);                          \
        if (!is_paired && d < size)                                                                                    \
            NAME(mix_some)(sums, weights, values, few, size, d, count, 1, 0, &ahead);                                  \
        break;
    for (int64_t t = 0; t < tokens; t += STEP) {
        int64_t few = least(STEP, tokens - t), from = start + t * size;
        const void *values = is_paired ? (const void *)((const uint16_t *)at->values + from)
                                       : NAME(floats)(at, at->values, from, few * size, of->numbers);
        for (int64_t h = 0; h < at->heads; h += HEADS) {
            float *sums = of->sums + h * size;
            const uint32_t *weights = (const uint32_t *)(of->scores + h * PIECE) + t / (1 + is_paired);
            int64_t d = 0;
            switch (least(HEADS, at->heads - h)) { EACH_COUNT }
        }
    }
#undef SOME
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
    const int is_paired = NAME(is_paired)(at);
    const void *queries = is_paired ? (const void *)((const uint16_t *)at->queries + first)
                                    : NAME(floats)(at, at->queries, first, numbers, of->sums);
#ifdef TILES
    if (is_paired)
        NAME(queries_for_tiles)(at, (uint16_t *)of->queries, queries);
    else
#endif
        NAME(queries_for_scores)(of->queries, queries, at->heads, size / (1 + is_paired));
    memset(of->sums, 0, numbers * sizeof(float));
    for (int64_t i = 0; i < at->heads * LANES; i++)
        of->largest[i] = -INFINITY, of->totals[i] = 0;
    int64_t t = (part - at->parts[sequence]) * at->share, end = least(at->lengths[sequence], t + at->share), next;
    for (int64_t start = start_of(at, sequence, group, t); t < end; t += PIECE, start = next) {
        int64_t tokens = least(PIECE, end - t);
        next = t + PIECE < end ? start_of(at, sequence, group, t + PIECE) : start;
#if defined(TILES)
        if (is_paired)
            NAME(piece_by_tiles)(at, of, start, tokens, next);
        else
#elif defined(DOT)
        if (is_paired)
            NAME(piece)(at, of, start, tokens, next, 1);
        else
#endif
            NAME(piece)(at, of, start, tokens, next, 0);
    }
    for (int64_t h = 0; h < at->heads; h++) {
        float total = 0;
        for (int i = 0; i < LANES; i++)
            total += of->totals[h * LANES + i];
        of->largest[h] = of->largest[h * LANES], of->totals[h] = total;
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
    int64_t numbers = heads * size, few = 16 * (16 + size);
    float *memory = aligned_alloc(64, (numbers * (LANES / 4 + 1) + (LANES + PIECE / 2) * size + heads * (PIECE + 2 * LANES) + few) * sizeof(float));
    if (memory == NULL) {
        __atomic_store_n(&at->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    struct NAME(memory) of = {.queries = (uint32_t *)memory, .sums = memory + numbers * (LANES / 4)};
    of.turned = (uint32_t *)(of.sums + numbers);
    of.numbers = of.sums + numbers + LANES * size;
    of.scores = of.numbers + PIECE / 2 * size;
    of.tiles = of.scores + heads * PIECE;
    of.largest = of.tiles + few;
    of.totals = of.largest + heads * LANES;
#ifdef TILES
    struct tile_shapes shapes = {.palette = 1, .bytes = {64, 64, 64}, .rows = {16, 16, 16}};
    if (NAME(is_paired)(at))
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
    if (NAME(is_paired)(at))
        _tile_release();
#endif
    free(memory);
}

#undef HEADS
#undef EACH_COUNT
#undef EACH4
#undef EACH
#undef SOME_LANES
#undef FOLD
#undef FOURS
#undef PART
#undef BY_FOURS
#undef OTHER
#undef EVERY
#undef WIDE
#endif
