/* What the parts of the CPU kernel share: the caller's structures, and a segment of a row on its way through the
 * step. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define BLOCK 160
#define PLANES 5
#define PLANE 32
#define LANES 16 /* elements are worked on in groups of 16; the arrays of a block are padded to them */
#define PADDED (BLOCK + PLANE)
#define GOLDEN 0x9E3779B9u
#define TINY 1e-30f
#define MAX_GRADIENT 1.8e19f
#define LINE 64 /* bytes fetched at once from memory */

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum { NO_MEMORY = -1, NOT_FINITE = 0, DONE = 1 };

typedef struct {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, inv_bias1, inv_bias2, carry, decay, lr, eps;
    uint32_t key;
    int32_t first, stochastic, maximize;
} StepScalars;

typedef struct {
    int64_t rows, cols;
    void *param;
    const void *grad;
    int64_t param_stride, grad_stride; /* elements from row to row; columns are adjacent */
    int32_t param_dtype, grad_dtype;
    uint8_t *m_codes, *v_codes;  /* ternary: (rows, row_bytes) */
    uint16_t *m_scale;           /* ternary: (rows, blocks) bf16 */
    float *row, *col;            /* ternary: (rows,), (cols,) */
    float *exp_avg, *exp_avg_sq; /* dense: (rows, cols) */
} Tensors;

#define SEGMENT_BLOCKS 4
#define SEGMENT (SEGMENT_BLOCKS * BLOCK)

/* Up to four adjacent blocks of a row on their way through pass 2. Only the last block of the row may be narrow. */
typedef struct {
    _Alignas(LINE) float m[SEGMENT + PLANE];
    _Alignas(LINE) float v[SEGMENT + PLANE];
    uint32_t hash[SEGMENT];                 /* written where the write-back needs it */
    float lane_sums[SEGMENT_BLOCKS][PLANE]; /* of |m|, then of the kept |m|: planes added in order */
    float stored_scale[SEGMENT_BLOCKS], new_scale[SEGMENT_BLOCKS], threshold[SEGMENT_BLOCKS];
    uint8_t codes[2][SEGMENT + 2 * PLANE]; /* digits, and whatever else the stages pass on */
    uint16_t up[16], down[16];             /* of a narrow block: which exponents d become 1 and -1, one bit an element */
    const float *c, *c_inv;                /* the columns' factors, readable to a multiple of LANES */
    const float *g;
    float *w;
    uint8_t *m_codes, *v_codes;
    uint16_t *scale;
    const char *grad;               /* where the gradient lives; g is that or a copy */
    char *param;                    /* the same of the weights and w */
    int grad_size, param_size;      /* bytes an element */
    float a, a_inv;                 /* the row's factors */
    uint32_t key;                   /* row key + first column */
    int width, blocks, full_blocks; /* elements; blocks, how many of them full */
    int w_is_copy;
} Segment;

/* Ask for what will be needed one segment later. Nothing faults, so what lies beyond the tensor does not matter. */
INLINE void prefetch_grad(const Segment *x, int e) { __builtin_prefetch(x->grad + (e + SEGMENT) * x->grad_size); }
INLINE void prefetch_param(const Segment *x, int e) {
    __builtin_prefetch(x->param + (e + SEGMENT) * x->param_size, 1);
}

INLINE int width_of(const Segment *x, int block) { return block < x->full_blocks ? BLOCK : x->width - block * BLOCK; }
INLINE int plane_of(const Segment *x, int block) {
    return block < x->full_blocks ? PLANE : (width_of(x, block) + PLANES - 1) / PLANES;
}
INLINE int groups_of(const Segment *x, int block) {
    return block < x->full_blocks ? BLOCK / LANES : (width_of(x, block) + LANES - 1) / LANES;
}

INLINE uint32_t bits_of(float x) {
    uint32_t b;
    memcpy(&b, &x, 4);
    return b;
}
INLINE float float_of(uint32_t b) {
    float x;
    memcpy(&x, &b, 4);
    return x;
}
INLINE float magnitude(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

INLINE uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

/* bf16 bits of sum / count; 0 when nothing was kept, for then the sum is 0. Finite: gradients are. */
INLINE uint16_t block_scale(float sum, int count) {
    uint32_t b = bits_of(sum / (float)(count + (count == 0)));
    return (uint16_t)((b + 0x7fffu + ((b >> 16) & 1)) >> 16);
}

typedef double Doubles __attribute__((vector_size(64), aligned(8), may_alias));
#define SUM_LANES 8
