/* Attention of chunks of prompts to keys and values in a cache of blocks, each token up to itself: by tiles of tokens and
 * pieces of keys, with the softmax as it goes (see decode_attention.c), so that memory does not grow with the length.
 *
 * A row is a query of a tile: one token and one of the heads that share keys. Rows are the columns of all matrices here,
 * in panels of COLUMNS: products multiply keys by queries, and then values by weights.
 */
#include "vectors.h"
#ifndef FORM

enum { PIECE = 128, ABOUT = 4 }; /* keys at once; numbers that say which tile it is */

struct prompts {
    const void *queries;       /* [tokens, heads, size], a token `query_stride` numbers after the one before */
    const void *keys, *values; /* [blocks, groups, block_size, size] */
    void *mixed;               /* out: [tokens, heads, size] */
    const int64_t *tiles;      /* [count, ABOUT]: first token, tokens, the first's position in its text, row of `tables` */
    const int64_t *tables;     /* [texts, table_stride]: their blocks */
    int64_t query_stride, table_stride, count, groups, heads, size; /* heads: of one group */
    int64_t block_size;        /* tokens of a block: a multiple of PIECE */
    int64_t dtype;             /* of all numbers */
    int64_t most;              /* tokens of the largest tile */
    int64_t next;              /* the next pair of tile and group that a thread takes; 0 at first */
    int64_t failed;            /* no memory */
};

#define AT_BITS(where) (*(NAME(loose_bits) *)(where))

#define SELF "prompt_attention.c"
#include "multiply.h"

const char *prompt_attention_forms(void) { return forms(); }

#else /* one form */

#include "multiply.h"

#ifdef DOT /* all is bfloat16, and products take it as it is; other forms convert to float32 */
#define PAIRS
#define NUMBER 2 /* bytes */
#define DTYPE BFLOAT16
#define WIDTH(tokens) padded(tokens)
#else
#define NUMBER 4
#define DTYPE FLOAT32
#define WIDTH(tokens) (tokens)
#endif
#ifdef TILES
#define VALUE_STRIDE PIECE /* values are [size, PIECE] */
#define WHOLE(rows) ROWS
#else
#define VALUE_STRIDE (NUMBER == 2 ? 2 : 1) /* values are [PIECE, size], or pairs [PIECE / 2, size, 2] */
#define WHOLE(rows) (rows)
#endif

struct NAME(tile) { /* what a thread computes with; [panels, ...] */
    float *queries;          /* [size, COLUMNS], packed as factors.weights */
    float *sums;             /* [size, COLUMNS] */
    float *largest, *totals; /* [COLUMNS] */
    uint32_t *seen;          /* [COLUMNS]: how many keys each row sees */
    float *scores;           /* of one panel: [PIECE, COLUMNS], then the weights, packed in the same place */
    float *mixed;            /* [ROWS, COLUMNS] */
    float *keys, *values;    /* [PIECE, size]: of one piece, converted */
};

/* Scores of `tokens` keys from position `start` on become weights e^(score - largest). factors: what earlier sums are
 * multiplied by.
 */
static TARGET void NAME(weigh)(float *scores, int64_t tokens, int64_t start, int is_masked, const uint32_t *seen,
                               float *largest, float *totals, float *factors) {
    const VECTOR lowest = (VECTOR){0} - 87;
    for (int v = 0; v < COLUMNS; v += LANES) {
        VECTOR before = READ(largest + v), most = before, sum = {0};
        BITS sees = AT_BITS(seen + v);
        for (int64_t t = 0; t < tokens; t++) {
            VECTOR score = READ(scores + t * COLUMNS + v);
            if (is_masked)
                AT(scores + t * COLUMNS + v) = score =
                    (VECTOR)NAME(pick)((BITS)(sees > (uint32_t)(start + t)), (BITS)score, (BITS)((VECTOR){0} - INFINITY));
            most = NAME(larger)(score, most);
        }
        for (int64_t t = 0; t < tokens; t++) {
            VECTOR score = NAME(larger)(lowest, READ(scores + t * COLUMNS + v) - most);
#ifdef PAIRS
            BITS weight = (BITS)NAME(rough_power)(score);
            weight = (weight + 0x7fff + ((weight >> 16) & 1)) & 0xffff0000; /* rounded, and the total is that of these */
#else
            BITS weight = (BITS)NAME(power)(score);
#endif
            sum += AT(scores + t * COLUMNS + v) = (VECTOR)weight;
        }
#ifdef PAIRS
        for (int64_t t = 0; t < padded(tokens); t += 2) {
            BITS one = {0}, other = {0}; /* behind the tokens */
            if (t < tokens)
                one = (BITS)READ(scores + t * COLUMNS + v) >> 16;
            if (t + 1 < tokens)
                other = (BITS)READ(scores + (t + 1) * COLUMNS + v);
            AT_BITS(scores + t / 2 * COLUMNS + v) = one | other;
        }
#endif
        VECTOR factor = NAME(power)(NAME(larger)(lowest, before - most));
        AT(factors + v) = factor;
        AT(largest + v) = most;
        AT(totals + v) = READ(totals + v) * factor + sum;
    }
}

