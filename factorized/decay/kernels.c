/* Frobenius decay on the CPU: adds alpha X (YᵀY) to a tensor of every factor X, where Y is the factor's partner. REAL is
   float or double.

   A product is computed by one thread, so that results depend on no number of threads, and from factors where they
   are. Its two Gram matrices are there before a tensor is written, so that this may be the factor that it belongs to.

   Rows are read in whole vectors, beyond their end: what is there makes columns that nobody reads. */
#include <stdint.h>
#include <string.h>

/* P x Q vectors of sums stay in registers, with what they are made of. */
#ifdef __AVX512F__
enum { BYTES = 64, P = 8, Q = 3 };
#else
enum { BYTES = 32, P = 4, Q = 3 };
#endif
enum { LANES = BYTES / sizeof(REAL) };
enum { BLOCK = 64 }; /* rows that stay in the nearest cache */
typedef REAL Vector __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));
typedef REAL Square[MAX_RANK * MAX_RANK] __attribute__((aligned(64)));
#define INLINE static inline __attribute__((always_inline)) void
/* Call with the number of vectors as a constant. */
#define WITH(q, call, ...) \
  do { \
    if (q == 3) call(__VA_ARGS__, 3); \
    else if (q == 2) call(__VA_ARGS__, 2); \
    else call(__VA_ARGS__, 1); \
  } while (0)

typedef struct {
  int64_t rows[2]; /* of U and V */
  int64_t rank;
} Form;

static _Thread_local Square grams[2]; /* too much for the stacks that threads may have */

static int64_t padded(int64_t rank) { return (rank + LANES - 1) / LANES * LANES; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* sums (P, q vectors) += left (P, count) right (count, q vectors). */
INLINE multiply(const REAL *left, int64_t down, int64_t across, const REAL *right, int64_t stride, int64_t count,
                Vector sums[P][Q], int q) {
  for (int64_t k = 0; k < count; k++)
    for (int i = 0; i < P; i++)
      for (int j = 0; j < q; j++)
        sums[i][j] += left[i * down + k * across] * *(const Vector *)(right + k * stride + j * LANES);
}

/* Add rows of x to q vectors of P rows of its Gram matrix. */
INLINE add_to_gram(const REAL *x, int64_t rows, int64_t rank, int64_t row, int64_t column, REAL *gram, int q) {
  int64_t width = padded(rank);
  Vector sums[P][Q];
  for (int i = 0; i < P; i++)
    for (int j = 0; j < q; j++) sums[i][j] = *(Vector *)(gram + (row + i) * width + column + j * LANES);
  multiply(x + row, 1, rank, x + column, rank, rows, sums, q);
  for (int i = 0; i < P; i++)
    for (int j = 0; j < q; j++) *(Vector *)(gram + (row + i) * width + column + j * LANES) = sums[i][j];
}

/* The upper half, and what of the lower shares a vector with it. */
static void add_gram(const REAL *x, int64_t rows, int64_t rank, REAL *gram) {
  int64_t width = padded(rank);
  for (int64_t first = 0; first < rows; first += BLOCK)
    for (int64_t row = 0; row < rank; row += P)
      for (int64_t column = row / LANES * LANES; column < width; column += Q * LANES) {
        int64_t q = least((width - column) / LANES, Q);
        WITH(q, add_to_gram, x + first * rank, least(rows - first, BLOCK), rank, row, column, gram);
      }
}

static void write_gram(const REAL *x, int64_t rows, int64_t rank, REAL *gram) {
  int64_t width = padded(rank), wide = rows;
  while (wide > 0 && (rows - wide + 1) * rank < width) wide--; /* these can be read in whole vectors */
  REAL last[2 * MAX_RANK] = {0};
  memcpy(last, x + wide * rank, sizeof(REAL) * (rows - wide) * rank);
  memset(gram, 0, sizeof(REAL) * width * width);
  add_gram(x, wide, rank, gram);
  add_gram(last, rows - wide, rank, gram);
  for (int64_t a = 0; a < rank; a++)
    for (int64_t b = a + 1; b < rank; b++) gram[b * width + a] = gram[a * width + b];
}

/* Add q vectors of at most P rows of alpha x gram to the same of the target. */
INLINE add_to_rows(const REAL *x, int64_t rows, int64_t rank, const REAL *gram, int64_t column, REAL alpha,
                   REAL *target, int q) {
  Vector sums[P][Q] = {0};
  multiply(x, rank, 1, gram + column, padded(rank), rank, sums, q);
  for (int i = 0; i < P; i++)
    for (int j = 0; i < rows && j < q; j++) {
      int64_t k = column + j * LANES;
      REAL *place = target + i * rank + k;
      Vector product = alpha * sums[i][j];
      if (rank - k >= LANES) *(Vector *)place += product;
      else for (int lane = 0; lane < rank - k; lane++) place[lane] += product[lane];
    }
}

static void add_product(const REAL *x, int64_t rows, int64_t rank, const REAL *gram, REAL alpha, REAL *target) {
  int64_t width = padded(rank);
  REAL own[P * MAX_RANK] = {0}; /* the target may be x */
  for (int64_t row = 0; row < rows; row += P) {
    int64_t count = least(rows - row, P);
    memcpy(own, x + row * rank, sizeof(REAL) * count * rank);
    for (int64_t column = 0; column < width; column += Q * LANES) {
      int64_t q = least((width - column) / LANES, Q);
      WITH(q, add_to_rows, own, count, rank, gram, column, alpha, target + row * rank);
    }
  }
}

/* A factor whose target is NULL is left out. */
void add_gradients(const Form *forms, int64_t count, const REAL *const (*values)[2], REAL *const (*targets)[2],
                   const REAL (*alphas)[2], int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t n = 0; n < count; n++) {
    const int64_t *rows = forms[n].rows;
    int64_t rank = forms[n].rank;
    for (int own = 0; own < 2; own++)
      if (targets[n][!own]) write_gram(values[n][own], rows[own], rank, grams[own]);
    for (int own = 0; own < 2; own++)
      if (targets[n][own]) add_product(values[n][own], rows[own], rank, grams[!own], alphas[n][own], targets[n][own]);
  }
}
