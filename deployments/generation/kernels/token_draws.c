/* Draws tokens from rows of logits, as `text.sampling` defines it. No row is sorted.
 *
 * Tokens follow each other from the likeliest down, equal ones in the vocabulary's order. `top_k`, `top_p` and the random
 * number each ask the same: at which token does the running sum of weights reach a target? The weight of a token is 1, or
 * its share: e^((logit - largest logit) / temperature). `find` puts the logits into buckets of equal width and adds up the
 * weights of each bucket. One bucket holds the token. Its logits are put into narrower buckets, until few are left.
 *
 * Shares and sums are float64, as in numpy. A row's result does not depend on the other rows or on the threads.
 */
#include "vectors.h"

#include <float.h>

#if defined(__x86_64__) && defined(__linux__) /* one of these is chosen when the library is loaded */
#define FORMS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FORMS
#endif
#define TARGET

enum {
    WIDE = 8,       /* numbers of a vector */
    BLOCK = 512,    /* tokens whose shares are added up at once where all tokens may come */
    GROUP = 64,     /* tokens whose largest logit is kept */
    BUCKETS = 512,  /* and another one, for what is left out */
    FEW = 32,       /* so many tokens are sorted */
    LIKELY = 512,   /* so many mostly hold `top_p` of all */
    SCRATCH = 5     /* numbers per token of the vocabulary */
};

typedef float floats __attribute__((vector_size(WIDE * 4)));
typedef float loose_floats __attribute__((vector_size(WIDE * 4), aligned(4), may_alias));
typedef int32_t flags __attribute__((vector_size(WIDE * 4)));
typedef double doubles __attribute__((vector_size(WIDE * 8)));
typedef int64_t integers __attribute__((vector_size(WIDE * 8)));
typedef double loose_double __attribute__((aligned(4), may_alias)); /* in the scratch memory of int32 numbers */

struct draw {
    const float *logits; /* [vocabulary]: the token is drawn from these */
    const float *known;  /* [vocabulary]: logprobs and alternatives are those of these */
    int64_t top_k;       /* the vocabulary's size if all may come */
    int64_t named;       /* how many alternatives to report; -1: not even the token's own logprob */
    double temperature, top_p, random;
    double below;        /* the least logit that may come, less the largest, in float32; -INFINITY: all may */
    int64_t token;       /* out; -1 if the largest of `logits` or `known` is not finite */
    float *logprobs;     /* out: [1 + named], the token's and those of the alternatives */
    int32_t *ids;        /* out: [named], the alternatives, sorted */
};

struct draws {
    struct draw *each;
    int32_t *scratch; /* [threads, SCRATCH, vocabulary] */
    int64_t count, vocabulary;
    int64_t next;    /* the next draw that a thread takes; 0 at first */
    int64_t threads; /* how many have begun; 0 at first */
};

struct tokens {
    float *logits;
    int32_t *ids; /* NULL: 0, 1, 2, ... */
    int64_t count;
    float high, low; /* the largest logit, and the least */
};

struct weight { /* 1 if `counts`, else the share; logits below `cut` are left out */
    double largest, per_logit;
    float cut;
    int counts;
};

struct buckets { /* of `1 / per_logit` each, from `high` down */
    double high, per_logit, sums[BUCKETS];
};

struct place { /* a token, and the sum of weights up to it */
    float logit;
    int32_t id;
    double upto;
};

struct scratch {
    struct tokens list, kept; /* with ids; each has room for the vocabulary */
    float *tops;              /* the largest logit of each GROUP of the row that is looked at */
};

/* e^x for x <= 0, and 0 below the smallest normal numbers: 2^n times a polynomial of the rest */
INLINE doubles power_of(doubles x) {
    const double round = 0x1.8p52; /* the last bits of a number that it is added to are an integer's */
    integers is_zero = x < -708.0;
    x = (doubles)((integers)x & ~is_zero);
    doubles shifted = x * 1.4426950408889634 + round, n = shifted - round;
    doubles r = x - n * 0x1.62e42fefa3800p-1 - n * 0x1.ef35793c76730p-45;
    doubles y = r * (1 / 479001600.0) + 1 / 39916800.0;
    y = y * r + 1 / 3628800.0;
    y = y * r + 1 / 362880.0;
    y = y * r + 1 / 40320.0;
    y = y * r + 1 / 5040.0;
    y = y * r + 1 / 720.0;
    y = y * r + 1 / 120.0;
    y = y * r + 1 / 24.0;
    y = y * r + 1 / 6.0;
    y = y * r + 0.5;
    y = y * r * r + r + 1;
    return (doubles)(((integers)y + ((integers)shifted << 52)) & ~is_zero);
}

