// What reads a stored matrix of type WEIGHT but for plain products: experts, decoding, rows by id.
// Legend: n outputs, k inner size, p pairs of (token, expert).
#define MOST_THREADS 256
#include "lanes.cuh"

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

// `count` chunks of eight values, all of a matrix whose rows are whole blocks, as plain values of
// `type`, one thread per chunk; no chunk's place takes a division. 256 values are whole blocks.
KERNEL dequantise(const u8* w, u8* y, i64 count, int type) {
  const i64 t = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= count) return;
  float v[8];
  load_chunk<WEIGHT>(w + t / 32 * row_bytes<WEIGHT>(256), t % 32, 256, v);
  store_eight(y + 8 * t * plain_size(type), type, v);
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
    if (known) load_chunk<WEIGHT>(row, c, k, v);
    for (int i = 0; i < 8; ++i)
      if (8 * c + i < k) y[r * k + 8 * c + i] = known ? v[i] : bits_to_float(0x7fc00000u);
  }
}
