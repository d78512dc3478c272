/* The ternary and the dense AdamW step on a CPU, bit for bit as README.md beside this file defines them.
 *
 * Plain C11 on raw pointers: no torch, no Python. compiled.py builds this file at first use and calls it through
 * ctypes.
 *
 * Shape of the ternary step: pass 1 reads the gradient (row and column sums of its squares, in double); pass 2 goes
 * once over weights, gradient and codes, a segment (up to four blocks of a row) at a time, in local arrays that never
 * leave the first-level cache:
 *
 *     decode              codes to digits
 *     moments             first and second moment, the second moment's new codes, the sums of |m|
 *     choose              threshold, what lies above it, the new block scales
 *     update              the weights, the first moment's new codes
 *
 * The moments of one segment and the update of the segment before are one stage, so that division and square root run
 * beside everything else. cpu_stages_avx512.h has the stages for AVX-512, cpu_stages_portable.h for every other
 * machine; the driver below is common.
 *
 * Threads take rows. Column sums are kept per chunk of rows, and the chunks depend on the shape alone, so results do
 * not depend on the number of threads.
 *
 * Build: -O3 -march=native -std=gnu11 -ffp-contract=off -fno-math-errno -fno-trapping-math. Never -ffast-math: it
 * contracts, reorders and flushes. */

#include "cpu_types.h"

#include "cpu_formats.h"
#include "cpu_threads.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VBMI__) && !defined(HF_MEMOPT_PORTABLE)
#include "cpu_stages_avx512.h"
#else
#include "cpu_stages_portable.h"
#endif

typedef struct {
    Team team;
    const Tensors *t;
    const StepScalars *s;
    atomic_int not_finite;
    _Atomic int64_t next_chunk, next_rows;
    int64_t chunk_rows, chunks; /* pass 1 */
    int64_t rows_at_once;       /* pass 2 and the dense step */
    int flat;                   /* dense step: a vector is seen as one row */
    double *col_sums;           /* (chunks, cols); in the end the first chunk has the sums of all */
    double *row_sums;           /* (rows,) */
    float *a_inv, *c_inv;       /* (rows,), (cols,) padded */
    float mean;                 /* of the stored row factors */
    /* The stored column factors of a row's last segment, padded, which t->col is not. */
    _Alignas(LINE) float last_c[SEGMENT];
} Job;

/* ---- pass 1 ---- */

#define ROWS_AT_ONCE 4
#define STRIP 512 /* columns */
#define MAX_CHUNKS 32
#define MIN_CHUNK_ROWS 64
#define MAX_COLUMN_SUMS (4 << 20) /* numbers: 32 MB */

/* Adds the squares of `rows` rows to the column sums and to SUM_LANES partial sums a row. */
INLINE void add_squares(const float *const *row, int rows, int width, double *restrict col, Doubles *lanes) {
    Doubles sums[ROWS_AT_ONCE];
    int j = 0;
    for (int r = 0; r < rows; r++) sums[r] = lanes[r];
    for (; j + SUM_LANES <= width; j += SUM_LANES) {
        Doubles in_column = *(Doubles *)(col + j);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __builtin_prefetch(row[r] + j + 8 * LANES);
            Doubles g = widen(row[r] + j);
            in_column = add_square(in_column, g);
            sums[r] = add_square(sums[r], g);
        }
        *(Doubles *)(col + j) = in_column;
    }
    for (; j < width; j++)
        for (int r = 0; r < rows; r++) {
            double g = row[r][j], square = g * g;
            col[j] += square;
            sums[r][j % SUM_LANES] += square;
        }
    for (int r = 0; r < rows; r++) lanes[r] = sums[r];
}

