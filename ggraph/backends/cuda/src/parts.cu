// Rows in parts or codes where what makes them does not give them so itself.
#define MOST_THREADS 256
#include "parts.cuh"

// parts of x [4 * count], one thread per four.
KERNEL split_rows(const float* x, Quad* parts, i64 count) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float v[4] = {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
  parts[i] = parts_of(v);
}

// codes of x [4 * count], rows of k behind one another, one thread per four.
KERNEL code_rows(const float* x, Quad* codes, i64 count, i64 k) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  const bool there = i < count;
  float v[4] = {};
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (there) v[e] = x[4 * i + e];
  const i64 row = coded_row(i, k / 4);
  give_codes(v, there, codes, k, row, (int)(i - row * (k / 4)));
}
