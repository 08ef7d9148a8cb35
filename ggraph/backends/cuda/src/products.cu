// Products of two computed tensors of plain types with any strides; one warp per result element.
// Legend: y [B1, B0, m, n] = x [.., m, k] . w [.., n, k]; strides in bytes, (B1, B0, row, k).
#define MOST_THREADS 128
#include "common.cuh"

KERNEL mul_mat_any(const u8* w, const u8* x, float* y, Axes shape, Axes w_strides, Axes x_strides,
                   i64 k, i64 repeat1, i64 repeat0, int w_type, int x_type, const float* rest) {
  const i64 warp = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const i64 n = shape.v[3], m = shape.v[2];
  if (warp >= shape.v[0] * shape.v[1] * m * n) return;
  const i64 col = warp % n, row = warp / n % m, b0 = warp / (n * m) % shape.v[1];
  const i64 b1 = warp / (n * m * shape.v[1]);
  const u8* left = w + b1 / repeat1 * w_strides.v[0] + b0 / repeat0 * w_strides.v[1] +
                   col * w_strides.v[2];
  const u8* right = x + b1 * x_strides.v[0] + b0 * x_strides.v[1] + row * x_strides.v[2];
  float sum = 0.0f;
  for (i64 i = threadIdx.x % 32; i < k; i += 32)
    sum = fmaf(load_plain(left + i * w_strides.v[3], w_type),
               load_plain(right + i * x_strides.v[3], x_type), sum);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) y[warp] = rest ? sum + rest[warp] : sum;
}
