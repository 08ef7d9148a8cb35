// Normalisation and sums of rows; one block per row, every thread sums its own elements in order.
// Legend: n row length; x and y have `type`, strides in bytes.
#include "parts.cuh"

#define HELD 2  // fours of a row that a thread keeps in registers

DEV float add_squares(Quad four, float sum) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float v = bits_to_float(four.w[e]);
    sum = fmaf(v, v, sum);
  }
  return sum;
}

// Mean of squares of a row, less `centre`.
DEV float mean_square(const u8* row, i64 n, int type, float centre, float* part) {
  const int size = plain_size(type);
  float sum = 0.0f;
  for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
    const float v = load_plain(row + i * size, type) - centre;
    sum = fmaf(v, v, sum);
  }
  return block_sum(sum, part) / (float)n;
}

// x / sqrt(mean of squares + eps), times w [n] where given; in parts and in codes too where those
// are. Rows of floats that begin at multiples of 16 bytes, n of four. A thread has every so many
// fours of a row; its first ones, and those of w, are on their way before anything is added.
KERNEL rms_norm(const u8* x, const Quad* w, Quad* y, Quad* parts, Quad* codes, i64 n, Axes shape,
                Axes strides, float eps) {
  SHARED float part[32];
  const int fours = (int)(n / 4), step = blockDim.x, first = threadIdx.x;
  const Quad* row = (const Quad*)(x + place_of(blockIdx.x, shape, strides));
  const Quad one = {{0x3f800000u, 0x3f800000u, 0x3f800000u, 0x3f800000u}};
  Quad held[HELD] = {}, gain[HELD];
#pragma unroll
  for (int k = 0; k < HELD; ++k) {
    const int i = first + k * step;
    if (i < fours) held[k] = row[i];
  }
#pragma unroll
  for (int k = 0; k < HELD; ++k) {
    const int i = first + k * step;
    gain[k] = w && i < fours ? w[i] : one;
  }
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < HELD; ++k) sum = add_squares(held[k], sum);
#pragma unroll 1
  for (int i = first + HELD * step; i < fours; i += step) sum = add_squares(row[i], sum);
  const float factor = 1.0f / sqrtf(block_sum(sum, part) / (float)n + eps);
  const i64 begin = (i64)blockIdx.x * fours;
  const auto give = [&](int i, Quad four, Quad by) {
    float v[4];
    Quad given;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      v[e] = bits_to_float(four.w[e]) * factor * bits_to_float(by.w[e]);
      given.w[e] = float_to_bits(v[e]);
    }
    if (i < fours) y[begin + i] = given;
    if (parts && i < fours) parts[begin + i] = parts_of(v);
    if (codes) give_codes(v, i < fours, codes, n, blockIdx.x, i);
  };
#pragma unroll
  for (int k = 0; k < HELD; ++k) {
    const int i = first + k * step;
    if (warp_of(i) < fours) give(i, held[k], gain[k]);
  }
#pragma unroll 1
  for (int i = first + HELD * step; warp_of(i) < fours; i += step)
    give(i, i < fours ? row[i] : one, w && i < fours ? w[i] : one);
}

// The same of rows of any type, wherever they begin, and the same bits: a thread adds up the same
// numbers in the same order, as where a row begins may hang on how many stand before it.
KERNEL rms_norm_odd(const u8* x, const float* w, u8* y, Quad* parts, Quad* codes, i64 n,
                    Axes shape, Axes strides, float eps, int type) {
  SHARED float part[32];
  const int size = plain_size(type);
  const u8* row = x + place_of(blockIdx.x, shape, strides);
  u8* out = y + blockIdx.x * n * size;
  float sum = 0.0f;
  for (i64 four = 4 * threadIdx.x; four < n; four += 4 * blockDim.x)
    for (i64 i = four; i < n && i < four + 4; ++i) {
      const float v = load_plain(row + i * size, type);
      sum = fmaf(v, v, sum);
    }
  const float factor = 1.0f / sqrtf(block_sum(sum, part) / (float)n + eps);
  for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
    const float v = load_plain(row + i * size, type) * factor;
    store_plain(out + i * size, type, w ? v * w[i] : v);
  }
  if (parts) give_parts((const float*)out, parts + blockIdx.x * (n / 4), n);
  if (codes) give_row_codes((const float*)out, codes, n, blockIdx.x);
}

// x / max(length of the row, eps).
KERNEL l2_norm(const u8* x, u8* y, i64 n, Axes shape, Axes strides, float eps, int type) {
  SHARED float part[32];
  const int size = plain_size(type);
  const u8* row = x + place_of(blockIdx.x, shape, strides);
  u8* out = y + blockIdx.x * n * size;
  const float length = sqrtf(mean_square(row, n, type, 0.0f, part) * (float)n);
  const float factor = 1.0f / (length > eps ? length : eps);
  for (i64 i = threadIdx.x; i < n; i += blockDim.x)
    store_plain(out + i * size, type, load_plain(row + i * size, type) * factor);
}

// (x - mean) / sqrt(variance + eps); also a group of channels, which is a row.
KERNEL layer_norm(const u8* x, u8* y, i64 n, Axes shape, Axes strides, float eps, int type) {
  SHARED float part[32];
  const int size = plain_size(type);
  const u8* row = x + place_of(blockIdx.x, shape, strides);
  u8* out = y + blockIdx.x * n * size;
  float sum = 0.0f;
  for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += load_plain(row + i * size, type);
  const float mean = block_sum(sum, part) / (float)n;
  const float factor = 1.0f / sqrtf(mean_square(row, n, type, mean, part) + eps);
  for (i64 i = threadIdx.x; i < n; i += blockDim.x)
    store_plain(out + i * size, type, (load_plain(row + i * size, type) - mean) * factor);
}

// Sum of each row of any strides along the row, times `factor`.
KERNEL sum_rows(const u8* x, float* y, i64 n, i64 step, Axes shape, Axes strides, float factor,
                int type) {
  SHARED float part[32];
  const u8* row = x + place_of(blockIdx.x, shape, strides);
  float sum = 0.0f;
  for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += load_plain(row + i * step, type);
  const float total = block_sum(sum, part);
  if (threadIdx.x == 0) y[blockIdx.x] = total * factor;
}

// Running sums of each row; a thread's elements lie side by side, and it begins with the sum of all
// threads before it.
KERNEL cumsum(const u8* x, u8* y, i64 n, i64 step, Axes shape, Axes strides, int type) {
  SHARED float before[1024];
  const int size = plain_size(type);
  const u8* row = x + place_of(blockIdx.x, shape, strides);
  u8* out = y + blockIdx.x * n * size;
  const i64 each = (n + blockDim.x - 1) / blockDim.x, first = threadIdx.x * each;
  const i64 last = first + each < n ? first + each : n;
  float sum = 0.0f;
  for (i64 i = first; i < last; ++i) sum += load_plain(row + i * step, type);
  before[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    float begun = 0.0f;
    for (int t = 0; t < (int)blockDim.x; ++t) {
      const float own = before[t];
      before[t] = begun;
      begun += own;
    }
  }
  __syncthreads();
  sum = before[threadIdx.x];
  for (i64 i = first; i < last; ++i) {
    sum += load_plain(row + i * step, type);
    store_plain(out + i * size, type, sum);
  }
}
