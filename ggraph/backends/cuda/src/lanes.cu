// Products of a stored matrix of a plain type and few float rows: f32, and columns that are no
// multiple of 32. One kernel per number of rows, so that none is computed in vain.
// Legend: n outputs, k inner size, m rows of x.
#define MOST_THREADS 128
#include "lanes.cuh"

template <class T, int M>
DEV void few_rows(const u8* w, const float* x, float* y, const float* rest, i64 n, i64 k, i64 m) {
  const i64 n0 = ((i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * OUTPUTS;
  const i64 m0 = (i64)blockIdx.y * M;
  if (n0 >= n) return;  // the whole warp
  float sum[OUTPUTS][M] = {};
  products<T, M>(w, x, sum, n0, n, k, m0, m);
#pragma unroll
  for (int r = 0; r < OUTPUTS; ++r)
#pragma unroll
    for (int j = 0; j < M; ++j) {
      const float total = warp_sum(sum[r][j]);
      const i64 at = (m0 + j) * n + n0 + r;
      if (threadIdx.x % 32 == 0 && n0 + r < n && m0 + j < m)
        y[at] = rest ? total + rest[at] : total;
    }
}

KERNEL mul_mat_1(const u8* w, const float* x, float* y, const float* rest, i64 n, i64 k, i64 m) {
  few_rows<WEIGHT, 1>(w, x, y, rest, n, k, m);
}
KERNEL mul_mat_2(const u8* w, const float* x, float* y, const float* rest, i64 n, i64 k, i64 m) {
  few_rows<WEIGHT, 2>(w, x, y, rest, n, k, m);
}
KERNEL mul_mat_3(const u8* w, const float* x, float* y, const float* rest, i64 n, i64 k, i64 m) {
  few_rows<WEIGHT, 3>(w, x, y, rest, n, k, m);
}
KERNEL mul_mat_4(const u8* w, const float* x, float* y, const float* rest, i64 n, i64 k, i64 m) {
  few_rows<WEIGHT, 4>(w, x, y, rest, n, k, m);
}
KERNEL mul_mat_5(const u8* w, const float* x, float* y, const float* rest, i64 n, i64 k, i64 m) {
  few_rows<WEIGHT, 5>(w, x, y, rest, n, k, m);
}
KERNEL mul_mat_6(const u8* w, const float* x, float* y, const float* rest, i64 n, i64 k, i64 m) {
  few_rows<WEIGHT, 6>(w, x, y, rest, n, k, m);
}
KERNEL mul_mat_7(const u8* w, const float* x, float* y, const float* rest, i64 n, i64 k, i64 m) {
  few_rows<WEIGHT, 7>(w, x, y, rest, n, k, m);
}
KERNEL mul_mat_8(const u8* w, const float* x, float* y, const float* rest, i64 n, i64 k, i64 m) {
  few_rows<WEIGHT, 8>(w, x, y, rest, n, k, m);
}
