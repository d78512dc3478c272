/* The stages of a segment for AVX-512 (F, BW, DQ, VL, VBMI): see ternary_adamw.c for the stages and README.md for the
 * equations.
 *
 * The ceiling is the number of instructions, beside the divider. Hence the moments of one block and the update of
 * another run in one loop, so that division overlaps with everything else. A code is looked up, not computed: tables
 * give two digits of both moments at once, and a permutation of the three candidates (-b, 0, b for the momentum; 1/4,
 * 1, 4 for the second moment) turns digits into values. A fused multiply-add stands only where product or sum is exact
 * (noted there), so that its one rounding is the one of README.md. */

#define STAGES "avx512"

#include <immintrin.h>

typedef __m512 F;
typedef __m512i I;

INLINE F set(float x) { return _mm512_set1_ps(x); }
INLINE I set_int(uint32_t x) { return _mm512_set1_epi32((int)x); }
INLINE F as_float(I x) { return _mm512_castsi512_ps(x); }
INLINE I as_int(F x) { return _mm512_castps_si512(x); }

INLINE Doubles widen(const float *x) { return (Doubles)_mm512_cvtps_pd(_mm256_loadu_ps(x)); }
/* The product of two single-precision numbers is exact in double, so the fused form rounds as sum + x * x does. */
INLINE Doubles add_square(Doubles sum, Doubles x) {
    return (Doubles)_mm512_fmadd_pd((__m512d)x, (__m512d)x, (__m512d)sum);
}

/* Digit p of a code byte; two of them in the nibbles of a table entry. */
#define DIGIT(b, power) (((((b) * (power)) & 255) * 3) >> 8)
#define PAIR(b, first, second) (DIGIT(b, first) | DIGIT(b, second) << 4)
#define FOUR(entry, b, x, y) entry(b, x, y), entry((b) + 1, x, y), entry((b) + 2, x, y), entry((b) + 3, x, y)
#define SIXTEEN(entry, b, x, y) \
    FOUR(entry, b, x, y), FOUR(entry, (b) + 4, x, y), FOUR(entry, (b) + 8, x, y), FOUR(entry, (b) + 12, x, y)
#define SIXTYFOUR(entry, b, x, y)                                                            \
    SIXTEEN(entry, b, x, y), SIXTEEN(entry, (b) + 16, x, y), SIXTEEN(entry, (b) + 32, x, y), \
        SIXTEEN(entry, (b) + 48, x, y)
#define ALL(entry, x, y) \
    SIXTYFOUR(entry, 0, x, y), SIXTYFOUR(entry, 64, x, y), SIXTYFOUR(entry, 128, x, y), SIXTYFOUR(entry, 192, x, y)
#define SINGLE(b, power, unused) DIGIT(b, power)

static const _Alignas(64) uint8_t digits_01[256] = {ALL(PAIR, 1, 3)};
static const _Alignas(64) uint8_t digits_23[256] = {ALL(PAIR, 9, 27)};
static const _Alignas(64) uint8_t digits_4[256] = {ALL(SINGLE, 81, 0)};

static const uint32_t digit_weight[PLANES] = {81, 27, 9, 3, 1};
static const float plane_weight[PLANES] = {81, 27, 9, 3, 1};
#define LANES_FROM(e) \
    e, e + 1, e + 2, e + 3, e + 4, e + 5, e + 6, e + 7, e + 8, e + 9, e + 10, e + 11, e + 12, e + 13, e + 14, e + 15
static const _Alignas(64) uint32_t element[BLOCK] = {LANES_FROM(0),   LANES_FROM(16), LANES_FROM(32), LANES_FROM(48),
                                                     LANES_FROM(64),  LANES_FROM(80), LANES_FROM(96), LANES_FROM(112),
                                                     LANES_FROM(128), LANES_FROM(144)};

/* 64 bytes, 32 of each moment, through a table of 256; the second moment's digits go two bits above the first's. */
INLINE __m256i look_up(const uint8_t table[256], I bytes, __mmask64 upper) {
    I low = _mm512_permutex2var_epi8(_mm512_load_si512(table), bytes, _mm512_load_si512(table + 64));
    I high = _mm512_permutex2var_epi8(_mm512_load_si512(table + 128), bytes, _mm512_load_si512(table + 192));
    I found = _mm512_mask_mov_epi8(low, upper, high);
    return _mm256_or_si256(_mm512_castsi512_si256(found), _mm256_slli_epi16(_mm512_extracti64x4_epi64(found, 1), 2));
}

