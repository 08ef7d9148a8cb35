// Products of a stored matrix of type WEIGHT and few rows, on the tensor cores.
//
// A block computes 16 outputs for eight rows, or for four times eight, which then share what it reads
// and decodes of w; or twice 16 for eight rows, which share what it reads and splits of x. Rows that
// are not given are zeros, so a row's bits do not depend on how many there are. Its warps take the
// groups of 32 columns in turn, and their sums are added in the order of the warps. x is split into
// two bf16 numbers (16 bits of precision);
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
DEV void fragments(const u32 (&upper)[4], const u32 (&lower)[4], u32 (&a)[2][4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const u32 made[4] = {upper[2 * h], lower[2 * h], upper[2 * h + 1], lower[2 * h + 1]};
#pragma unroll
    for (int i = 0; i < 4; ++i) a[h][i] = made[i];
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
  fragments(words[0], words[1], a);
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
  u32 words[2][2][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) words_of<As_bf16, T, true>(rows[r], chunk, k, words[r]);
  const bool whole = holds<As_bf16, T>::VALUE;
  fragments(words[0][0], words[1][0], held.a);
  if (!whole) fragments(words[0][1], words[1][1], held.rest);
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
  fragments(words[0], words[1], held.a);
}

// Sums of x over a span in each lane's place, which floors are multiplied by.
template <class T>
DEV void totals_of(const Given& x, u32 ones, float (&totals)[4]) {
  const u32 all[2][4] = {{ones, ones, ones, ones}, {ones, ones, ones, ones}};
  if (T::FLOOR || paired<T>::VALUE) add_products(totals, all, x);
}

// One span of block types: sum += step * (codes . x) - floor * totals per row. The first one of a
// block's makes the totals.
template <class T>
DEV void span(const float (&step)[2], const float (&floor)[2], const u32 (&a)[2][4], const Given& x,
              u32 ones, bool first, float (&totals)[4], float* sum) {
  float products[4] = {};
  add_products(products, a, x);
  if (first) totals_of<T>(x, ones, totals);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[i] = fmaf(step[i / 2], products[i], sum[i]);
    if (T::FLOOR || paired<T>::VALUE) {
      float least = floor[i / 2];
      if constexpr (paired<T>::VALUE) least = fmaf((float)T::BIAS, step[i / 2], least);
      sum[i] = fmaf(-least, totals[i], sum[i]);
    }
  }
}

// sum[o] += the groups that are held . eight rows of x
template <class T, int OUT>
DEV void add_group(const Held<T> (&held)[OUT], const Given& x, float (&sum)[OUT][4]) {
  if constexpr (T::SPAN == 0) {  // plain types: the weights too are two bf16 numbers, or one
#pragma unroll
    for (int o = 0; o < OUT; ++o)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        multiply(sum[o], held[o].a[h], x.high[h]);
        multiply(sum[o], held[o].a[h], x.low[h]);
        if (!holds<As_bf16, T>::VALUE) multiply(sum[o], held[o].rest[h], x.high[h]);
      }
  } else {
#pragma unroll
    for (int s = 0; s < Held<T>::SPANS; ++s) {  // of 16: lanes 0, 1 hold the first, 2 and 3 the second
      const u32 mine = T::SPAN == 32 || threadIdx.x % 4 / 2 == s ? 0xffffffffu : 0u;
      float totals[4] = {};
#pragma unroll
      for (int o = 0; o < OUT; ++o) {
        u32 part[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int i = 0; i < 4; ++i) part[h][i] = held[o].a[h][i] & mine;
        span<T>(held[o].step[s], held[o].floor[s], part, x, ONES & mine, o == 0, totals,
                sum[o]);
      }
    }
  }
}

// The held groups against all rows of the pass, of which this lane reads x from `column` on.
template <class T, int OUT, int TIMES>
DEV void add_rows(const Held<T> (&held)[OUT], const float* const (&rows)[TIMES], i64 column,
                  float (&sum)[TIMES][OUT][4]) {
#pragma unroll
  for (int j = 0; j < TIMES; ++j) {
    float v[8] = {};
    if (rows[j]) eight_floats(rows[j] + column, v);
    add_group<T, OUT>(held, given_to<T>(v), sum[j]);
  }
}

