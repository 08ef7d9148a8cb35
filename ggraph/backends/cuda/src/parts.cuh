// Rows on their way into products: each value as two bf16 numbers, whose sum has 16 of its bits. Four
// values are sixteen bytes: the first numbers, then the second.
#pragma once
#include "pieces.cuh"

DEV Quad parts_of(const float (&v)[4]) {
  Quad four;
  split<As_bf16>(v, four.w, four.w + 2);
  return four;
}

// Parts of y [n], which this block has just written; n is a multiple of four.
DEV void give_parts(const float* y, Quad* parts, i64 n) {
  __syncthreads();
  for (i64 i = threadIdx.x; 4 * i < n; i += blockDim.x) {
    const float v[4] = {y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]};
    parts[i] = parts_of(v);
  }
}

// Parts of what four lanes have side by side, where there is something; for whole warps.
DEV void give_lanes_part(float value, Quad* part, bool there) {
  const float v[4] = {value, SHUFFLE_XOR(value, 1), SHUFFLE_XOR(value, 2), SHUFFLE_XOR(value, 3)};
  if (there && threadIdx.x % 4 == 0) *part = parts_of(v);
}
