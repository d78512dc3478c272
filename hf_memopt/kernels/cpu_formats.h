/* Single precision and the two 16-bit formats: conversions, and rows of elements on their way in and out. */

INLINE float from_bfloat16(uint16_t h) { return float_of((uint32_t)h << 16); }

INLINE float from_float16(uint16_t h) {
    uint32_t shifted = (uint32_t)(h & 0x7fff) << 13;
    /* The product moves the exponent's bias and normalises subnormals, exactly. */
    uint32_t b = bits_of(float_of(shifted) * 0x1p112f);
    b = shifted >= (31u << 23) ? b | 0x7f800000u : b; /* Inf, NaN */
    return float_of(b | (uint32_t)(h & 0x8000) << 16);
}

INLINE uint16_t to_bfloat16(float x) {
    uint32_t b = bits_of(x);
    uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1)) >> 16;
    return (uint16_t)((b & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

INLINE uint16_t to_float16(float x) {
    uint32_t b = bits_of(x), abs = b & 0x7fffffffu;
    uint32_t normal = (abs + 0xfffu + ((abs >> 13) & 1) - (112u << 23)) >> 13;
    /* The sum is rounded at 2^-24, fp16's smallest step. */
    uint32_t subnormal = bits_of(float_of(abs) + 0.5f) - bits_of(0.5f);
    uint32_t h = abs < (113u << 23) ? subnormal : normal;
    h = abs >= 0x477ff000u ? 0x7c00u : h; /* 65520 and above */
    h = abs > 0x7f800000u ? 0x7e00u : h;
    return (uint16_t)(h | (b >> 16 & 0x8000u));
}

INLINE uint16_t to_bfloat16_stochastic(float x, uint32_t noise) {
    return (uint16_t)((bits_of(x) + (noise >> 16)) >> 16);
}

INLINE uint16_t to_float16_stochastic(float x, uint32_t noise) {
    uint32_t e = bits_of(x) & 0x7f800000u;
    e = e < (113u << 23) ? 113u << 23 : e;
    float spacing = float_of(e - (10u << 23)), inv = float_of((264u << 23) - e); /* powers of two */
    return to_float16(floorf((x * inv) + (float)(int32_t)(noise >> 19) * 0x1p-13f) * spacing);
}

static void load(float *restrict to, const void *from, int64_t at, int dtype, int width) {
    if (dtype == FLOAT32) {
        memcpy(to, (const float *)from + at, (size_t)width * 4);
        return;
    }
    const uint16_t *h = (const uint16_t *)from + at;
    if (dtype == BFLOAT16)
        for (int e = 0; e < width; e++) to[e] = from_bfloat16(h[e]);
    else
        for (int e = 0; e < width; e++) to[e] = from_float16(h[e]);
}

static void store(void *to, int64_t at, const float *restrict from, const uint32_t *restrict hash, int dtype,
                  int stochastic, int width) {
    if (dtype == FLOAT32) {
        memcpy((float *)to + at, from, (size_t)width * 4);
        return;
    }
    uint16_t *h = (uint16_t *)to + at;
    if (dtype == BFLOAT16 && stochastic)
        for (int e = 0; e < width; e++) h[e] = to_bfloat16_stochastic(from[e], hash[e] * GOLDEN);
    else if (dtype == BFLOAT16)
        for (int e = 0; e < width; e++) h[e] = to_bfloat16(from[e]);
    else if (stochastic)
        for (int e = 0; e < width; e++) h[e] = to_float16_stochastic(from[e], hash[e] * GOLDEN);
    else
        for (int e = 0; e < width; e++) h[e] = to_float16(from[e]);
}

INLINE int element_size(int dtype) { return dtype == FLOAT32 ? 4 : 2; }
