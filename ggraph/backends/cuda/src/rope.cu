// Rotary embedding, into a result or straight into a cache.
//
// Angles are float64: position times the pair's frequency, which the host tabulates with every
// scaling applied. Legend: T token rows, H heads, D head size, R rotated features, C cache rows.
#define MOST_THREADS 64
#include "common.cuh"

#define HEADS 4  // heads per block: they share one sine and cosine per pair

struct Turn {
  float cos, sin;
};

DEV Turn turn_of(int position, const double* freqs, const float* factors, int pair, float scale) {
  double angle = (double)position * freqs[pair];
  if (factors) angle /= (double)factors[pair];
  Turn t;
  t.cos = (float)(cos(angle) * (double)scale);
  t.sin = (float)(sin(angle) * (double)scale);
  return t;
}

// Rotate row t's heads of this block from x (type from) to `out` (type to), D values per head.
DEV void rotate(const u8* x, u8* out, int position, const double* freqs, const float* factors,
                i64 heads, i64 dim, i64 rotated, i64 row_stride, i64 head_stride, int neox,
                float scale, int from, int to) {
  const i64 half = rotated / 2, first = (i64)blockIdx.y * HEADS;
  const int size = plain_size(from), wide = plain_size(to);
  const u8* row = x + blockIdx.x * row_stride;
  const i64 last = first + HEADS < heads ? first + HEADS : heads;
  for (i64 i = threadIdx.x; i < half; i += blockDim.x) {
    const Turn turn = turn_of(position, freqs, factors, (int)i, scale);
    const i64 a = neox ? i : 2 * i, b = neox ? i + half : 2 * i + 1;
    for (i64 h = first; h < last; ++h) {
      const u8* head = row + h * head_stride;
      const float u = load_plain(head + a * size, from), v = load_plain(head + b * size, from);
      store_plain(out + (h * dim + a) * wide, to, u * turn.cos - v * turn.sin);
      store_plain(out + (h * dim + b) * wide, to, u * turn.sin + v * turn.cos);
    }
  }
  for (i64 h = first; h < last; ++h)
    for (i64 i = rotated + threadIdx.x; i < dim; i += blockDim.x)
      store_plain(out + (h * dim + i) * wide, to,
                  load_plain(row + h * head_stride + i * size, from));
}

KERNEL rope(const u8* x, u8* y, const int* positions, const double* freqs, const float* factors,
            i64 heads, i64 dim, i64 rotated, i64 row_stride, i64 head_stride, int neox, float scale,
            int type) {
  u8* out = y + blockIdx.x * heads * dim * plain_size(type);
  rotate(x, out, positions[blockIdx.x], freqs, factors, heads, dim, rotated, row_stride,
         head_stride, neox, scale, type, type);
}

// Row t goes to cache row index[t]; of two rows for one place the last stays. An index outside
// [0, rows) writes nothing.
KERNEL rope_set_rows(const u8* x, u8* cache, const int* positions, const u8* index,
                     const double* freqs, const float* factors, i64 tokens, i64 rows, i64 heads,
                     i64 dim, i64 rotated, i64 row_stride, i64 head_stride, int neox, float scale,
                     int from, int to, int index_type) {
  const i64 row = load_index(index, index_type, blockIdx.x);
  if (row < 0 || row >= rows) return;
  for (i64 t = blockIdx.x + 1; t < tokens; ++t)
    if (load_index(index, index_type, t) == row) return;
  u8* out = cache + row * heads * dim * plain_size(to);
  rotate(x, out, positions[blockIdx.x], freqs, factors, heads, dim, rotated, row_stride,
         head_stride, neox, scale, from, to);
}
