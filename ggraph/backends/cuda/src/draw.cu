// Tokens drawn from the greatest logits of each row, by the law of ggraph/ops/draw.py, bit for bit:
// every operation is rounded by itself (no contraction), every sum goes from one to the next.
// Legend: n logits of a row, k candidates.
#include "common.cuh"

enum { MOST = 1024, TERMS = 13 };  // candidates of a row; terms of a power

// 1 / i!, the last first.
TABLE double terms[TERMS] = {
    1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0,
    1.0 / 5040.0,      1.0 / 720.0,      1.0 / 120.0,     1.0 / 24.0,     1.0 / 6.0,
    1.0 / 2.0,         1.0,              1.0};

// e^x of x at most 0; 0 below e^-700, and of what is no number.
DEV double power(double x) {
  if (!(x >= -700.0)) return 0.0;
  const double n = rint(__dmul_rn(x, 1.4426950408889634));
  double r = __dadd_rn(x, -__dmul_rn(n, 0.6931471803691238));
  r = __dadd_rn(r, -__dmul_rn(n, 1.9082149292705877e-10));
  double y = terms[0];
  for (int i = 1; i < TERMS; ++i) y = __dadd_rn(__dmul_rn(y, r), terms[i]);
  return __dmul_rn(y, __longlong_as_double(((i64)n + 1023) << 52));
}

// The first place at which the summed law [k] exceeds `number` as a share of it all.
DEV int first_beyond(const double* law, int k, double number) {
  double total = 0.0, sum = 0.0;
  for (int at = 0; at < k; ++at) total = __dadd_rn(total, law[at]);
  const double share = __dmul_rn(number, total);
  int last = 0;
  for (int at = 0; at < k; ++at) {
    sum = __dadd_rn(sum, law[at]);
    if (sum > share) return at;
    if (law[at] > 0.0) last = at;
  }
  return last;
}

// How many of the best candidates, whose chances are `law` [k], have together `top_p` of it all;
// the sum goes by id, and `best_at` has the place of each id among the best.
DEV int nucleus(const double* law, const int* best_at, int k, double top_p) {
  double total = 0.0, sum = 0.0;
  for (int at = 0; at < k; ++at) total = __dadd_rn(total, law[best_at[at]]);
  const double enough = __dmul_rn(top_p, total);
  for (int i = 0; i < k; ++i) {
    sum = __dadd_rn(sum, law[i]);
    if (sum >= enough) return i + 1;
  }
  return k;
}

// y [rows]: a token by each of `numbers`; -1, or `always` the best one, where the greatest logit is
// infinite, or one of the candidates `ids` [rows, k], best first, no number. A block per row.
KERNEL draw(const float* logits, const int* ids, const double* numbers, int* y, i64 n, int k,
            double temp, double top_p, double least, int always) {
  SHARED double law[MOST];
  SHARED int best_at[MOST];  // in order of ids
  SHARED int many, bad;
  const float* own = logits + blockIdx.x * n;
  const int* its = ids + (i64)blockIdx.x * k;
  const double best = own[its[0]];
  if (threadIdx.x == 0) bad = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < k; i += blockDim.x) {
    const double behind = __dadd_rn(own[its[i]], -best);
    if (behind != behind) bad = 1;
    int before = 0;
    for (int j = 0; j < k; ++j) before += its[j] < its[i];
    best_at[before] = i;
    law[i] = power(behind);
  }
  __syncthreads();
  if (threadIdx.x == 0) many = top_p < 1.0 ? nucleus(law, best_at, k, top_p) : k;
  __syncthreads();
  const double floor = __dadd_rn(best, least);
  for (int at = threadIdx.x; at < k; at += blockDim.x) {
    const int i = best_at[at];
    const double score = own[its[i]];
    const bool stays = i < many && score >= floor;
    law[at] = stays ? power(__ddiv_rn(__dadd_rn(score, -best), temp)) : 0.0;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const int none = always ? its[0] : -1;
  y[blockIdx.x] = bad ? none : its[best_at[first_beyond(law, k, numbers[blockIdx.x])]];
}