/* WIDE logits; `past` past the end */
INLINE floats some(const struct tokens *of, int64_t from, float past) {
    if (from + WIDE <= of->count)
        return *(const loose_floats *)(of->logits + from);
    floats found = (floats){0} + past;
    for (int64_t i = from; i < of->count; i++)
        found[i - from] = of->logits[i];
    return found;
}

INLINE doubles weights(const struct weight *weight, floats logits) {
    if (weight->counts)
        return (doubles){0} + 1;
    integers is_left = __builtin_convertvector((flags)(logits >= weight->cut), integers);
    doubles shares = power_of((__builtin_convertvector(logits, doubles) - weight->largest) * weight->per_logit);
    return (doubles)((integers)shares & is_left);
}

INLINE integers numbers_of(const struct buckets *buckets, float cut, floats logits) {
    doubles number = (buckets->high - __builtin_convertvector(logits, doubles)) * buckets->per_logit;
    integers is_near = number < (double)(BUCKETS - 1);
    integers rounded = (integers)(number + 0x1p52) & 0xffffffff;
    rounded = (rounded & is_near) | ((BUCKETS - 1) & ~is_near);
    integers is_cut = __builtin_convertvector((flags)(logits < cut), integers);
    return rounded | (BUCKETS & is_cut);
}

/* Finds the largest and the least logit. Returns 0 if one is NaN, or none is finite, or one INFINITY. `tops`, unless NULL: the
 * largest of each GROUP. */
INLINE int look(struct tokens *of, float *tops) {
    floats smallest = (floats){0} + INFINITY;
    flags bad = {0};
    of->high = -INFINITY, of->low = INFINITY;
    for (int64_t start = 0; start < of->count; start += GROUP) {
        floats largest = (floats){0} - INFINITY;
        for (int64_t from = start; from < least(start + GROUP, of->count); from += WIDE) {
            floats logits = some(of, from, of->logits[from]);
            flags is_larger = logits > largest, is_smaller = logits < smallest;
            largest = (floats)(((flags)logits & is_larger) | ((flags)largest & ~is_larger));
            smallest = (floats)(((flags)logits & is_smaller) | ((flags)smallest & ~is_smaller));
            bad |= ~(logits < INFINITY);
        }
        float top = -INFINITY;
        for (int i = 0; i < WIDE; i++)
            top = largest[i] > top ? largest[i] : top;
        of->high = top > of->high ? top : of->high;
        if (tops != NULL)
            tops[start / GROUP] = top;
    }
    int any = 0;
    for (int i = 0; i < WIDE; i++) {
        of->low = smallest[i] < of->low ? smallest[i] : of->low;
        any |= bad[i];
    }
    return !any && of->high > -INFINITY;
}

/* The weights of buckets that reach from the largest logit to the least, or `most` below. A logit of -INFINITY is in the
 * last one. */
INLINE void fill(struct buckets *buckets, const struct tokens *of, const struct weight *weight, double most) {
    enum { APART = 2 }; /* sums of a bucket, so that one addition need not wait for the one before */
    double sums[APART][2 * BUCKETS] = {{0}};
    double range = fmin((double)of->high - of->low, most);
    buckets->high = of->high;
    buckets->per_logit = BUCKETS / (range > 0 ? range : 1);
    for (int64_t from = 0; from < of->count; from += WIDE) {
        floats logits = some(of, from, -INFINITY);
        doubles each = weights(weight, logits);
        integers numbers = numbers_of(buckets, weight->cut, logits);
        for (int i = 0, count = least(WIDE, of->count - from); i < count; i++)
            sums[i % APART][numbers[i] & (2 * BUCKETS - 1)] += each[i];
    }
    for (int i = 0; i < BUCKETS; i++)
        buckets->sums[i] = sums[0][i] + sums[1][i];
}

INLINE int32_t id_at(const struct tokens *of, int64_t place) { return of->ids == NULL ? place : of->ids[place]; }

/* Adds a token. `of`, from which it is, may be `to`. */
INLINE void add(struct tokens *to, const struct tokens *of, int64_t place) {
    int32_t id = id_at(of, place);
    to->logits[to->count] = of->logits[place];
    to->ids[to->count++] = id;
}

/* The tokens of one bucket, in their order. `to` may be `of`. */
INLINE void collect(struct tokens *to, const struct tokens *of, const struct buckets *buckets, float cut,
                    int64_t bucket) {
    struct tokens all = *of;
    to->count = 0;
    for (int64_t from = 0; from < all.count; from += WIDE) {
        integers is_here = numbers_of(buckets, cut, some(&all, from, -INFINITY)) == bucket;
        int64_t any = 0;
        for (int i = 0; i < WIDE; i++)
            any |= is_here[i];
        for (int i = 0, count = any ? least(WIDE, all.count - from) : 0; i < count; i++)
            if (is_here[i])
                add(to, &all, from + i);
    }
}

