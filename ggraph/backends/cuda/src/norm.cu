// Normalisation and sums of rows; one block per row, every thread sums its own elements in order.
// Legend: n row length; x and y have `type`, strides in bytes.
#include "parts.cuh"

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

// x / sqrt(mean of squares + eps), times w [n] where given; in parts too where those are.
KERNEL rms_norm(const u8* x, const float* w, u8* y, Quad* parts, i64 n, Axes shape, Axes strides,
                float eps, int type) {
  SHARED float part[32];
  const int size = plain_size(type);
  const u8* row = x + place_of(blockIdx.x, shape, strides);
  u8* out = y + blockIdx.x * n * size;
  const float factor = 1.0f / sqrtf(mean_square(row, n, type, 0.0f, part) + eps);
  for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
    const float v = load_plain(row + i * size, type) * factor;
    store_plain(out + i * size, type, w ? v * w[i] : v);
  }
  if (parts) give_parts((const float*)out, parts + blockIdx.x * (n / 4), n);
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