INLINE __mmask32 first_lanes(int count) { return (__mmask32)((1ull << count) - 1); }

/* codes[0][e], low nibble: digit of the first moment | digit of the second << 2; the high nibble is of no use. Planes
 * are written in order, so that what a narrow plane writes beyond itself is overwritten by the next one. */
INLINE void decode(Segment *x) {
    for (int block = 0; block < x->blocks; block++) {
        const int w = plane_of(x, block);
        uint8_t *to = x->codes[0] + block * BLOCK;
        __mmask32 lanes = first_lanes(w);
        __m256i m = _mm256_maskz_loadu_epi8(lanes, x->m_codes + block * PLANE),
                v = _mm256_maskz_loadu_epi8(lanes, x->v_codes + block * PLANE);
        I bytes = _mm512_inserti64x4(_mm512_castsi256_si512(m), v, 1);
        __mmask64 upper = _mm512_movepi8_mask(bytes);
        __m256i d01 = look_up(digits_01, bytes, upper), d23 = look_up(digits_23, bytes, upper),
                d4 = look_up(digits_4, bytes, upper);
        _mm256_storeu_si256((void *)to, d01);
        _mm256_storeu_si256((void *)(to + w), _mm256_srli_epi16(d01, 4));
        _mm256_storeu_si256((void *)(to + 2 * w), d23);
        _mm256_storeu_si256((void *)(to + 3 * w), _mm256_srli_epi16(d23, 4));
        _mm256_storeu_si256((void *)(to + 4 * w), d4);
    }
}

/* Base-3 numbers of 16 lanes -> code bytes. */
INLINE __m128i code_bytes(I n) {
    I scaled = _mm512_add_epi32(_mm512_slli_epi32(n, 8), set_int(242));
    return _mm512_cvtepi32_epi8(_mm512_srli_epi32(_mm512_mullo_epi32(scaled, set_int(17261)), 22));
}

/* The same for 32 lanes of bytes. */
INLINE __m256i code_bytes_32(__m256i n) {
    I scaled = _mm512_add_epi16(_mm512_slli_epi16(_mm512_cvtepu8_epi16(n), 8), _mm512_set1_epi16(242));
    return _mm512_cvtepi16_epi8(_mm512_srli_epi16(_mm512_mulhi_epu16(scaled, _mm512_set1_epi16(17261)), 6));
}

/* The last five steps of the tree, from 32 lanes on. */
INLINE float tree(F low, F high) {
    F s = _mm512_add_ps(low, high);
    __m256 t = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

/* ---- moments ---- */

typedef struct {
    F code, level, a, a_inv, one_minus_beta1, one_minus_beta2, inv_bias2, eps;
} MomentConstants;

INLINE MomentConstants moment_constants(const Segment *x, const StepScalars *s) {
    const F code = _mm512_setr_ps(-1, 0, 1, 0, -1, 0, 1, 0, -1, 0, 1, 0, -1, 0, 1, 0);
    const F level = _mm512_setr_ps(.25f, .25f, .25f, .25f, 1, 1, 1, 1, 4, 4, 4, 4, 0, 0, 0, 0);
    return (MomentConstants){
        .code = code,
        .level = level,
        .a = set(x->a),
        .a_inv = set(x->a_inv),
        .one_minus_beta1 =
            set(s->maximize ? -s->one_minus_beta1 : s->one_minus_beta1), /* the sign of g matters nowhere else */
        .one_minus_beta2 = set(s->one_minus_beta2),
        .inv_bias2 = set(s->inv_bias2),
        .eps = set(s->eps),
    };
}

/* Moments of elements [e, e + 16), group i of their block. `q`: beta1 times the block's three possible momenta;
 * `key`: row key + the block's first column. Returns |m|, sets the lanes whose exponent d becomes +1 and -1. */
INLINE F moments_of_group(Segment *x, const MomentConstants *k, F q, I key, int e, int i, int keep_hash,
                          __mmask16 *up, __mmask16 *down) {
    prefetch_grad(x, e);
    F g = _mm512_loadu_ps(x->g + e), c = _mm512_loadu_ps(x->c + e), c_inv = _mm512_loadu_ps(x->c_inv + e);
    I digits = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(x->codes[0] + e)));
    F m = _mm512_add_ps(_mm512_permutexvar_ps(digits, q), _mm512_mul_ps(g, k->one_minus_beta1));
    F base = _mm512_mul_ps(_mm512_mul_ps(k->a, c), _mm512_permutexvar_ps(digits, k->level));
    F v = _mm512_add_ps(base, _mm512_mul_ps(_mm512_mul_ps(g, g), k->one_minus_beta2));
    F excess = _mm512_sub_ps(_mm512_mul_ps(v, _mm512_mul_ps(k->a_inv, c_inv)), set(1.0f));

    I h = _mm512_add_epi32(key, _mm512_load_si512(element + i * LANES));
    h = _mm512_mullo_epi32(_mm512_xor_si512(h, _mm512_srli_epi32(h, 16)), set_int(0x7feb352du));
    h = _mm512_mullo_epi32(_mm512_xor_si512(h, _mm512_srli_epi32(h, 15)), set_int(0x846ca68bu));
    h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 16));
    if (keep_hash) _mm512_storeu_si512(x->hash + e, h);
    /* 3 u, from u = (f + 0.5) 2^-23: product and sum are exact, so one rounding. Then -0.75 u, a quarter with the
     * other sign, in the exponent field. */
    F above = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(h, 9)), set(3 * 0x1p-23f), set(1.5f * 0x1p-23f));
    F below = as_float(_mm512_add_epi32(as_int(above), set_int(0x80000000u - (2u << 23))));
    *up = _mm512_cmp_ps_mask(excess, above, _CMP_GT_OQ);
    *down = _mm512_cmp_ps_mask(excess, below, _CMP_LT_OQ);
    _mm512_store_ps(x->m + e, m);
    _mm512_store_ps(x->v + e, _mm512_add_ps(_mm512_sqrt_ps(_mm512_mul_ps(v, k->inv_bias2)), k->eps));
    return _mm512_andnot_ps(set(-0.0f), m);
}