/* The keys and values of a piece as products take them. */
INLINE void NAME(prepare)(const struct prompts *at, const struct NAME(tile) *of, int64_t start, int64_t tokens,
                          struct factors *keys, struct factors *values) {
    const int64_t size = at->size;
#ifdef PAIRS
    keys->x = (const uint16_t *)at->keys + start;
    const uint16_t *from = (const uint16_t *)at->values + start;
    values->x = of->values; /* pairs of tokens: [padded / 2, size, 2] */
    for (int64_t t = 0; t < padded(tokens); t += 2, from += 2 * size)
        for (int64_t d = 0; d < size; d += LANES) {
            BITS one = {0}, other = {0}; /* what lies behind the tokens may be no numbers */
            if (t < tokens)
                one = __builtin_convertvector(*(const NAME(halves) *)(from + d), BITS);
            if (t + 1 < tokens)
                other = __builtin_convertvector(*(const NAME(halves) *)(from + size + d), BITS);
            one |= other << 16;
#ifdef TILES /* [size, PIECE] */
            const __m512i places = _mm512_mullo_epi32(_mm512_set1_epi32(PIECE / 2), _mm512_set_epi32(15, 14, 13, 12, 11,
                                                      10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
            _mm512_i32scatter_epi32((uint32_t *)of->values + (d * PIECE + t) / 2, places, (__m512i)one, 4);
#else
            AT_BITS((uint32_t *)of->values + t / 2 * size + d) = one;
#endif
        }
#else
    keys->x = (const float *)at->keys + start, values->x = (const float *)at->values + start;
    if (at->dtype == FLOAT32)
        return;
    for (int64_t i = 0; i < tokens * size; i += LANES) {
        AT(of->keys + i) = NAME(read)(at->keys, start + i, at->dtype == FLOAT16 ? FLOAT16 : BFLOAT16);
        AT(of->values + i) = NAME(read)(at->values, start + i, at->dtype == FLOAT16 ? FLOAT16 : BFLOAT16);
    }
    keys->x = of->keys, values->x = of->values;
#endif
}

/* Put a tile's queries into panels. Behind its rows are zeros, which see one key. */
static TARGET void NAME(pack)(const struct prompts *at, const struct NAME(tile) *of, const int64_t *about, int64_t group) {
    const int64_t size = at->size, rows = about[1] * at->heads;
    for (int64_t row = 0; row < padded(rows); row++) {
        int64_t token = row / at->heads, to = row / COLUMNS * COLUMNS * size + row % COLUMNS;
        int64_t from = (about[0] + token) * at->query_stride + (group * at->heads + row % at->heads) * size;
        of->seen[row] = row < rows ? (uint32_t)(about[2] + token + 1) : 1;
        of->largest[row] = -INFINITY, of->totals[row] = 0;
#ifdef PAIRS
        for (int64_t d = 0; d < size; d += 2) {
            uint32_t pair = 0;
            if (row < rows)
                memcpy(&pair, (const uint16_t *)at->queries + from + d, sizeof pair);
            ((uint32_t *)of->queries)[to + d / 2 * COLUMNS] = pair;
        }
#else
        for (int64_t d = 0; d < size; d += LANES) {
            VECTOR some = row < rows ? NAME(read)(at->queries, from + d, at->dtype) : (VECTOR){0};
            for (int i = 0; i < LANES; i++)
                of->queries[to + (d + i) * COLUMNS] = some[i];
        }
#endif
    }
}

/* One panel and one piece, whose first key is that of position `t`. `tokens`: how many keys its last row sees. */
INLINE void NAME(panel)(const struct prompts *at, const struct NAME(tile) *of, int64_t first, int64_t t, int64_t tokens,
                        struct factors keys, struct factors values) {
    float factors[COLUMNS] __attribute__((aligned(64))), *sums = of->sums + first * at->size;
    keys.weights = of->queries + first * at->size, values.weights = of->scores;
    for (int64_t row = 0; row < tokens; row += ROWS, keys.x = (const char *)keys.x + ROWS * keys.x_stride * NUMBER)
        NAME(multiply)(&keys, WHOLE(least(ROWS, tokens - row)), of->scores + row * COLUMNS);
    NAME(weigh)(of->scores, tokens, t, of->seen[first] < t + tokens, of->seen + first, of->largest + first,
                of->totals + first, factors);
    values.width = WIDTH(tokens);
    for (int64_t d = 0; d < at->size; d += ROWS, values.x = (const char *)values.x + ROWS * values.x_stride * NUMBER) {
        int64_t rows = least(ROWS, at->size - d);
        NAME(multiply)(&values, rows, of->mixed);
        for (int64_t r = 0; r < rows; r++)
            for (int v = 0; v < COLUMNS; v += LANES)
                AT(sums + (d + r) * COLUMNS + v) =
                    READ(sums + (d + r) * COLUMNS + v) * READ(factors + v) + READ(of->mixed + r * COLUMNS + v);
    }
}

static TARGET void NAME(attend)(const struct prompts *at, const struct NAME(tile) *of, const int64_t *about, int64_t group) {
    const int64_t size = at->size, rows = about[1] * at->heads, end = about[2] + about[1];
    NAME(pack)(at, of, about, group);
    memset(of->sums, 0, padded(rows) * size * sizeof(float));
    for (int64_t t = 0; t < end; t += PIECE) {
        int64_t tokens = least(PIECE, end - t), block = at->tables[about[3] * at->table_stride + t / at->block_size];
        struct factors keys = {.width = size, .dtype = DTYPE, .x_stride = size, .x_step = NUMBER == 2 ? 2 : 1};
        struct factors values = {.dtype = DTYPE, .x_stride = VALUE_STRIDE, .x_step = NUMBER == 2 ? 2 * size : size};
        NAME(prepare)(at, of, ((block * at->groups + group) * at->block_size + t % at->block_size) * size, tokens, &keys,
                      &values);
        for (int64_t first = 0; first < rows; first += COLUMNS) {
            int64_t sees = of->seen[least(first + COLUMNS, rows) - 1] - t;
            if (sees > 0)
                NAME(panel)(at, of, first, t, least(tokens, sees), keys, values);
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        const float *sums = of->sums + row / COLUMNS * COLUMNS * size + row % COLUMNS;
        int64_t to = ((about[0] + row / at->heads) * at->groups + group) * at->heads * size + row % at->heads * size;
        for (int64_t d = 0; d < size; d += LANES) {
            VECTOR some;
            for (int i = 0; i < LANES; i++)
                some[i] = sums[(d + i) * COLUMNS];
            NAME(write)(at->mixed, to + d, some / of->totals[row], at->dtype);
        }
    }
}

/* Compute pairs of tile and group until none is left. Any number of threads may do so at once, on the same struct. */
TARGET void NAME(prompt_attention)(struct prompts *at) {
    int64_t size = at->size, rows = padded(at->most * at->heads);
    float *memory = aligned_alloc(64, (2 * rows * size + 3 * rows + (PIECE + ROWS) * COLUMNS + 2 * PIECE * size) * sizeof(float));
    if (memory == NULL) {
        __atomic_store_n(&at->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    struct NAME(tile) of = {.queries = memory, .sums = memory + rows * size, .largest = memory + 2 * rows * size};
    of.totals = of.largest + rows;
    of.seen = (uint32_t *)(of.totals + rows);
    of.scores = of.totals + 2 * rows;
    of.mixed = of.scores + PIECE * COLUMNS;
    of.keys = of.mixed + ROWS * COLUMNS;
    of.values = of.keys + PIECE * size;
#ifdef TILES
    NAME(configure)(TILE, TILE);
#endif
    int64_t pair;
    while ((pair = __atomic_fetch_add(&at->next, 1, __ATOMIC_RELAXED)) < at->count * at->groups)
        NAME(attend)(at, &of, at->tiles + pair / at->groups * ABOUT, pair % at->groups);
#ifdef TILES
    _tile_release();
#endif
    free(memory);
}

#undef PAIRS
#undef NUMBER
#undef DTYPE
#undef VALUE_STRIDE
#undef WHOLE
#undef WIDTH
#undef VECTORS
#endif
