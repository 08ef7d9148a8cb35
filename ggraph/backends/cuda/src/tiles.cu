// Products of a stored matrix of type WEIGHT and few rows, on the tensor cores.
//
// A block computes 16 outputs for eight rows, or for four times eight, which then share what it reads
// and decodes of w; or twice 16 for eight rows, which share what it reads of x. Rows that are not
// given are zeros, so a row's bits do not depend on how many there are. Its warps take the groups of
// 32 columns in turn, and their sums are added in the order of the warps. x comes in parts
// (parts.cuh), two bf16 numbers a value; block types multiply by their codes, which are exact (most
// raised by a power of two, taken off with the floor), and scale each span's sum in float32. Parts
// and w begin at multiples of 16 bytes.
// Legend: n outputs, k columns (a multiple of 32), m rows of x; g, t: a lane's place in a fragment.
#define MOST_THREADS 512
#include "parts.cuh"
#include "units.cuh"

#define TILE 16
#define ROWS 8
#define WARPS 16
#define LARGE (WEIGHT::TOGETHER > 2)  // what a lane holds
#define ONES 0x3f803f80u  // two bf16 ones

// What a lane multiplies of a row of x in a group of 32 columns: fragments of two products.
struct Given {
  Quad half[2];
};

// sum += codes (rows g and g + 8) . x, both parts of x
DEV void add_products(float* sum, const u32 (&a)[4], const Quad& x) {
  const u32 high[2] = {x.w[0], x.w[1]}, low[2] = {x.w[2], x.w[3]};
  multiply(sum, a, high);
  multiply(sum, a, low);
}

// Words of two rows as the fragment of a product.
DEV void fragment(const u32* upper, const u32* lower, u32 (&a)[4]) {
  a[0] = upper[0], a[1] = lower[0], a[2] = upper[1], a[3] = lower[1];
}

// Where in a group of 32 columns half h of lane t's eight values begins: in a span of its own.
template <class T>
DEV int begin_of(int h, int t) {
  return T::SPAN == 16 ? 16 * h + 4 * t : 8 * t + 4 * h;
}

// What is added to codes of BITS bits, so that their bits alone make a bf16 number: from 2^BITS on,
// bf16 counts in steps that are no larger than one.
template <class T>
DEV float raised() {
  return (float)((T::BITS ? 1 << T::BITS : 0) + T::RAISED);
}

// Four codes as two words of bf16 numbers.
template <class T>
DEV void words_of_codes(u32 codes, u32* words) {
  if constexpr (T::BITS > 0) {
    const u32 power = 127 + T::BITS, odd = power % 2 ? 0x80808080u : 0u;
    const u32 bytes = codes << (7 - T::BITS) | odd, high = power / 2 * 0x01010101u;
    words[0] = permute(bytes, high, 0x4140u);
    words[1] = permute(bytes, high, 0x4342u);
  } else {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = (float)code_of<T>(codes >> 8 * i & 255);
    words[0] = bf16_pair(v[0], v[1]);
    words[1] = bf16_pair(v[2], v[3]);
  }
}

// What a lane holds of a group of 32 columns of two rows of w, for any number of rows of x.
template <class T>
struct Held {
  static const int SPANS = T::SPAN == 16 ? 2 : 1;
  u32 a[2][4];                            // fragments of two products
  u32 rest[2][4];                         // plain types: what they leave out
  float step[SPANS][2], floor[SPANS][2];  // block types: of each span and row
};

template <class T>
DEV void hold_plain(const u8* upper, const u8* lower, int chunk, i64 k, Held<T>& held) {
  const u8* rows[2] = {upper, lower};
  u32 words[2][2][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) words_of<As_bf16, T, true>(rows[r], chunk, k, words[r]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    fragment(words[0][0] + 2 * h, words[1][0] + 2 * h, held.a[h]);
    if (!holds<As_bf16, T>::VALUE) fragment(words[0][1] + 2 * h, words[1][1] + 2 * h, held.rest[h]);
  }
}