/* ---- update ---- */

typedef struct {
    F inv_bias1, carry, decay, lr;
} UpdateConstants;

INLINE UpdateConstants update_constants(const StepScalars *s) {
    return (UpdateConstants){set(s->inv_bias1), set(s->carry), set(s->decay), set(s->lr)};
}

/* Bit e of codes[1]: whether |m| lies above the threshold. */
INLINE __mmask16 *kept_mask(Segment *x, int e) { return (__mmask16 *)(void *)(x->codes[1] + e / 8); }

/* The weights of elements [e, e + 16). Returns their new stored momentum. */
INLINE F update_group(Segment *x, const UpdateConstants *k, F scale, int e) {
    prefetch_param(x, e);
    F m = _mm512_load_ps(x->m + e), bottom = _mm512_load_ps(x->v + e), w = _mm512_loadu_ps(x->w + e);
    F q = as_float(_mm512_maskz_ternarylogic_epi32(*kept_mask(x, e), as_int(scale), as_int(m), set_int(0x80000000u),
                                                   0xf8)); /* A | (B & C) */
    F top = _mm512_add_ps(_mm512_mul_ps(m, k->inv_bias1), _mm512_mul_ps(k->carry, _mm512_sub_ps(m, q)));
    _mm512_storeu_ps(x->w + e,
                     _mm512_sub_ps(_mm512_mul_ps(w, k->decay), _mm512_mul_ps(k->lr, _mm512_div_ps(top, bottom))));
    return q;
}

/* New codes of the first moment of a full block from its stored momenta, summed over the planes with the weights of
 * base 3: integer multiples, below 2^7, of a scale of eight bits, hence exact. */
INLINE void pack_momentum(uint8_t *to, F low, F high, F scale) {
    __mmask16 any = _mm512_cmp_ps_mask(scale, set(0.0f), _CMP_GT_OQ);
    I n_low = _mm512_cvtps_epi32(_mm512_maskz_div_ps(any, low, scale)),
      n_high = _mm512_cvtps_epi32(_mm512_maskz_div_ps(any, high, scale));
    _mm_storeu_si128((void *)to, code_bytes(_mm512_add_epi32(n_low, set_int(121))));
    _mm_storeu_si128((void *)(to + LANES), code_bytes(_mm512_add_epi32(n_high, set_int(121))));
}

/* ---- both, side by side ---- */