/* Whether a token comes no later than `last` */
INLINE int is_upto(float logit, int32_t id, struct place last) {
    return logit > last.logit || (logit == last.logit && id <= last.id);
}

/* The tokens up to `last`, in their order. `to` may be `of`. */
INLINE void take(struct tokens *to, const struct tokens *of, struct place last) {
    struct tokens all = *of;
    to->count = 0;
    for (int64_t from = 0; from < all.count; from += WIDE) {
        flags is_here = some(&all, from, -INFINITY) >= last.logit;
        int32_t any = 0;
        for (int i = 0; i < WIDE; i++)
            any |= is_here[i];
        for (int i = 0, count = any ? least(WIDE, all.count - from) : 0; i < count; i++)
            if (is_upto(all.logits[from + i], id_at(&all, from + i), last))
                add(to, &all, from + i);
    }
}

/* Sorts a few, the largest first; equal ones stay in their order */
INLINE void sort(struct tokens *of) {
    for (int64_t i = 1; i < of->count; i++) {
        float logit = of->logits[i];
        int32_t id = of->ids[i];
        int64_t at = i;
        for (; at > 0 && of->logits[at - 1] < logit; at--)
            of->logits[at] = of->logits[at - 1], of->ids[at] = of->ids[at - 1];
        of->logits[at] = logit, of->ids[at] = id;
    }
}

/* The first token, from the largest down, at which the sum of weights reaches `target`, or the last with a weight.
 * `buckets`: of `from`. Uses `list`. */
INLINE struct place find(const struct tokens *from, const struct weight *weight, const struct buckets *buckets,
                         double target, struct tokens *list) {
    struct buckets finer;
    struct place found = {0};
    double above = 0, own = 0;
    for (;;) {
        int64_t bucket = 0;
        double upto = above;
        for (int64_t i = 0; i < BUCKETS && upto < target; i++)
            if (buckets->sums[i] > 0) {
                bucket = i, above = upto;
                upto += buckets->sums[i];
            }
        collect(list, from, buckets, weight->cut, bucket);
        look(list, NULL);
        if (list->count <= FEW || list->high == list->low)
            break;
        fill(&finer, list, weight, INFINITY);
        buckets = &finer, from = list;
    }
    if (list->count <= FEW)
        sort(list);
    for (int64_t i = 0; i < list->count && !(found.upto >= target); i++) {
        if (i == 0 || list->logits[i] != list->logits[i - 1])
            own = weights(weight, (floats){0} + list->logits[i])[0];
        if (own > 0) {
            above += own;
            found = (struct place){list->logits[i], list->ids[i], above};
        }
    }
    return found;
}

/* The `count`-th largest, or the least that is not below `cut` */
INLINE struct place find_largest(const struct tokens *of, int64_t count, float cut, struct tokens *list) {
    struct weight one = {.cut = cut, .counts = 1};
    struct buckets buckets;
    fill(&buckets, of, &one, INFINITY);
    return find(of, &one, &buckets, count, list);
}

/* Takes the `count` largest of a row and some more, in their order, into `kept`: they are no less than as many groups'
 * largest. */
INLINE void take_likely(const struct tokens *row, int64_t count, float cut, struct scratch *scratch) {
    struct tokens tops = {scratch->tops, NULL, (row->count + GROUP - 1) / GROUP, 0, 0};
    look(&tops, NULL);
    struct place last = find_largest(&tops, count, cut, &scratch->list);
    take(&scratch->kept, row, (struct place){last.logit, INT32_MAX, 0});
    look(&scratch->kept, NULL);
}

/* Takes the `count` largest of a row that are not below `cut`, in their order, into `kept`. */
INLINE void take_largest(const struct tokens *of, int64_t count, float cut, struct scratch *scratch) {
    if (count < of->count / GROUP) {
        take_likely(of, count, cut, scratch);
        of = &scratch->kept;
    }
    take(&scratch->kept, of, find_largest(of, count, cut, &scratch->list));
    look(&scratch->kept, NULL);
}

/* The sum of shares, and those of each BLOCK unless `blocks` is NULL */
INLINE double sum_of(const struct tokens *of, const struct weight *weight, loose_double *blocks) {
    double total = 0;
    for (int64_t start = 0; start < of->count; start += BLOCK) {
        doubles sums = {0};
        double sum = 0;
        for (int64_t from = start; from < least(start + BLOCK, of->count); from += WIDE)
            sums += weights(weight, some(of, from, -INFINITY));
        for (int i = 0; i < WIDE; i++)
            sum += sums[i];
        if (blocks != NULL)
            blocks[start / BLOCK] = sum;
        total += sum;
    }
    return total;
}