// One pass of a block: OUT * 16 outputs from n0 on of w [n, k], and TIMES * 8 rows; rows[j] is row
// 8j + g of x or none. Every warp's sums go to `part`.
template <class T, int OUT, int TIMES>
DEV void tile_of(const u8* w, const float* const (&rows)[TIMES], i64 n0, i64 n, i64 k,
                 float (&part)[WARPS][OUT * TILE][TIMES * ROWS]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const i64 bytes = row_bytes<T>(k);
  const u8 *upper[OUT], *lower[OUT];
#pragma unroll
  for (int o = 0; o < OUT; ++o) {
    const i64 first = n0 + TILE * o + g;
    upper[o] = w + (first < n ? first : n - 1) * bytes;
    lower[o] = w + (first + 8 < n ? first + 8 : n - 1) * bytes;
  }
  const int groups = (int)(k / 32);
  float sum[TIMES][OUT][4] = {};
  Held<T> held[OUT];
  if constexpr (same<T, q4_k>::VALUE) {
    for (int pair = warp; pair < groups / 2; pair += WARPS) {
      q4_k::Held both[OUT][2];
#pragma unroll
      for (int o = 0; o < OUT; ++o) {
        both[o][0] = q4_k::hold(upper[o], pair, t);
        both[o][1] = q4_k::hold(lower[o], pair, t);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int o = 0; o < OUT; ++o) hold_half(both[o], pair, half, held[o]);
        add_rows<T, OUT, TIMES>(held, rows, 64 * pair + 32 * half + 8 * t, sum);
      }
    }
  } else {
    constexpr int AT_ONCE = T::SPAN == 0 || OUT == 1 ? 2 : 1;  // more would not fit the registers
#pragma unroll AT_ONCE
    for (int group = warp; group < groups; group += WARPS) {
#pragma unroll
      for (int o = 0; o < OUT; ++o)
        if constexpr (T::SPAN == 0) hold_plain<T>(upper[o], lower[o], 4 * group + t, k, held[o]);
        else hold_blocks<T>(upper[o], lower[o], group, held[o]);
      add_rows<T, OUT, TIMES>(held, rows, 32 * group + 8 * t, sum);
    }
  }
#pragma unroll
  for (int j = 0; j < TIMES; ++j)
#pragma unroll
    for (int o = 0; o < OUT; ++o)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        part[warp][TILE * o + g + i / 2 * 8][ROWS * j + 2 * t + i % 2] = sum[j][o][i];
  __syncthreads();
}

// Sum i of a tile, output i % OUTPUTS of row i / OUTPUTS, the warps in order.
template <int OUTPUTS, int COUNT>
DEV float total_of(const float (&part)[WARPS][OUTPUTS][COUNT], int i) {
  float total = 0.0f;
  for (int v = 0; v < WARPS; ++v) total += part[v][i % OUTPUTS][i / OUTPUTS];
  return total;
}

template <int OUT, int TIMES>
DEV void few_rows(const u8* w, const float* x, float* y, const float* rest, i64 n, i64 k, i64 m,
                  float (&part)[WARPS][OUT * TILE][TIMES * ROWS]) {
  const i64 n0 = (i64)blockIdx.x * (OUT * TILE), m0 = (i64)blockIdx.y * (TIMES * ROWS);
  const float* rows[TIMES];
#pragma unroll
  for (int j = 0; j < TIMES; ++j) {
    const i64 mine = m0 + ROWS * j + threadIdx.x % 32 / 4;
    rows[j] = mine < m ? x + mine * k : 0;
  }
  tile_of<WEIGHT, OUT, TIMES>(w, rows, n0, n, k, part);
  for (int i = threadIdx.x; i < OUT * TILE * TIMES * ROWS; i += blockDim.x) {
    const i64 row = m0 + i / (OUT * TILE), col = n0 + i % (OUT * TILE);
    const float total = total_of(part, i);
    if (row < m && col < n) y[row * n + col] = rest ? total + rest[row * n + col] : total;
  }
}

// y [m, n] = x [m, k] . w [n, k], plus rest [m, n] where given; grid (n / 16, m / 8).
KERNEL mul_mat_tile(const u8* w, const float* x, float* y, const float* rest, i64 n, i64 k, i64 m) {
  SHARED float part[WARPS][TILE][ROWS];
  few_rows<1, 1>(w, x, y, rest, n, k, m, part);
}

// The same by 32 outputs, with the same bits: grid (n / 32, m / 8).
KERNEL mul_mat_twin(const u8* w, const float* x, float* y, const float* rest, i64 n, i64 k, i64 m) {
  SHARED float part[WARPS][2 * TILE][ROWS];
  few_rows<2, 1>(w, x, y, rest, n, k, m, part);
}

// The same by 32 rows: grid (n / 16, m / 32).
KERNEL mul_mat_tiles(const u8* w, const float* x, float* y, const float* rest, i64 n, i64 k,
                     i64 m) {
  SHARED float part[WARPS][TILE][4 * ROWS];
  few_rows<1, 4>(w, x, y, rest, n, k, m, part);
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
    if (expert < experts) tile_of<WEIGHT, 1, 1>(matrix, rows, n0, n, k, part);
    for (int i = threadIdx.x; i < TILE * ROWS; i += blockDim.x) {
      const int at = first + i / TILE;
      const i64 col = n0 + i % TILE;
      if (at < end && col < n)
        y[order[at] * n + col] = expert < experts ? total_of(part, i) : bits_to_float(0x7fc00000u);
    }
    __syncthreads();  // before the next pass overwrites `part`
  }
}
