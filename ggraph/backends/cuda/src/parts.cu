// Rows in parts where what makes them does not give them so itself.
#define MOST_THREADS 256
#include "parts.cuh"

// parts of x [4 * count], one thread per four.
KERNEL split_rows(const float* x, Quad* parts, i64 count) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float v[4] = {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
  parts[i] = parts_of(v);
}