/* Where all tokens may come, they follow each other as in the vocabulary. */
INLINE int64_t drawn_of_all(const struct tokens *of, const struct weight *weight, double random, loose_double *blocks) {
    double target = random * sum_of(of, weight, blocks), sum = 0;
    int64_t start = 0, found = 0;
    while (start + BLOCK < of->count && sum + blocks[start / BLOCK] <= target)
        sum += blocks[start / BLOCK], start += BLOCK;
    for (int64_t from = start; from < of->count && sum <= target; from += WIDE) {
        doubles shares = weights(weight, some(of, from, -INFINITY));
        for (int i = 0; i < WIDE && sum <= target; i++)
            if (shares[i] > 0)
                sum += shares[i], found = from + i;
    }
    return found;
}

INLINE int64_t drawn(const struct draw *draw, const struct tokens *of, struct scratch *scratch) {
    struct tokens *list = &scratch->list;
    if (draw->temperature == 0) {
        int64_t at = 0;
        while (scratch->tops[at / GROUP] != of->high)
            at += GROUP;
        while (of->logits[at] != of->high)
            at++;
        return at;
    }
    float cut = fmaxf(of->high + (float)fmax(draw->below, -FLT_MAX), -FLT_MAX);
    struct weight share = {of->high, fmin(1 / draw->temperature, 0x1p1000), cut, 0};
    if (draw->top_k == of->count && draw->top_p >= 1)
        return drawn_of_all(of, &share, draw->random, (loose_double *)list->ids);
    double total = 0;
    if (draw->top_k < of->count) {
        take_largest(of, draw->top_k, cut, scratch);
        of = &scratch->kept;
        total = sum_of(of, &share, NULL);
    } else {
        total = sum_of(of, &share, NULL);
        take_likely(of, LIKELY, cut, scratch);
        if (sum_of(&scratch->kept, &share, NULL) >= draw->top_p * total)
            of = &scratch->kept;
    }
    struct buckets buckets;
    fill(&buckets, of, &share, fmax(24 * draw->temperature, 1e-290));
    struct place last = {.upto = total};
    if (draw->top_p < 1)
        last = find(of, &share, &buckets, draw->top_p * total, list);
    struct place found = find(of, &share, &buckets, nextafter(draw->random * last.upto, INFINITY), list);
    return draw->top_p < 1 && !is_upto(found.logit, found.id, last) ? last.id : found.id;
}

/* The logprob of the token, the likeliest tokens and theirs, at a temperature of 1. */
INLINE void name(const struct draw *draw, const struct tokens *of, struct scratch *scratch) {
    struct weight share = {of->high, 1, -INFINITY, 0};
    float all = log(sum_of(of, &share, NULL));
    draw->logprobs[0] = of->logits[draw->token] - of->high - all;
    if (draw->named == 0)
        return;
    take_largest(of, draw->named, -INFINITY, scratch);
    sort(&scratch->kept);
    for (int64_t i = 0; i < scratch->kept.count; i++) {
        draw->ids[i] = scratch->kept.ids[i];
        draw->logprobs[1 + i] = scratch->kept.logits[i] - of->high - all;
    }
}

/* Until no draw is left. Any number of threads may do so at once, on the same struct. */
FORMS void token_draws_draw(struct draws *at) {
    int64_t next, size = at->vocabulary;
    int32_t *own = at->scratch + SCRATCH * size * __atomic_fetch_add(&at->threads, 1, __ATOMIC_RELAXED);
    struct scratch scratch = {
        {(float *)(own + size), own, 0, 0, 0},
        {(float *)(own + 2 * size), own + 3 * size, 0, 0, 0},
        (float *)(own + 4 * size),
    };
    while ((next = __atomic_fetch_add(&at->next, 1, __ATOMIC_RELAXED)) < at->count) {
        struct draw *draw = at->each + next;
        struct tokens logits = {(float *)draw->logits, NULL, size, 0, 0}, known = {(float *)draw->known, NULL, size, 0, 0};
        draw->token = -1;
        if ((draw->known != draw->logits && !look(&known, NULL)) || !look(&logits, scratch.tops))
            continue;
        draw->token = drawn(draw, &logits, &scratch);
        if (draw->named >= 0) {
            look(&known, scratch.tops);
            name(draw, &known, &scratch);
        }
    }
}
