// Products of a stored matrix of type WEIGHT and few rows, on the tensor cores.
//
// A block computes 16 outputs for eight rows, or for four times eight, which then share what it reads
// and decodes of w; rows that are not given are zeros, so a row's bits do not depend on how many
// there are. Its warps take the groups of 32 columns in turn, and their sums are added in the order of
// the warps. x is split into two bf16 numbers (16 bits of precision);
// block types multiply by their codes, which are exact (some with 128 on top, taken off with the
// floor), and scale each span's sum in float32. x and w begin at multiples of 16 bytes.
// Legend: n outputs, k columns (a multiple of 32), m rows of x; g, t: a lane's place in a fragment.
#define MOST_THREADS 512
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

// What a lane holds of a group of 32 columns of two rows of w, for any number of rows of x.
template <class T>
struct Held {
  static const int SPANS = T::SPAN == 16 ? 2 : 1;
  u32 a[2][4];                         // fragments of two products
  u32 rest[2][4];                      // plain types: what they leave out
  float step[SPANS][2], floor[SPANS][2];  // block types: of each span and row
};

template <class T>
DEV void hold_plain(const u8* upper, const u8* lower, int chunk, i64 k, Held<T>& held) {
  const u8* rows[2] = {upper, lower};
  u32 high[2][4], low[2][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) words_of<T, true>(rows[r], chunk, k, high[r], low[r]);
  fragments(high, held.a);
  if (!exact<T>::VALUE) fragments(low, held.rest);
}

template <class T>
DEV void hold_blocks(const u8* upper, const u8* lower, int group, Held<T>& held) {
  codes_of<T>(upper, lower, 4 * group + threadIdx.x % 4, held.a);
#pragma unroll
  for (int s = 0; s < Held<T>::SPANS; ++s) {
    held.floor[s][0] = held.floor[s][1] = 0.0f;
    T::scale(upper, 4 * group + 2 * s, &held.step[s][0], &held.floor[s][0]);
    T::scale(lower, 4 * group + 2 * s, &held.step[s][1], &held.floor[s][1]);
  }
}

// Q4_K: a half of 64 columns, for what two groups share.
DEV void hold_half(const q4_k::Held (&both)[2], int pair, int half, Held<q4_k>& held) {
  u32 words[2][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    q4_k::pairs(both[r], half, words[r]);
    q4_k::scale(both[r], pair % 4 * 2 + half, &held.step[0][r], &held.floor[0][r]);
  }
  fragments(words, held.a);
}

// One span of block types: sum += step * (codes . x) - floor * (ones . x) per row.
template <class T>
DEV void span(const float (&step)[2], const float (&floor)[2], const u32 (&a)[2][4], const Given& x,
              u32 ones, float* sum) {
  float products[4] = {}, totals[4] = {};
  add_products(products, a, x);
  const bool floors = T::FLOOR || paired<T>::VALUE;
  if (floors) {
    const u32 all[2][4] = {{ones, ones, ones, ones}, {ones, ones, ones, ones}};
    add_products(totals, all, x);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[i] = fmaf(step[i / 2], products[i], sum[i]);
    if (floors) {
      float least = floor[i / 2];
      if constexpr (paired<T>::VALUE) least = fmaf((float)T::BIAS, step[i / 2], least);
      sum[i] = fmaf(-least, totals[i], sum[i]);
    }
  }
}

// sum += the group that is held . eight rows of x
template <class T>
DEV void add_group(const Held<T>& held, const Given& x, float* sum) {
  if constexpr (T::SPAN == 0) {  // plain types: the weights too are two bf16 numbers, or one
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      multiply(sum, held.a[h], x.high[h]);
      multiply(sum, held.a[h], x.low[h]);
      if (!exact<T>::VALUE) multiply(sum, held.rest[h], x.high[h]);
    }
  } else if constexpr (T::SPAN == 32) {
    span<T>(held.step[0], held.floor[0], held.a, x, ONES, sum);
  } else {
#pragma unroll
    for (int s = 0; s < 2; ++s) {  // spans of 16: lanes 0, 1 hold the first one, 2 and 3 the second
      const u32 mine = threadIdx.x % 4 / 2 == s ? 0xffffffffu : 0u;
      u32 part[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < 4; ++i) part[h][i] = held.a[h][i] & mine;
      span<T>(held.step[s], held.floor[s], part, x, ONES & mine, sum);
    }
  }
}

// The held group against all rows of the pass, of which this lane reads x from `column` on.
template <class T, int TIMES>
DEV void add_rows(const Held<T>& held, const float* const (&rows)[TIMES], i64 column,
                  float (&sum)[TIMES][4]) {
#pragma unroll
  for (int j = 0; j < TIMES; ++j) {
    float v[8] = {};
    if (rows[j]) eight_floats(rows[j] + column, v);
    add_group<T>(held, given_to<T>(v), sum[j]);
  }
}