/* Lanes of plane p of a block that hold elements. */
INLINE __mmask32 lanes_of_plane(int width, int w, int p) {
    int count = width - p * w;
    return first_lanes(count > w ? w : count < 0 ? 0 : count);
}

/* Moments of a block of `first` beside the update of the same block of `last`. Either may be missing there. `full`:
 * first's is there and full. */
INLINE void block_of_both(Segment *first, Segment *last, const MomentConstants *k, const UpdateConstants *u,
                          const StepScalars *s, int block, int full, int keep_hash) {
    const int groups = full ? 2 * PLANES : block < first->blocks ? groups_of(first, block) : 0, from = block * BLOCK;
    const int last_groups = block < last->blocks ? groups_of(last, block) : 0;
    const F q = _mm512_mul_ps(k->code, set(s->beta1 * first->stored_scale[block])),
            scale = set(last->new_scale[block]);
    F stored[2] = {set(0.0f), set(0.0f)}, sum[2] = {set(0.0f), set(0.0f)};
    I n[2] = {set_int(121), set_int(121)};
    const I key = set_int(first->key + (uint32_t)from);
    for (int p = 0; p < PLANES; p++) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const int i = 2 * p + half, e = from + i * LANES;
            if (i < groups) {
                __mmask16 up, down;
                F abs = moments_of_group(first, k, q, key, e, i, keep_hash, &up, &down);
                if (full) {
                    sum[half] = _mm512_add_ps(sum[half], abs);
                    n[half] = _mm512_mask_add_epi32(n[half], up, n[half], set_int(digit_weight[p]));
                    n[half] = _mm512_mask_sub_epi32(n[half], down, n[half], set_int(digit_weight[p]));
                } else {
                    first->up[i] = up;
                    first->down[i] = down;
                }
            }
            if (i < last_groups)
                stored[half] = _mm512_fmadd_ps(update_group(last, u, scale, e), set(plane_weight[p]), stored[half]);
        }
    }
    if (full)
        for (int half = 0; half < 2; half++) {
            _mm512_storeu_ps(first->lane_sums[block] + half * LANES, sum[half]);
            _mm_storeu_si128((void *)(first->v_codes + block * PLANE + half * LANES), code_bytes(n[half]));
        }
    if (block < last->full_blocks) pack_momentum(last->m_codes + block * PLANE, stored[0], stored[1], scale);
}

INLINE void both(Segment *first, Segment *last, const StepScalars *s, int keep_hash) {
    MomentConstants k = moment_constants(first, s);
    const UpdateConstants u = update_constants(s);
    const int blocks = first->blocks > last->blocks ? first->blocks : last->blocks;
    for (int block = 0; block < blocks; block++) {
        if (block >= first->full_blocks)
            block_of_both(first, last, &k, &u, s, block, 0, keep_hash);
        else
            block_of_both(first, last, &k, &u, s, block, 1, keep_hash);
    }
}

static void moments_and_update(Segment *first, Segment *last, const StepScalars *s, int keep_hash) {
    static Segment none; /* no blocks */
    if (!first) first = &none;
    if (!last) last = &none;
    if (keep_hash)
        both(first, last, s, 1);
    else
        both(first, last, s, 0);
}

/* ---- choose ---- */

/* 32 bits from bit `at` on. */
INLINE __mmask32 bits_from(const uint16_t *bits, int at) {
    uint64_t found;
    memcpy(&found, (const char *)bits + at / 8, sizeof found);
    return (__mmask32)(found >> (at % 8));
}

/* Marks what lies above the threshold, in kept_mask; leaves its sum's lanes and returns its count. */
INLINE int select_kept(Segment *x, int block) {
    const F above = set(x->threshold[block]);
    F sums[2] = {set(0.0f), set(0.0f)};
    int kept = 0;
#pragma GCC unroll 10
    for (int i = 0; i < 2 * PLANES; i++) {
        const int e = block * BLOCK + i * LANES;
        F abs = _mm512_abs_ps(_mm512_load_ps(x->m + e));
        __mmask16 keep = _mm512_cmp_ps_mask(abs, above, _CMP_GT_OQ);
        sums[i % 2] = _mm512_mask_add_ps(sums[i % 2], keep, sums[i % 2], abs);
        *kept_mask(x, e) = keep;
        kept += __builtin_popcount(keep);
    }
    _mm512_storeu_ps(x->lane_sums[block], sums[0]);
    _mm512_storeu_ps(x->lane_sums[block] + LANES, sums[1]);
    return kept;
}

