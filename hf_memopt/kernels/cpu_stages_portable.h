/* The stages of a segment in portable C, for every machine without AVX-512: see ternary_adamw.c for the stages and
 * README.md for the equations.
 *
 * Each loop is one that compilers vectorise: over the elements of a block in order, or over the lanes of its planes.
 * Full blocks get their own copy of each loop, with constant bounds. */

#define STAGES "portable"

INLINE Doubles widen(const float *x) {
    Doubles wide;
    for (int l = 0; l < SUM_LANES; l++) wide[l] = x[l];
    return wide;
}
INLINE Doubles add_square(Doubles sum, Doubles x) { return sum + x * x; }

/* Digits in element order from the bytes of one block. */
INLINE void digits_of(uint8_t *restrict digits, const uint8_t *restrict bytes, int w) {
    uint8_t fraction[PLANE];
    for (int l = 0; l < w; l++) fraction[l] = bytes[l];
    for (int p = 0; p < PLANES; p++) {
        for (int l = 0; l < w; l++) {
            digits[p * w + l] = (uint8_t)((fraction[l] > 85) + (fraction[l] > 170)); /* (3 fraction) >> 8 */
            fraction[l] = (uint8_t)(fraction[l] * 3);
        }
    }
}

/* The way back; digits beyond the width are 1. */
INLINE void pack(uint8_t *restrict bytes, uint8_t *restrict digits, int width, int w) {
    for (int e = width; e < PLANES * w; e++) digits[e] = 1;
    for (int l = 0; l < w; l++) {
        uint32_t n = 81u * digits[l] + 27u * digits[w + l] + 9u * digits[2 * w + l] + 3u * digits[3 * w + l] +
                     digits[4 * w + l];
        bytes[l] = (uint8_t)(((256 * n + 242) * 17261) >> 22);
    }
}

/* tree(x) of README.md; x is zero from the width to the end of the last plane. */
INLINE float tree(const float *restrict x, int w) {
    float s[PLANE] = {0};
    for (int l = 0; l < w; l++) s[l] = (((x[l] + x[w + l]) + x[2 * w + l]) + x[3 * w + l]) + x[4 * w + l];
    for (int l = 0; l < 16; l++) s[l] += s[l + 16];
    for (int l = 0; l < 8; l++) s[l] += s[l + 8];
    for (int l = 0; l < 4; l++) s[l] += s[l + 4];
    s[0] += s[2];
    s[1] += s[3];
    return s[0] + s[1];
}

/* codes[0][e] takes the digits of the first moment, codes[1][e] those of the second. */
INLINE void decode(Segment *x) {
    for (int block = 0; block < x->blocks; block++) {
        const int from = block * BLOCK, at = block * PLANE, w = plane_of(x, block);
        if (w == PLANE) {
            digits_of(x->codes[0] + from, x->m_codes + at, PLANE);
            digits_of(x->codes[1] + from, x->v_codes + at, PLANE);
        } else {
            digits_of(x->codes[0] + from, x->m_codes + at, w);
            digits_of(x->codes[1] + from, x->v_codes + at, w);
        }
    }
}

INLINE void moments_of_block(Segment *x, const StepScalars *s, int block, int count, int keep_hash) {
    const int from = block * BLOCK;
    const float old = s->beta1 * x->stored_scale[block], one_minus_beta2 = s->one_minus_beta2, a = x->a,
                a_inv = x->a_inv;
    const float one_minus_beta1 =
        s->maximize ? -s->one_minus_beta1 : s->one_minus_beta1; /* the sign of g matters nowhere else */
    const float *restrict g = x->g + from, *restrict c = x->c + from, *restrict c_inv = x->c_inv + from;
    const uint8_t *restrict m_digit = x->codes[0] + from;
    uint8_t *restrict v_digit = x->codes[1] + from;
    uint32_t *restrict hash = x->hash + from;
    float *restrict m = x->m + from, *restrict v = x->v + from;
    const uint32_t key = x->key + (uint32_t)from;
    for (int e = 0; e < count; e += LINE / 4) prefetch_grad(x, from + e);
    if (keep_hash)
        for (int e = 0; e < count; e++) hash[e] = mix(key + (uint32_t)e);
    for (int e = 0; e < count; e++) m[e] = ((float)((int)m_digit[e] - 1) * old) + (one_minus_beta1 * g[e]);
    for (int e = 0; e < count; e++) {
        float level = float_of((2u * v_digit[e] + 125u) << 23); /* 4^d */
        v[e] = ((a * c[e]) * level) + (one_minus_beta2 * (g[e] * g[e]));
    }
    for (int e = 0; e < count; e++) {
        float excess = v[e] * (a_inv * c_inv[e]) - 1.0f;
        float above = ((float)(int32_t)(mix(key + (uint32_t)e) >> 9) + 0.5f) *
                      (3 * 0x1p-23f); /* 3 u; the powers of two are exact */
        v_digit[e] = (uint8_t)(1 + (excess > above) - (excess < -0.25f * above));
    }
}

