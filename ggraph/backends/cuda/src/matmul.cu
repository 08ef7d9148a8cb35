// Products of a stored matrix of type WEIGHT and few float rows, and its dequantisation.
//
// A row's bits do not depend on how many rows are computed with it: every (output, row) pair adds
// its products lane by lane in the order of k, then over the lanes in a fixed tree.
// Legend: n outputs, k inner size, m rows of x, p pairs of (token, expert).
#include "blocks.cuh"

#define OUTPUTS 2  // outputs per warp, so that x is read once for both

// y[m0 .., n0 ..] of one warp: OUTPUTS rows of w against M rows of x; rows past `last` are not kept.
template <class T, int M>
DEV void products(const u8* w, const float* x, float (&sum)[OUTPUTS][M], i64 n0, i64 n, i64 k,
                  i64 m0, i64 last) {
  const int lane = threadIdx.x % 32;
  const i64 bytes = row_bytes<T>(k), chunks = (k + 7) / 8;
  for (i64 c = lane; c < chunks; c += 32) {
    float given[M][8];
#pragma unroll
    for (int j = 0; j < M; ++j) {
      const i64 row = m0 + j < last ? m0 + j : last - 1;
      f32::load((const u8*)(x + row * k), c, k, given[j]);
    }
#pragma unroll
    for (int r = 0; r < OUTPUTS; ++r) {
      if (n0 + r >= n) continue;
      float held[8];
      T::load(w + (n0 + r) * bytes, c, k, held);
#pragma unroll
      for (int j = 0; j < M; ++j)
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[r][j] = fmaf(held[i], given[j][i], sum[r][j]);
    }
  }
}

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

// Pair p of token p / used takes x row p (each = 1) or p / used (each = 0), and matrix ids[p].
// An id outside [0, experts) gives NaN.
KERNEL mul_mat_id(const u8* w, const float* x, float* y, const int* ids, i64 n, i64 k, i64 experts,
                  i64 used, int each) {
  const i64 n0 = ((i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * OUTPUTS;
  if (n0 >= n) return;
  const i64 p = blockIdx.y, row = each ? p : p / used;
  const i64 expert = ids[p];
  const bool known = expert >= 0 && expert < experts;
  float sum[OUTPUTS][1] = {};
  if (known) {
    const u8* matrix = w + expert * n * row_bytes<WEIGHT>(k);
    products<WEIGHT, 1>(matrix, x + row * k, sum, n0, n, k, 0, 1);
  }
#pragma unroll
  for (int r = 0; r < OUTPUTS; ++r) {
    const float total = warp_sum(sum[r][0]);
    if (threadIdx.x % 32 == 0 && n0 + r < n)
      y[p * n + n0 + r] = known ? total : bits_to_float(0x7fc00000u);
  }
}

// Rows of w [rows, k] as plain values of `type`, one thread per eight.
KERNEL dequantise(const u8* w, u8* y, i64 rows, i64 k, int type) {
  const i64 chunks = (k + 7) / 8, t = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= rows * chunks) return;
  const i64 row = t / chunks, c = t % chunks;
  float v[8];
  WEIGHT::load(w + row * row_bytes<WEIGHT>(k), c, k, v);
  for (int i = 0; i < 8; ++i)
    if (8 * c + i < k) store_plain(y + (row * k + 8 * c + i) * plain_size(type), type, v[i]);
}

// y[r] = table[b, ids[r]] for r of batch b = r / per_batch; strides in bytes. An id outside
// [0, rows) gives NaN.
KERNEL get_rows(const u8* table, const u8* ids, float* y, i64 k, i64 rows, i64 row_stride,
                i64 batch_stride, i64 per_batch, int id_type) {
  const i64 r = blockIdx.x, id = load_index(ids, id_type, r);
  const bool known = id >= 0 && id < rows;
  const u8* row = table + r / per_batch * batch_stride + id * row_stride;
  for (i64 c = threadIdx.x; c < (k + 7) / 8; c += blockDim.x) {
    float v[8];
    if (known) WEIGHT::load(row, c, k, v);
    for (int i = 0; i < 8; ++i)
      if (8 * c + i < k) y[r * k + 8 * c + i] = known ? v[i] : bits_to_float(0x7fc00000u);
  }
}
