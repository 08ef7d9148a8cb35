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

// The angle without its quarter turns, of which pi / 2 is taken in two parts, so that up to 2^31 of
// them leave all digits of a float; then by polynomials. Nothing is looked up, nothing branches.
DEV Turn turn_of(double angle, float scale) {
  const double quarters = rint(angle * 0.63661977236758134308);
  const double most = fma(quarters, -1.5707963267948965580, angle);
  const float x = (float)fma(quarters, -6.1232339957367660e-17, most), y = x * x;
  float sine = fmaf(2.86567956e-6f, y, -1.98559923e-4f);
  sine = fmaf(fmaf(sine, y, 8.33338592e-3f), y, -1.66666672e-1f);
  sine = fmaf(sine, x * y, x);
  float cosine = fmaf(2.44677067e-5f, y, -1.38877297e-3f);
  cosine = fmaf(fmaf(fmaf(cosine, y, 4.16666567e-2f), y, -0.5f), y, 1.0f);
  const int quarter = (int)((i64)quarters & 3);
  Turn t;
  t.cos = quarter & 1 ? sine : cosine;
  t.sin = quarter & 1 ? cosine : sine;
  t.cos *= (quarter + 1) & 2 ? -scale : scale;
  t.sin *= quarter & 2 ? -scale : scale;
  return t;
}

// Rotate a row's heads of this block from x (type from) to what `place` says (type to), D values
// per head; 0 is nowhere. It is asked when all that a thread needs is on its way.
template <class Place>
DEV void rotate(const u8* x, const int* position, const double* freqs, const float* factors,
                i64 heads, i64 dim, i64 rotated, i64 row_stride, i64 head_stride, int neox,
                float scale, int from, int to, Place place) {
  const int half = (int)rotated / 2, first = blockIdx.y * HEADS;
  const int size = plain_size(from), wide = plain_size(to);
  const int here = (int)heads - first < HEADS ? (int)heads - first : HEADS;
  const u8* row = x + blockIdx.x * row_stride + first * head_stride;
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    const int a = neox ? i : 2 * i, b = neox ? i + half : 2 * i + 1, at = *position;
    const double frequency = freqs[i];
    const float factor = factors ? factors[i] : 1.0f;
    u32 u[HEADS] = {}, v[HEADS] = {};
#pragma unroll
    for (int h = 0; h < HEADS; ++h)
      if (h < here) {
        u[h] = float_bits_at(row + h * head_stride + a * size, from);
        v[h] = float_bits_at(row + h * head_stride + b * size, from);
      }
    u8* out = place();
    if (!out) return;
    double angle = (double)at * frequency;
    if (factors) angle /= (double)factor;
    const Turn turn = turn_of(angle, scale);
#pragma unroll
    for (int h = 0; h < HEADS; ++h)
      if (h < here) {
        u8* head = out + (first + h) * dim * wide;
        const float p = float_of(u[h], from), q = float_of(v[h], from);
        store_float(head + a * wide, to, p * turn.cos - q * turn.sin);
        store_float(head + b * wide, to, p * turn.sin + q * turn.cos);
      }
  }
  if (rotated == dim) return;
  u8* out = place();
  for (int h = 0; h < here && out; ++h)
    for (int i = (int)rotated + threadIdx.x; i < dim; i += blockDim.x)
      store_float(out + ((first + h) * dim + i) * wide, to,
                  float_of(float_bits_at(row + h * head_stride + i * size, from), from));
}

KERNEL rope(const u8* x, u8* y, const int* positions, const double* freqs, const float* factors,
            i64 heads, i64 dim, i64 rotated, i64 row_stride, i64 head_stride, int neox, float scale,
            int type) {
  rotate(x, positions + blockIdx.x, freqs, factors, heads, dim, rotated, row_stride, head_stride,
         neox, scale, type, type,
         [&] { return y + blockIdx.x * heads * dim * plain_size(type); });
}

// Row t goes to cache row index[t]; of two rows for one place the last stays. An index outside
// [0, rows) writes nothing.
KERNEL rope_set_rows(const u8* x, u8* cache, const int* positions, const u8* index,
                     const double* freqs, const float* factors, i64 tokens, i64 rows, i64 heads,
                     i64 dim, i64 rotated, i64 row_stride, i64 head_stride, int neox, float scale,
                     int from, int to, int index_type) {
  rotate(x, positions + blockIdx.x, freqs, factors, heads, dim, rotated, row_stride, head_stride,
         neox, scale, from, to, [&] {
           const i64 row = load_index(index, index_type, blockIdx.x);
           const bool stays = row >= 0 && row < rows &&
                              !is_followed(index, index_type, blockIdx.x, tokens, row);
           return stays ? cache + row * heads * dim * plain_size(to) : 0;
         });
}