INLINE void update_block(Segment *x, const StepScalars *s, int block, int count) {
    const int from = block * BLOCK;
    const float inv_bias1 = s->inv_bias1, inv_bias2 = s->inv_bias2, carry = s->carry, eps = s->eps, decay = s->decay,
                lr = s->lr;
    const float scale = x->new_scale[block], threshold = x->threshold[block];
    const float *restrict m = x->m + from, *restrict v = x->v + from;
    float *restrict w = x->w + from;
    for (int e = 0; e < count; e += LINE / 4) prefetch_param(x, from + e);
    for (int e = 0; e < count; e++) {
        float q = float_of(bits_of(scale) | (bits_of(m[e]) & 0x80000000u));
        q = magnitude(m[e]) > threshold ? q : 0;
        float top = (m[e] * inv_bias1) + (carry * (m[e] - q));
        w[e] = (w[e] * decay) - (lr * (top / (sqrtf(v[e] * inv_bias2) + eps)));
    }
}

static void moments_and_update(Segment *first, Segment *last, const StepScalars *s, int keep_hash) {
    for (int block = 0; first && block < first->blocks; block++) {
        const int from = block * BLOCK, width = width_of(first, block), w = plane_of(first, block);
        if (width == BLOCK) {
            moments_of_block(first, s, block, BLOCK, keep_hash);
            pack(first->v_codes + block * PLANE, first->codes[1] + from, BLOCK, PLANE);
        } else {
            moments_of_block(first, s, block, groups_of(first, block) * LANES, keep_hash);
            for (int e = width; e < PLANES * w; e++) first->m[from + e] = 0;
            pack(first->v_codes + block * PLANE, first->codes[1] + from, width, w);
        }
    }
    for (int block = 0; last && block < last->blocks; block++) {
        if (block < last->full_blocks)
            update_block(last, s, block, BLOCK);
        else
            update_block(last, s, block, groups_of(last, block) * LANES);
    }
}

INLINE void choose_in_block(Segment *x, int block, int width, int w) {
    const float *restrict m = x->m + block * BLOCK;
    uint8_t *restrict digits = x->codes[0] + block * BLOCK;
    float kept[PADDED];
    for (int e = 0; e < PLANES * w; e++) kept[e] = magnitude(m[e]);
    const float threshold = tree(kept, w) * (float)(0.7 / width);
    int count = 0;
    for (int e = 0; e < PLANES * w; e++) {
        int keep = kept[e] > threshold;
        count += keep;
        digits[e] = (uint8_t)(1 + (keep & (m[e] > 0)) - (keep & (m[e] < 0)));
        kept[e] = keep ? kept[e] : 0;
    }
    x->threshold[block] = threshold;
    x->scale[block] = block_scale(tree(kept, w), count);
    x->new_scale[block] = from_bfloat16(x->scale[block]);
    pack(x->m_codes + block * PLANE, digits, width, w);
}

INLINE void choose(Segment *x) {
    for (int block = 0; block < x->blocks; block++) {
        if (block < x->full_blocks)
            choose_in_block(x, block, BLOCK, PLANE);
        else
            choose_in_block(x, block, width_of(x, block), plane_of(x, block));
    }
}