// One pass of a block: 16 outputs from n0 on of w [n, k], and TIMES * 8 rows; rows[j] is row 8j + g
// of x or none. Every warp's sums go to `part`.
template <class T, int TIMES>
DEV void tile_of(const u8* w, const float* const (&rows)[TIMES], i64 n0, i64 n, i64 k,
                 float (&part)[WARPS][TILE][TIMES * ROWS]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const i64 bytes = row_bytes<T>(k);
  const u8* upper = w + (n0 + g < n ? n0 + g : n - 1) * bytes;
  const u8* lower = w + (n0 + g + 8 < n ? n0 + g + 8 : n - 1) * bytes;
  const int groups = (int)(k / 32);
  float sum[TIMES][4] = {};
  Held<T> held;
  if constexpr (same<T, q4_k>::VALUE) {
    for (int pair = warp; pair < groups / 2; pair += WARPS) {
      const q4_k::Held both[2] = {q4_k::hold(upper, pair, t), q4_k::hold(lower, pair, t)};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        hold_half(both, pair, half, held);
        add_rows<T, TIMES>(held, rows, 64 * pair + 32 * half + 8 * t, sum);
      }
    }
  } else {
#pragma unroll 2
    for (int group = warp; group < groups; group += WARPS) {
      if constexpr (T::SPAN == 0) hold_plain<T>(upper, lower, 4 * group + t, k, held);
      else hold_blocks<T>(upper, lower, group, held);
      add_rows<T, TIMES>(held, rows, 32 * group + 8 * t, sum);
    }
  }
#pragma unroll
  for (int j = 0; j < TIMES; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      part[warp][g + i / 2 * 8][ROWS * j + 2 * t + i % 2] = sum[j][i];
  __syncthreads();
}

// Sum i of a tile, output i % TILE of row i / TILE, the warps in order.
template <int COUNT>
DEV float total_of(const float (&part)[WARPS][TILE][COUNT], int i) {
  float total = 0.0f;
  for (int v = 0; v < WARPS; ++v) total += part[v][i % TILE][i / TILE];
  return total;
}

template <int TIMES>
DEV void few_rows(const u8* w, const float* x, float* y, const float* rest, i64 n, i64 k, i64 m,
                  float (&part)[WARPS][TILE][TIMES * ROWS]) {
  const i64 n0 = (i64)blockIdx.x * TILE, m0 = (i64)blockIdx.y * (TIMES * ROWS);
  const float* rows[TIMES];
#pragma unroll
  for (int j = 0; j < TIMES; ++j) {
    const i64 mine = m0 + ROWS * j + threadIdx.x % 32 / 4;
    rows[j] = mine < m ? x + mine * k : 0;
  }
  tile_of<WEIGHT, TIMES>(w, rows, n0, n, k, part);
  for (int i = threadIdx.x; i < TILE * TIMES * ROWS; i += blockDim.x) {
    const i64 row = m0 + i / TILE, col = n0 + i % TILE;
    const float total = total_of(part, i);
    if (row < m && col < n) y[row * n + col] = rest ? total + rest[row * n + col] : total;
  }
}

// y [m, n] = x [m, k] . w [n, k], plus rest [m, n] where given; grid (n / 16, m / 8).
KERNEL mul_mat_tile(const u8* w, const float* x, float* y, const float* rest, i64 n, i64 k, i64 m) {
  SHARED float part[WARPS][TILE][ROWS];
  few_rows<1>(w, x, y, rest, n, k, m, part);
}

// The same by 32 rows: grid (n / 16, m / 32).
KERNEL mul_mat_tiles(const u8* w, const float* x, float* y, const float* rest, i64 n, i64 k,
                     i64 m) {
  SHARED float part[WARPS][TILE][4 * ROWS];
  few_rows<4>(w, x, y, rest, n, k, m, part);
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
    const float* const rows[1] = {mine < end ? x + (each ? pair : pair / used) * k : 0};
    if (expert < experts) tile_of<WEIGHT, 1>(matrix, rows, n0, n, k, part);
    for (int i = threadIdx.x; i < TILE * ROWS; i += blockDim.x) {
      const int at = first + i / TILE;
      const i64 col = n0 + i % TILE;
      if (at < end && col < n)
        y[order[at] * n + col] = expert < experts ? total_of(part, i) : bits_to_float(0x7fc00000u);
    }
    __syncthreads();  // before the next pass overwrites `part`
  }
}
