// Products of a stored matrix of type WEIGHT and up to eight rows per pass, on the tensor cores.
//
// A block computes 16 outputs for eight rows; rows that are not given are zeros, so a row's bits do
// not depend on how many there are. Its warps take the groups of 32 columns in turn, and their sums
// are added in the order of the warps. x is split into two bf16 numbers (16 bits of precision);
// block types multiply by their codes, which are exact (some with 128 on top, taken off with the
// floor), and scale each span's sum in float32. x and w begin at multiples of 16 bytes.
// Legend: n outputs, k columns (a multiple of 32), m rows of x; g, t: a lane's place in a fragment.
#include "pieces.cuh"

#define TILE 16
#define ROWS 8
#define WARPS 16
#define ONES 0x3f803f80u  // two bf16 ones

// sum += codes (rows g and g + 8) . x, both halves of x
DEV void add_products(float* sum, const u32 (&a)[2][4], const Given& x) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    multiply(sum, a[h], x.high[h]);
    multiply(sum, a[h], x.low[h]);
  }
}

// Plain types: the weights too are two bf16 numbers, unless they are bf16 already.
template <class T>
DEV void plain_group(const u8* upper, const u8* lower, int chunk, i64 k, const Given& x,
                     float* sum) {
  const u8* rows[2] = {upper, lower};
  u32 high[2][4], low[2][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) words_of<T, true>(rows[r], chunk, k, high[r], low[r]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const u32 a[4] = {high[0][2 * h], high[1][2 * h], high[0][2 * h + 1], high[1][2 * h + 1]};
    multiply(sum, a, x.high[h]);
    multiply(sum, a, x.low[h]);
    if (!exact<T>::VALUE) {
      const u32 b[4] = {low[0][2 * h], low[1][2 * h], low[0][2 * h + 1], low[1][2 * h + 1]};
      multiply(sum, b, x.high[h]);
    }
  }
}

template <class A, class B>
struct same {
  static const bool VALUE = false;
};
template <class A>
struct same<A, A> {
  static const bool VALUE = true;
};

// Types whose codes come as pairs of bf16 numbers with a bias (see `nibble_pairs`).
template <class T>
struct paired {
  static const bool VALUE = same<T, q4_0>::VALUE || same<T, q4_1>::VALUE || same<T, q4_k>::VALUE;
};

// A lane's chunk of x in the order of its weights' codes.
template <class T>
DEV Given given_to(const float* v) {
  if (!paired<T>::VALUE) return given_of(v);
  const float turned[8] = {v[0], v[2], v[1], v[3], v[4], v[6], v[5], v[7]};
  return given_of(turned);
}

// Words of two rows as the fragments of two products.
DEV void fragments(const u32 (&words)[2][4], u32 (&a)[2][4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      a[h][r] = words[r][2 * h];
      a[h][r + 2] = words[r][2 * h + 1];
    }
}

// The codes of a lane's chunk of two rows as fragments.
template <class T>
DEV void codes_of(const u8* upper, const u8* lower, int chunk, u32 (&a)[2][4]) {
  const u8* rows[2] = {upper, lower};
  u32 words[2][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if constexpr (paired<T>::VALUE) {
      T::pairs(rows[r], chunk, words[r]);
    } else {
      int q[8];
      T::codes(rows[r], chunk, q);
#pragma unroll
      for (int i = 0; i < 4; ++i) words[r][i] = bf16_pair((float)q[2 * i], (float)q[2 * i + 1]);
    }
  }
  fragments(words, a);
}

// One span of block types: sum += step * (codes . x) - floor * (ones . x) per row.
template <class T>
DEV void span(const float (&step)[2], float (&floor)[2], const u32 (&a)[2][4], const Given& x,
              u32 ones, float* sum) {
  float products[4] = {}, totals[4] = {};
  add_products(products, a, x);
  if constexpr (paired<T>::VALUE) {
    for (int r = 0; r < 2; ++r) floor[r] = fmaf((float)T::BIAS, step[r], floor[r]);
  }
  const bool floors = T::FLOOR || paired<T>::VALUE;
  if (floors) {
    const u32 all[2][4] = {{ones, ones, ones, ones}, {ones, ones, ones, ones}};
    add_products(totals, all, x);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[i] = fmaf(step[i / 2], products[i], sum[i]);
    if (floors) sum[i] = fmaf(-floor[i / 2], totals[i], sum[i]);
  }
}

template <class T>
DEV void block_group(const u8* upper, const u8* lower, int group, const Given& x, float* sum) {
  const int t = threadIdx.x % 4;
  u32 a[2][4];
  float step[2], floor[2] = {0.0f, 0.0f};
  codes_of<T>(upper, lower, 4 * group + t, a);
  if (T::SPAN == 32) {
    T::scale(upper, 4 * group, &step[0], &floor[0]);
    T::scale(lower, 4 * group, &step[1], &floor[1]);
    span<T>(step, floor, a, x, ONES, sum);
    return;
  }
#pragma unroll
  for (int s = 0; s < 2; ++s) {  // spans of 16: lanes 0, 1 hold the first one, 2 and 3 the second
    const u32 mine = t / 2 == s ? 0xffffffffu : 0u;
    u32 part[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < 4; ++i) part[h][i] = a[h][i] & mine;
    T::scale(upper, 4 * group + 2 * s, &step[0], &floor[0]);
    T::scale(lower, 4 * group + 2 * s, &step[1], &floor[1]);
    span<T>(step, floor, part, x, ONES & mine, sum);
  }
}