INLINE float threshold_of(F low, F high, int width) {
    return tree(low, high) * (width == BLOCK ? (float)(0.7 / BLOCK) : (float)(0.7 / width));
}

INLINE void store_scale(Segment *x, int block, F low, F high, int kept) {
    x->scale[block] = block_scale(tree(low, high), kept);
    x->new_scale[block] = from_bfloat16(x->scale[block]);
}

/* A narrow block: the choice, and the new codes of both moments. Everything but kept_mask goes by planes, of which
 * the elements before the end count. */
static void choose_in_narrow(Segment *x, int block) {
    const int width = width_of(x, block), w = plane_of(x, block), from = block * BLOCK;
    F m[PLANES][2], sums[2] = {set(0.0f), set(0.0f)};
    for (int p = 0; p < PLANES; p++) {
        const __mmask32 lanes = lanes_of_plane(width, w, p);
        for (int half = 0; half < 2; half++) {
            m[p][half] =
                _mm512_maskz_loadu_ps((__mmask16)(lanes >> (half * LANES)), x->m + from + p * w + half * LANES);
            sums[half] = _mm512_add_ps(sums[half], _mm512_abs_ps(m[p][half]));
        }
    }
    const float threshold = threshold_of(sums[0], sums[1], width);
    const F above = set(threshold), below = set(-threshold);
    __m256i n_m = _mm256_set1_epi8(121), n_v = n_m;
    int kept = 0;
    sums[0] = sums[1] = set(0.0f);
    for (int p = 0; p < PLANES; p++) {
        const __m256i weight = _mm256_set1_epi8((char)digit_weight[p]);
        const __mmask32 lanes = lanes_of_plane(width, w, p);
        __mmask32 plus[2], minus[2];
        for (int half = 0; half < 2; half++) {
            plus[half] = _mm512_cmp_ps_mask(m[p][half], above, _CMP_GT_OQ);
            minus[half] = _mm512_cmp_ps_mask(m[p][half], below, _CMP_LT_OQ);
            /* the magnitudes: one of the two at a time */
            sums[half] = _mm512_mask_add_ps(sums[half], (__mmask16)plus[half], sums[half], m[p][half]);
            sums[half] = _mm512_mask_sub_ps(sums[half], (__mmask16)minus[half], sums[half], m[p][half]);
        }
        plus[0] |= plus[1] << LANES;
        minus[0] |= minus[1] << LANES;
        kept += __builtin_popcount(plus[0] | minus[0]);
        n_m = _mm256_mask_add_epi8(n_m, plus[0], n_m, weight);
        n_m = _mm256_mask_sub_epi8(n_m, minus[0], n_m, weight);
        n_v = _mm256_mask_add_epi8(n_v, lanes & bits_from(x->up, p * w), n_v, weight);
        n_v = _mm256_mask_sub_epi8(n_v, lanes & bits_from(x->down, p * w), n_v, weight);
    }
    for (int i = 0; i < groups_of(x, block); i++) {
        F abs = _mm512_abs_ps(_mm512_load_ps(x->m + from + i * LANES));
        *kept_mask(x, from + i * LANES) = _mm512_cmp_ps_mask(abs, above, _CMP_GT_OQ);
    }
    store_scale(x, block, sums[0], sums[1], kept);
    _mm256_mask_storeu_epi8(x->m_codes + block * PLANE, first_lanes(w), code_bytes_32(n_m));
    _mm256_mask_storeu_epi8(x->v_codes + block * PLANE, first_lanes(w), code_bytes_32(n_v));
}

/* Stage by stage over the full blocks: the chains of one run beside those of the others. */
INLINE void choose(Segment *x) {
    int kept[SEGMENT_BLOCKS];
    for (int b = 0; b < x->full_blocks; b++)
        x->threshold[b] =
            threshold_of(_mm512_loadu_ps(x->lane_sums[b]), _mm512_loadu_ps(x->lane_sums[b] + LANES), BLOCK);
    for (int b = 0; b < x->full_blocks; b++) kept[b] = select_kept(x, b);
    for (int b = 0; b < x->full_blocks; b++)
        store_scale(x, b, _mm512_loadu_ps(x->lane_sums[b]), _mm512_loadu_ps(x->lane_sums[b] + LANES), kept[b]);
    if (x->full_blocks < x->blocks) choose_in_narrow(x, x->full_blocks);
}