// Fragments of the codes, and the steps and floors that `scale` gives of span s and row r.
template <class T, class Codes, class Scale>
DEV void hold_codes(Codes codes, Scale scale, Held<T>& held) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    u32 words[2][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) words_of_codes<T>(codes(r, h), words[r]);
    fragment(words[0], words[1], held.a[h]);
  }
#pragma unroll
  for (int s = 0; s < Held<T>::SPANS; ++s)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float floor = 0.0f;
      scale(r, s, &held.step[s][r], &floor);
      held.floor[s][r] = fmaf(raised<T>(), held.step[s][r], floor);
    }
}

template <class T>
DEV void hold_blocks(const u8* upper, const u8* lower, int group, Held<T>& held) {
  const u8* rows[2] = {upper, lower};
  const int t = threadIdx.x % 4;
  hold_codes<T>([&](int r, int h) { return T::four(rows[r], 32 * group + begin_of<T>(h, t)); },
                [&](int r, int s, float* step, float* floor) {
                  T::scale(rows[r], 4 * group + 2 * s, step, floor);
                },
                held);
}

// The same of types whose groups share bytes: number `group` of a part.
template <class T>
DEV void hold_shared(const typename T::Held (&both)[2], int group, Held<T>& held) {
  hold_codes<T>([&](int r, int h) { return T::four(both[r], group, h); },
                [&](int r, int s, float* step, float* floor) {
                  T::scale(both[r], group, s, step, floor);
                },
                held);
}

// Sum number s of block types: sum += step * (codes . x) - floor * totals per row, where totals are
// sums of x over the span, which the first of a block's tiles makes.
template <class T>
DEV void span(const Held<T>& held, int s, const Given& x, bool first, float (&totals)[4],
              float* sum) {
  const u32 ones[4] = {ONES, ONES, ONES, ONES};
  float products[4] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (T::SPAN == 16 && h != s) continue;
    add_products(products, held.a[h], x.half[h]);
    if ((T::FLOOR || T::BITS > 0) && first) add_products(totals, ones, x.half[h]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[i] = fmaf(held.step[s][i / 2], products[i], sum[i]);
    if (T::FLOOR || T::BITS > 0) sum[i] = fmaf(-held.floor[s][i / 2], totals[i], sum[i]);
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
        add_products(sum[o], held[o].a[h], x.half[h]);
        const u32 high[2] = {x.half[h].w[0], x.half[h].w[1]};
        if (!holds<As_bf16, T>::VALUE) multiply(sum[o], held[o].rest[h], high);
      }
  } else {
#pragma unroll
    for (int s = 0; s < Held<T>::SPANS; ++s) {
      float totals[4] = {};
#pragma unroll
      for (int o = 0; o < OUT; ++o) span<T>(held[o], s, x, o == 0, totals, sum[o]);
    }
  }
}

// Rows g, 8 + g, .. of x in parts, of which there are `count`; `apart` from one another in Quads.
struct Rows {
  const Quad* first;
  int apart, count;
};

// The held group against all rows of the pass, of which this lane reads parts of x.
template <class T, int OUT, int TIMES>
DEV void add_rows(const Held<T> (&held)[OUT], const Rows& rows, int group,
                  float (&sum)[TIMES][OUT][4]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < TIMES; ++j) {
    Given x = {};
    if (j < rows.count)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        x.half[h] = rows.first[j * rows.apart + 8 * group + begin_of<T>(h, t) / 4];
    add_group<T, OUT>(held, x, sum[j]);
  }
}

// One pass of a block: OUT tiles of w [n, k], the first from output n0 on, and TIMES * 8 rows. Every
// warp's sums go to `part`. A PAIR is the tile at n0 of w and that of `other`.
template <class T, int OUT, int TIMES, bool PAIR = false>
DEV void tile_of(const u8* w, const Rows& rows, i64 n0, i64 n, i64 k,
                 float (&part)[WARPS][OUT * TILE][TIMES * ROWS], const u8* other = 0) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const i64 bytes = row_bytes<T>(k);
  const u8 *upper[OUT], *lower[OUT];