// Q4_K, 64 columns in one step, for what two groups share.
DEV void q4_k_step(const u8* upper, const u8* lower, int pair, const float* row, float* sum) {
  const int t = threadIdx.x % 4;
  const q4_k::Held held[2] = {q4_k::hold(upper, pair, t), q4_k::hold(lower, pair, t)};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float v[8] = {}, step[2], floor[2];
    if (row) eight_floats(row + 64 * pair + 32 * half + 8 * t, v);
    u32 words[2][4], a[2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      q4_k::pairs(held[r], half, words[r]);
      q4_k::scale(held[r], pair % 4 * 2 + half, &step[r], &floor[r]);
    }
    fragments(words, a);
    span<q4_k>(step, floor, a, given_to<q4_k>(v), ONES, sum);
  }
}

// One pass of a block: 16 outputs from n0 on of w [n, k], and eight rows, of which `row` is row g of
// x or none. Every warp's sums go to `part`.
template <class T>
DEV void tile_of(const u8* w, const float* row, i64 n0, i64 n, i64 k,
                 float (&part)[WARPS][TILE][ROWS]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const i64 bytes = row_bytes<T>(k);
  const u8* upper = w + (n0 + g < n ? n0 + g : n - 1) * bytes;
  const u8* lower = w + (n0 + g + 8 < n ? n0 + g + 8 : n - 1) * bytes;
  const int groups = (int)(k / 32);
  float sum[4] = {};
  if constexpr (same<T, q4_k>::VALUE) {
    for (int pair = warp; pair < groups / 2; pair += WARPS) q4_k_step(upper, lower, pair, row, sum);
  } else {
#pragma unroll 2
    for (int group = warp; group < groups; group += WARPS) {
      float v[8] = {};
      if (row) eight_floats(row + 32 * group + 8 * t, v);
      const Given x8 = given_to<T>(v);
      if constexpr (T::SPAN == 0) plain_group<T>(upper, lower, 4 * group + t, k, x8, sum);
      else block_group<T>(upper, lower, group, x8, sum);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) part[warp][g + i / 2 * 8][2 * t + i % 2] = sum[i];
  __syncthreads();
}

// Sum i of a tile, output i % TILE of row i / TILE, the warps in order.
DEV float total_of(const float (&part)[WARPS][TILE][ROWS], int i) {
  float total = 0.0f;
  for (int v = 0; v < WARPS; ++v) total += part[v][i % TILE][i / TILE];
  return total;
}

// y [m, n] = x [m, k] . w [n, k], plus rest [m, n] where given; grid (n / 16, m / 8).
KERNEL mul_mat_tile(const u8* w, const float* x, float* y, const float* rest, i64 n, i64 k, i64 m) {
  SHARED float part[WARPS][TILE][ROWS];
  const i64 n0 = (i64)blockIdx.x * TILE, m0 = (i64)blockIdx.y * ROWS;
  const i64 mine = m0 + threadIdx.x % 32 / 4;
  tile_of<WEIGHT>(w, mine < m ? x + mine * k : 0, n0, n, k, part);
  for (int i = threadIdx.x; i < TILE * ROWS; i += blockDim.x) {
    const i64 row = m0 + i / TILE, col = n0 + i % TILE;
    const float total = total_of(part, i);
    if (row < m && col < n) y[row * n + col] = rest ? total + rest[row * n + col] : total;
  }
}

// y[p] = x[row of p] . w[ids[p]] for pairs p grouped by expert (experts.cu), eight at a time; a pair
// of token p / used takes x row p (each = 1) or p / used (each = 0). Group `experts` gives NaN. A
// pair's bits do not depend on its group. Grid (n / 16, groups).
KERNEL mul_mat_id_tile(const u8* w, const float* x, float* y, const int* order, const int* starts,
                       const int* active, i64 n, i64 k, i64 experts, i64 used, int each) {
  SHARED float part[WARPS][TILE][ROWS];
  if ((int)blockIdx.y >= active[0]) return;  // the whole block
  const i64 expert = active[1 + blockIdx.y], n0 = (i64)blockIdx.x * TILE;
  const int end = starts[expert + 1];
  const u8* matrix = w + expert * n * row_bytes<WEIGHT>(k);
  for (int first = starts[expert]; first < end; first += ROWS) {
    const int mine = first + threadIdx.x % 32 / 4;
    const i64 pair = mine < end ? order[mine] : 0;
    const float* row = x + (each ? pair : pair / used) * k;
    if (expert < experts) tile_of<WEIGHT>(matrix, mine < end ? row : 0, n0, n, k, part);
    for (int i = threadIdx.x; i < TILE * ROWS; i += blockDim.x) {
      const int at = first + i / TILE;
      const i64 col = n0 + i % TILE;
      if (at < end && col < n)
        y[order[at] * n + col] = expert < experts ? total_of(part, i) : bits_to_float(0x7fc00000u);
    }
    __syncthreads();  // before the next pass overwrites `part`
  }
}