INLINE double sum_lanes(Doubles x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

/* Whether every element of a row is a number whose square is finite. Looked at only where the row's sum leaves a
 * doubt: sums of non-negative numbers never shrink, so a sum up to MAX_GRADIENT^2 clears the whole row. */
static int row_is_finite(const Tensors *t, int64_t row) {
    float g[BLOCK];
    uint32_t greatest = 0;
    for (int64_t j = 0; j < t->cols; j += BLOCK) {
        int width = t->cols - j < BLOCK ? (int)(t->cols - j) : BLOCK;
        load(g, t->grad, row * t->grad_stride + j, t->grad_dtype, width);
        for (int e = 0; e < width; e++) {
            uint32_t b =
                bits_of(g[e]) & 0x7fffffffu; /* magnitudes are ordered as integers, Inf and NaN above every number */
            greatest = b > greatest ? b : greatest;
        }
    }
    return greatest <= bits_of(MAX_GRADIENT);
}

/* Rows first, first + apart, ... (`rows` of them). */
static int sums_of_rows(const Tensors *t, int64_t first, int64_t apart, int rows, double *col, double *row_sums) {
    const double clear = (double)MAX_GRADIENT * (double)MAX_GRADIENT;
    float copy[ROWS_AT_ONCE][STRIP];
    const float *strip[ROWS_AT_ONCE];
    Doubles lanes[ROWS_AT_ONCE] = {{0}};
    for (int64_t j = 0; j < t->cols; j += STRIP) {
        int width = t->cols - j < STRIP ? (int)(t->cols - j) : STRIP;
        for (int r = 0; r < rows; r++) {
            int64_t at = (first + r * apart) * t->grad_stride + j;
            if (t->grad_dtype == FLOAT32) {
                strip[r] = (const float *)t->grad + at;
            } else {
                load(copy[r], t->grad, at, t->grad_dtype, width);
                strip[r] = copy[r];
            }
        }
        if (rows == ROWS_AT_ONCE)
            add_squares(strip, ROWS_AT_ONCE, width, col + j, lanes);
        else
            for (int r = 0; r < rows; r++) add_squares(strip + r, 1, width, col + j, lanes + r);
    }
    for (int r = 0; r < rows; r++) {
        double sum = row_sums[first + r * apart] = sum_lanes(lanes[r]);
        if (!(sum <= clear) && !row_is_finite(t, first + r * apart)) return 0;
    }
    return 1;
}

static void sum_chunks(Job *job) {
    const Tensors *t = job->t;
    for (;;) {
        int64_t chunk = atomic_fetch_add(&job->next_chunk, 1);
        if (chunk >= job->chunks || atomic_load(&job->not_finite)) return;
        int64_t first = chunk * job->chunk_rows, last = first + job->chunk_rows;
        last = last < t->rows ? last : t->rows;
        double *col = job->col_sums + chunk * t->cols;
        memset(col, 0, (size_t)t->cols * sizeof *col);
        int64_t apart =
            (last - first) / ROWS_AT_ONCE; /* distant rows: memory delivers several long streams faster than one */
        int finite = 1;
        for (int64_t i = first; i < first + apart && finite; i++)
            finite = sums_of_rows(t, i, apart, ROWS_AT_ONCE, col, job->row_sums);
        for (int64_t i = first + apart * ROWS_AT_ONCE; i < last && finite; i++)
            finite = sums_of_rows(t, i, 0, 1, col, job->row_sums);
        if (!finite) {
            atomic_store(&job->not_finite, 1);
            return;
        }
    }
}

INLINE float new_row(const Job *job, int64_t i) {
    float mean = (float)(job->row_sums[i] / (double)job->t->cols) + TINY;
    return (job->s->beta2 * job->t->row[i]) + (job->s->one_minus_beta2 * mean);
}

INLINE float new_col(const Job *job, int64_t j) {
    float mean = (float)(job->col_sums[j] / (double)job->t->rows) + TINY;
    return (job->s->beta2 * job->t->col[j]) + (job->s->one_minus_beta2 * mean);
}

/* What pass 2 needs of the old and the new factors. The new ones are not kept: `store_factors` computes them again.
 */
static void factors(Job *job) {
    const Tensors *t = job->t;
    for (int64_t chunk = 1; chunk < job->chunks; chunk++) {
        const double *part = job->col_sums + chunk * t->cols;
        for (int64_t j = 0; j < t->cols; j++) job->col_sums[j] += part[j];
    }
    for (int64_t j = 0; j < t->cols; j++) job->c_inv[j] = 1.0f / new_col(job, j);
    const int64_t last = (t->cols - 1) / SEGMENT * SEGMENT;
    memcpy(job->last_c, t->col + last, (size_t)(t->cols - last) * sizeof(float));

    Doubles old_sum = {0}, new_sum = {0};
    for (int64_t i = 0; i < t->rows; i++) {
        old_sum[i % SUM_LANES] += t->row[i];
        new_sum[i % SUM_LANES] += new_row(job, i);
    }
    job->mean = (float)(sum_lanes(old_sum) / (double)t->rows);
    const float new_mean = (float)(sum_lanes(new_sum) / (double)t->rows);
    for (int64_t i = 0; i < t->rows; i++) job->a_inv[i] = new_mean / new_row(job, i);
}

static void store_factors(const Job *job) {
    const Tensors *t = job->t;
    for (int64_t j = 0; j < t->cols; j++) t->col[j] = new_col(job, j);
    for (int64_t i = 0; i < t->rows; i++) t->row[i] = new_row(job, i);
}

/* ---- pass 2 ---- */

/* Single-precision copies of what a segment reads and writes, for 16-bit tensors and for widths that are not a
 * multiple of LANES. */
typedef struct {
    _Alignas(LINE) float g[SEGMENT], w[SEGMENT];
} Copies;

/* A row on its way through pass 2. */
typedef struct {
    int64_t g_at, w_at; /* of its first element */
    uint8_t *m_codes, *v_codes;
    uint16_t *scale;
    float a, a_inv;
    uint32_t key;
} Row;

INLINE void place(Segment *x, const Job *job, const Row *row, Copies *copies, int64_t j) {
    const Tensors *t = job->t;
    const int64_t g_at = row->g_at + j, w_at = row->w_at + j, left = t->cols - j, block = j / BLOCK;
    x->width = left < SEGMENT ? (int)left : SEGMENT;
    x->full_blocks = x->width / BLOCK;
    x->blocks = (x->width + BLOCK - 1) / BLOCK;
    x->a = row->a;
    x->a_inv = row->a_inv;
    x->c = left <= SEGMENT ? job->last_c : t->col + j;
    x->c_inv = job->c_inv + j;
    x->key = row->key + (uint32_t)j;
    x->m_codes = row->m_codes + block * PLANE;
    x->v_codes = row->v_codes + block * PLANE;
    x->scale = row->scale + block;
    for (int b = 0; b < x->blocks; b++) x->stored_scale[b] = from_bfloat16(x->scale[b]);
    const int whole = x->width % LANES == 0;
    if (t->grad_dtype == FLOAT32 && whole) {
        x->g = (const float *)t->grad + g_at;
    } else {
        load(copies->g, t->grad, g_at, t->grad_dtype, x->width);
        x->g = copies->g;
    }
    x->grad_size = element_size(t->grad_dtype);
    x->param_size = element_size(t->param_dtype);
    x->grad = (const char *)t->grad + g_at * x->grad_size;
    x->param = (char *)t->param + w_at * x->param_size;
    x->w_is_copy = t->param_dtype != FLOAT32 || !whole;
    x->w = x->w_is_copy ? copies->w : (float *)(void *)x->param;
}

/* The first stages of one segment and the last of the one before; either may be missing. */
INLINE void advance(const Job *job, Segment *first, Segment *last) {
    const Tensors *t = job->t;
    const int keep_hash = t->param_dtype != FLOAT32 && job->s->stochastic;
    if (first) decode(first);
    if (last && last->w_is_copy) load(last->w, last->param, 0, t->param_dtype, last->width);
    moments_and_update(first, last, job->s, keep_hash);
    if (last && last->w_is_copy)
        store(last->param, 0, last->w, last->hash, t->param_dtype, job->s->stochastic, last->width);
    if (first) choose(first);
}

static void update_rows(const Job *job, Segment pair[2], Copies *copies, int64_t from, int64_t to) {
    const Tensors *t = job->t;
    const StepScalars *s = job->s;
    const int64_t blocks = (t->cols + BLOCK - 1) / BLOCK,
                  bytes = t->cols / BLOCK * PLANE + (t->cols % BLOCK + PLANES - 1) / PLANES;
    Segment *first = &pair[0], *last = NULL;
    for (int64_t i = from; i < to; i++) {
        const float a = s->first ? 0.0f : s->beta2 * (t->row[i] / job->mean);
        const Row row = {
            .g_at = i * t->grad_stride,
            .w_at = i * t->param_stride,
            .m_codes = t->m_codes + i * bytes,
            .v_codes = t->v_codes + i * bytes,
            .scale = t->m_scale + i * blocks,
            .a = a,
            .a_inv = job->a_inv[i],
            .key = mix(s->key + (uint32_t)i * GOLDEN),
        };
        for (int64_t j = 0; j < t->cols; j += SEGMENT) {
            place(first, job, &row, copies, j);
            advance(job, first, last);
            last = first;
            first = first == pair ? pair + 1 : pair;
        }
    }
    advance(job, NULL, last);
}

static void ternary_work(Team *team, int thread) {
    Job *job = (Job *)team;
    sum_chunks(job);
    wait_for_all(team);
    if (atomic_load(&job->not_finite)) return;
    if (thread == 0) factors(job);
    wait_for_all(team);
    Segment pair[2];
    Copies copies;
    memset(pair, 0, sizeof pair);
    memset(&copies, 0, sizeof copies);
    for (;;) {
        int64_t from = atomic_fetch_add(&job->next_rows, job->rows_at_once), to = from + job->rows_at_once;
        if (from >= job->t->rows) break;
        update_rows(job, pair, &copies, from, to < job->t->rows ? to : job->t->rows);
    }
    wait_for_all(team); /* all have read the old factors */
    if (thread == 0) store_factors(job);
}

/* ---- entry points ---- */

static int64_t at_least_one(int64_t x) { return x < 1 ? 1 : x; }

/* Rows a chunk of pass 1: enough chunks for many threads, few enough for their column sums to stay small. Depends on
 * the shape alone. */
static int64_t rows_of_chunk(int64_t rows, int64_t cols) {
    int64_t most = at_least_one(MAX_COLUMN_SUMS / cols), chunk;
    most = most < MAX_CHUNKS ? most : MAX_CHUNKS;
    chunk = (rows + most - 1) / most;
    return chunk < MIN_CHUNK_ROWS ? MIN_CHUNK_ROWS : chunk;
}

/* One ternary step. DONE, NOT_FINITE (nothing was written) or NO_MEMORY (nothing was written). Scratch memory: 12
 * bytes a row, 12 bytes a column, and the column sums of further chunks of rows, at most 32 MB. */
int hf_memopt_ternary_adamw(const Tensors *t, const StepScalars *s, int threads) {
    if (t->rows == 0 || t->cols == 0) return DONE;
    Job job = {.team.work = ternary_work, .t = t, .s = s};
    job.chunk_rows = rows_of_chunk(t->rows, t->cols);
    job.chunks = (t->rows + job.chunk_rows - 1) / job.chunk_rows;
    job.rows_at_once = at_least_one(16384 / t->cols);
    size_t rows = (size_t)t->rows, cols = (size_t)t->cols, padded = (cols + LANES) / LANES * LANES;
    size_t sums = sizeof(double) * ((size_t)job.chunks * cols + rows), inverses = sizeof(float) * (padded + rows);
    char *memory = calloc(1, LINE + inverses + sums), *aligned = memory + (LINE - (uintptr_t)memory % LINE);
    if (!memory) return NO_MEMORY;
    job.c_inv = (float *)(void *)aligned; /* vectors are read faster where they do not straddle two lines */
    job.col_sums = (double *)(void *)(job.c_inv + padded);
    job.row_sums = job.col_sums + (size_t)job.chunks * cols;
    job.a_inv = (float *)(void *)(job.row_sums + rows);
    run(&job.team, threads);
    free(memory);
    return job.not_finite ? NOT_FINITE : DONE;
}

static void dense_piece(const float *restrict g, float *restrict w, float *restrict exp_avg,
                        float *restrict exp_avg_sq, const StepScalars *s, int width) {
    const float beta1 = s->beta1, beta2 = s->beta2, one_minus_beta2 = s->one_minus_beta2;
    const float one_minus_beta1 = s->maximize ? -s->one_minus_beta1 : s->one_minus_beta1;
    const float inv_bias1 = s->inv_bias1, inv_bias2 = s->inv_bias2, eps = s->eps, decay = s->decay, lr = s->lr;
    for (int e = 0; e < width; e++) {
        float m = (beta1 * exp_avg[e]) + (one_minus_beta1 * g[e]);
        float v = (beta2 * exp_avg_sq[e]) + (one_minus_beta2 * (g[e] * g[e]));
        exp_avg[e] = m;
        exp_avg_sq[e] = v;
        w[e] = (w[e] * decay) - (lr * ((m * inv_bias1) / (sqrtf(v * inv_bias2) + eps)));
    }
}

/* Elements [j, j + width) of a row; of a vector seen as one row (`flat`), every element has its own row key. */
static void dense_hash(uint32_t *restrict hash, uint32_t key, int64_t row, int64_t j, int width, int flat) {
    const uint32_t row_key = mix(key + (uint32_t)row * GOLDEN), first = (uint32_t)j;
    if (flat)
        for (int e = 0; e < width; e++) hash[e] = mix(mix(key + (first + (uint32_t)e) * GOLDEN));
    else
        for (int e = 0; e < width; e++) hash[e] = mix(row_key + first + (uint32_t)e);
}

static void dense_rows(const Job *job, Copies *copies, int64_t from, int64_t to) {
    const Tensors *t = job->t;
    const int hashed = t->param_dtype != FLOAT32 && job->s->stochastic;
    uint32_t hash[SEGMENT];
    for (int64_t i = from; i < to; i++) {
        for (int64_t j = 0; j < t->cols; j += SEGMENT) {
            const int64_t g_at = i * t->grad_stride + j, w_at = i * t->param_stride + j, at = i * t->cols + j;
            const int width = t->cols - j < SEGMENT ? (int)(t->cols - j) : SEGMENT;
            if (hashed) dense_hash(hash, job->s->key, i, j, width, job->flat);
            load(copies->g, t->grad, g_at, t->grad_dtype, width);
            load(copies->w, t->param, w_at, t->param_dtype, width);
            dense_piece(copies->g, copies->w, t->exp_avg + at, t->exp_avg_sq + at, job->s, width);
            store(t->param, w_at, copies->w, hash, t->param_dtype, job->s->stochastic, width);
        }
    }
}

static void dense_work(Team *team, int thread) {
    Job *job = (Job *)team;
    const Tensors *t = job->t;
    (void)thread;
    for (;;) {
        int64_t from = atomic_fetch_add(&job->next_chunk, job->rows_at_once), to = from + job->rows_at_once;
        if (from >= t->rows || atomic_load(&job->not_finite)) break;
        for (int64_t i = from; i < to && i < t->rows; i++)
            if (!row_is_finite(t, i)) {
                atomic_store(&job->not_finite, 1);
                break;
            }
    }
    wait_for_all(team);
    if (atomic_load(&job->not_finite)) return;
    Copies copies;
    for (;;) {
        int64_t from = atomic_fetch_add(&job->next_rows, job->rows_at_once), to = from + job->rows_at_once;
        if (from >= t->rows) return;
        dense_rows(job, &copies, from, to < t->rows ? to : t->rows);
    }
}

/* One dense step. DONE or NOT_FINITE (nothing was written). */
int hf_memopt_dense_adamw(const Tensors *t, const StepScalars *s, int threads) {
    if (t->rows == 0 || t->cols == 0) return DONE;
    Tensors row = *t;
    Job job = {.team.work = dense_work, .t = t, .s = s};
    if (t->cols == 1 && t->param_stride == 1 && t->grad_stride == 1) {
        row.rows = 1;
        row.cols = t->rows;
        job.t = t = &row;
        job.flat = 1;
    }
    job.rows_at_once = at_least_one(16384 / t->cols);
    run(&job.team, threads);
    return job.not_finite ? NOT_FINITE : DONE;
}

/* Which stages were compiled in. */
const char *hf_memopt_stages(void) { return STAGES; }

/* The caller checks that both sides agree on the layout of the two structures. */
int hf_memopt_sizes(int which) { return which ? (int)sizeof(StepScalars) : (int)sizeof(Tensors); }