#pragma unroll
  for (int o = 0; o < OUT; ++o) {
    const u8* from = PAIR && o ? other : w;
    const i64 first = n0 + (PAIR ? 0 : TILE * o) + g;
    upper[o] = from + (first < n ? first : n - 1) * bytes;
    lower[o] = from + (first + 8 < n ? first + 8 : n - 1) * bytes;
  }
  const int groups = (int)(k / 32);
  float sum[TIMES][OUT][4] = {};
  Held<T> held[OUT];
  if constexpr (T::TOGETHER > 1 && T::TOGETHER * OUT * TIMES < 8) {  // else registers are too few
    for (int at = warp; at < groups / T::TOGETHER; at += WARPS) {
      typename T::Held both[OUT][2];
#pragma unroll
      for (int o = 0; o < OUT; ++o) {
        both[o][0] = T::hold(upper[o], at, t);
        both[o][1] = T::hold(lower[o], at, t);
      }
#pragma unroll
      for (int i = 0; i < T::TOGETHER; ++i) {
#pragma unroll
        for (int o = 0; o < OUT; ++o) hold_shared<T>(both[o], i, held[o]);
        add_rows<T, OUT, TIMES>(held, rows, T::TOGETHER * at + i, sum);
      }
    }
  } else {
    constexpr int AT_ONCE = T::SPAN == 0 || OUT * TIMES == 1 ? 2 : 1;
    constexpr int NEXT = T::TOGETHER * (WARPS - 1) + 1;  // the order of sums is that of above
#pragma unroll AT_ONCE
    for (int group = T::TOGETHER * warp; group < groups;
         group += group % T::TOGETHER == T::TOGETHER - 1 ? NEXT : 1) {
#pragma unroll
      for (int o = 0; o < OUT; ++o)
        if constexpr (T::SPAN == 0) hold_plain<T>(upper[o], lower[o], 4 * group + t, k, held[o]);
        else hold_blocks<T>(upper[o], lower[o], group, held[o]);
      add_rows<T, OUT, TIMES>(held, rows, group, sum);
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
DEV void few_rows(const u8* w, const Quad* x, float* y, const float* rest, i64 n, i64 k, i64 m,
                  float (&part)[WARPS][OUT * TILE][TIMES * ROWS], int block) {
  const i64 n0 = (i64)block * (OUT * TILE);
  const int m0 = blockIdx.y * (TIMES * ROWS), mine = m0 + threadIdx.x % 32 / 4, quads = (int)k / 4;
  const Rows rows = {x + (i64)mine * quads, ROWS * quads, ((int)m - mine + ROWS - 1) / ROWS};
  tile_of<WEIGHT, OUT, TIMES>(w, rows, n0, n, k, part);
  for (int i = threadIdx.x; i < OUT * TILE * TIMES * ROWS; i += blockDim.x) {
    const i64 row = m0 + i / (OUT * TILE), col = n0 + i % (OUT * TILE);
    const float total = total_of(part, i);
    if (row < m && col < n) y[row * n + col] = rest ? total + rest[row * n + col] : total;
  }
}

// Up to four matrices; those that are not given have no outputs.
struct Matrices {
  const u8* of[4];
};

// The same of several matrices with n outputs each, in their order: which of them is this block's.
template <int OUT, int TIMES>
DEV void few_rows_of(const Matrices& w, const Quad* x, float* y, const Axes& n, i64 k, i64 m,
                     float (&part)[WARPS][OUT * TILE][TIMES * ROWS]) {
  const u8* own = w.of[0];
  i64 count = n.v[0];
  int block = blockIdx.x;
#pragma unroll
  for (int i = 1; i < 4; ++i) {
    const int blocks = (int)((count + OUT * TILE - 1) / (OUT * TILE));
    if (block < blocks) break;
    block -= blocks, y += m * count, own = w.of[i], count = n.v[i];
  }
  few_rows<OUT, TIMES>(own, x, y, 0, count, k, m, part, block);
}

// Rows m0 .. of x [m, k], as a lane reads them.
DEV Rows rows_from(const Quad* x, int m0, i64 k, i64 m) {
  const int mine = m0 + threadIdx.x % 32 / 4, quads = (int)k / 4;
  return {x + (i64)mine * quads, ROWS * quads, ((int)m - mine + ROWS - 1) / ROWS};
}

// The gated unit (`op` as in units.cuh) of sums that `gate` and `up` give of output i % TILE of row
// i / TILE; in parts too where those are given: n is a multiple of four then.
template <int TIMES, class Gate, class Up>
DEV void gate_rows(Gate gate, Up up, float* y, Quad* parts, int op, i64 n, i64 m) {
  const i64 n0 = (i64)blockIdx.x * TILE;
  const int m0 = blockIdx.y * (TIMES * ROWS);
  for (int i = threadIdx.x; i < TILE * TIMES * ROWS; i += blockDim.x) {
    const i64 row = m0 + i / TILE, col = n0 + i % TILE;
    if (row < m && col < n) y[row * n + col] = two_of(op, gate(i), up(i));
  }
  if (!parts) return;
  __syncthreads();
  for (int i = threadIdx.x; i < TILE / 4 * TIMES * ROWS; i += blockDim.x) {
    const i64 row = m0 + i / (TILE / 4), col = n0 + i % (TILE / 4) * 4;
    const float* v = y + row * n + col;
    if (row < m && col < n) parts[(row * n + col) / 4] = parts_of({v[0], v[1], v[2], v[3]});
  }
}

// The same with one product after the other, which share what registers and `part` hold.
template <int TIMES>
DEV void gate_apart(const u8* w, const u8* up, const Quad* x, float* y, Quad* parts, int op, i64 n,
                    i64 k, i64 m, float (&part)[WARPS][TILE][TIMES * ROWS],
                    float (&gate)[TILE * TIMES * ROWS]) {
  const i64 n0 = (i64)blockIdx.x * TILE;
  const Rows rows = rows_from(x, blockIdx.y * (TIMES * ROWS), k, m);
  auto total = [&](int i) { return total_of(part, i); };
  tile_of<WEIGHT, 1, TIMES>(w, rows, n0, n, k, part);
  for (int i = threadIdx.x; i < TILE * TIMES * ROWS; i += blockDim.x) gate[i] = total(i);
  __syncthreads();  // before the other overwrites `part`
  tile_of<WEIGHT, 1, TIMES>(up, rows, n0, n, k, part);
  gate_rows<TIMES>([&](int i) { return gate[i]; }, total, y, parts, op, n, m);
}

// y [m, n] = x [m, k] . w [n, k], plus rest [m, n] where given; grid (n / 16, m / 8).
KERNEL_IF(LARGE) mul_mat_tile(const u8* w, const Quad* x, float* y, const float* rest, i64 n, i64 k,
                              i64 m) {
  SHARED float part[WARPS][TILE][ROWS];
  few_rows<1, 1>(w, x, y, rest, n, k, m, part, blockIdx.x);
}

// The same by 32 outputs, with the same bits: grid (n / 32, m / 8).
KERNEL_IF(LARGE) mul_mat_twin(const u8* w, const Quad* x, float* y, const float* rest, i64 n, i64 k,
                              i64 m) {
  SHARED float part[WARPS][2 * TILE][ROWS];
  few_rows<2, 1>(w, x, y, rest, n, k, m, part, blockIdx.x);
}

// The same by 32 rows: grid (n / 16, m / 32).
KERNEL_IF(true) mul_mat_tiles(const u8* w, const Quad* x, float* y, const float* rest, i64 n, i64 k,
                     i64 m) {
  SHARED float part[WARPS][TILE][4 * ROWS];
  few_rows<1, 4>(w, x, y, rest, n, k, m, part, blockIdx.x);
}

// y = x [m, k] . w [n, k] of each matrix, [m, n] behind those before it: grid (sum of n / 16, m / 8).
KERNEL_IF(LARGE) mul_mats_tile(Matrices w, const Quad* x, float* y, Axes n, i64 k, i64 m) {
  SHARED float part[WARPS][TILE][ROWS];
  few_rows_of<1, 1>(w, x, y, n, k, m, part);
}

// The same by 32 outputs: grid (sum of n / 32, m / 8).
KERNEL_IF(LARGE) mul_mats_twin(Matrices w, const Quad* x, float* y, Axes n, i64 k, i64 m) {
  SHARED float part[WARPS][2 * TILE][ROWS];
  few_rows_of<2, 1>(w, x, y, n, k, m, part);
}

// The same by 32 rows: grid (sum of n / 16, m / 32).
KERNEL_IF(true) mul_mats_tiles(Matrices w, const Quad* x, float* y, Axes n, i64 k, i64 m) {
  SHARED float part[WARPS][TILE][4 * ROWS];
  few_rows_of<1, 4>(w, x, y, n, k, m, part);
}

// y [m, n] = the gated unit of x [m, k] . w [n, k] and x . up [n, k], and its parts where given; grid
// (n / 16, m / 8). Both at once where the registers hold two tiles.
KERNEL_IF(LARGE) mul_mat_gated(const u8* w, const u8* up, const Quad* x, float* y, Quad* parts,
                               int op, i64 n, i64 k, i64 m) {
  if constexpr (LARGE) {
    SHARED float part[WARPS][TILE][ROWS];
    SHARED float gate[TILE * ROWS];
    gate_apart<1>(w, up, x, y, parts, op, n, k, m, part, gate);
  } else {
    SHARED float both[WARPS][2 * TILE][ROWS];
    const i64 n0 = (i64)blockIdx.x * TILE;
    const Rows rows = rows_from(x, blockIdx.y * ROWS, k, m);
    tile_of<WEIGHT, 2, 1, true>(w, rows, n0, n, k, both, up);
    auto gate = [&](int i) { return total_of(both, i / TILE * (2 * TILE) + i % TILE); };
    auto second = [&](int i) { return total_of(both, i / TILE * (2 * TILE) + TILE + i % TILE); };
    gate_rows<1>(gate, second, y, parts, op, n, m);
  }
}

// The same by 32 rows: grid (n / 16, m / 32).
KERNEL_IF(true) mul_mat_gated_tiles(const u8* w, const u8* up, const Quad* x, float* y, Quad* parts,
                                    int op, i64 n, i64 k, i64 m) {
  SHARED float part[WARPS][TILE][4 * ROWS];
  SHARED float gate[TILE * 4 * ROWS];
  gate_apart<4>(w, up, x, y, parts, op, n, k, m, part, gate);
}

// y[p] = x[row of p] . w[ids[p]] for pairs p grouped by expert (experts.cu), eight at a time; a pair
// of token p / used takes x row p (each = 1) or p / used (each = 0). Group `experts` gives NaN. A
// pair's bits do not depend on its group. Grid (n / 16, groups).
KERNEL_IF(LARGE) mul_mat_id_tile(const u8* w, const Quad* x, float* y, const int* order, const int* starts,
                       const int* active, i64 n, i64 k, i64 experts, i64 used, int each) {
  SHARED float part[WARPS][TILE][ROWS];
  if ((int)blockIdx.y >= active[0]) return;  // the whole block
  const i64 expert = active[1 + blockIdx.y], n0 = (i64)blockIdx.x * TILE;
  const int end = starts[expert + 1];
  const u8* matrix = w + expert * n * row_bytes<WEIGHT>(k);
  for (int first = starts[expert]; first < end; first += ROWS) {
    const int mine = first + threadIdx.x % 32 / 4;
    const int pair = mine < end ? order[mine] : 0;
    const Rows rows = {x + (i64)(each ? pair : pair / (int)used) * (k / 4), 0, mine < end};
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
