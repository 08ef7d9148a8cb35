// Products of stored rows and float rows, a chunk per lane; no tensor cores.
//
// Every (output, row) pair adds its products lane by lane in the order of k; the caller adds the
// lanes in a fixed tree. So a row's bits do not depend on how many rows are computed with it.
// Legend: n outputs, k inner size, m rows of x.
#pragma once
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
      load_chunk<f32>((const u8*)(x + row * k), c, k, given[j]);
    }
#pragma unroll
    for (int r = 0; r < OUTPUTS; ++r) {
      if (n0 + r >= n) continue;
      float held[8];
      load_chunk<T>(w + (n0 + r) * bytes, c, k, held);
#pragma unroll
      for (int j = 0; j < M; ++j)
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[r][j] = fmaf(held[i], given[j][i], sum[r][j]);
    }
  }
}
