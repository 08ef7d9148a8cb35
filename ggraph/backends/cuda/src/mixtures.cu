// Mixtures of experts: shares of the chosen, sums of their results, rows by expert.
// Legend: T tokens, X experts, U experts per token, n values of a result. Ids are in [0, X); for
// others shares are 0 and nothing is added.
#include "common.cuh"

DEV float chance_of(const float* chances, int id, i64 experts) {
  return id >= 0 && id < experts ? chances[id] : 0.0f;
}

// y [T, U]: the chosen ones of chances [T, X], divided by their sum where asked; a token per thread.
KERNEL moe_shares(const float* chances, const int* ids, float* y, i64 count, i64 experts, i64 used,
                  int normalise, float scale) {
  const i64 t = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= count) return;
  const float* own = chances + t * experts;
  float sum = 0.0f;
  for (i64 u = 0; u < used; ++u) sum += chance_of(own, ids[t * used + u], experts);
  const float whole = normalise ? sum : 1.0f;
  for (i64 u = 0; u < used; ++u)
    y[t * used + u] = chance_of(own, ids[t * used + u], experts) / whole * scale;
}

// y [T, n]: results [T, U, n] by their shares [T, U], in the order of U.
KERNEL moe_mix(const float* values, const float* shares, float* y, i64 count, i64 used, i64 n) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const i64 t = i / n, e = i % n;
  float sum = 0.0f;
  for (i64 u = 0; u < used; ++u)
    sum = fmaf(values[(t * used + u) * n + e], shares[t * used + u], sum);
  y[i] = sum;
}

// y [T, U, n] = x + row ids[t, u] of rows [X, n]; may be x itself.
KERNEL add_id(const float* x, const float* rows, const int* ids, float* y, i64 count, i64 experts,
              i64 n) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int id = ids[i / n];
  y[i] = id >= 0 && id < experts ? x[i] + rows[id * n + i % n] : x[i];
}
