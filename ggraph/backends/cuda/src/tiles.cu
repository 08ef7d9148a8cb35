// Products of a stored matrix of type WEIGHT and few rows, on the tensor cores.
//
// A warp computes a tile of 16 outputs for up to TIMES times eight rows; the last stands for those
// that are not given. A row's bits do not depend on how many there are: the order of its sums hangs
// on the columns alone. Eight groups of 32 columns are a segment, strand v sums segments v, v + 16,
// .. one after another, and strands are added as `total_of` says. How many warps share the strands
// of a tile, and how many tiles a block has, is a matter of speed.
//
// x comes in parts (parts.cuh), two bf16 numbers a value; block types multiply by their codes, which
// are exact (most raised by a power of two, which is taken off again), and scale each span's sum in
// float32. Parts and w begin at multiples of 16 bytes.
// Legend: n outputs, k columns (a multiple of 32), m rows of x; g, t: a lane's place in a fragment.
#include "parts.cuh"
#include "units.cuh"

#define TILE 16
#define ROWS 8
#define FEW_WARPS 8    // of a block for up to eight rows
#define FEW_BLOCKS 2   // on a multiprocessor: what is read ahead takes registers
#define WIDE_WARPS 16  // of a block for more, alone there
#define SEGMENT 8   // groups
#define STRANDS 16
#define QUARTERS 4  // of the strands
#define WIDE 4      // times ROWS: what a block takes of more than eight rows
#define WIDE_TILES 4
#define STAGED (WEIGHT::SPAN > 0 && WEIGHT::TOGETHER == 1)
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
  float step[SPANS][2], floor[SPANS][2];  // block types: of each span and row, what is raised in it
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
      if (T::FLOOR) held.floor[s][r] = fmaf(raised<T>(), held.step[s][r], floor);
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
// sums of x over the span. Without floors what is raised is taken off within the products: it is a
// bf16 number too.
template <class T>
DEV void span(const Held<T>& held, int s, const Given& x, float* sum) {
  const u32 one = T::FLOOR ? ONES : float_to_bits(-raised<T>()) / 0x10000u * 0x10001u;
  const u32 ones[4] = {one, one, one, one};
  float products[4] = {}, totals[4] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (T::SPAN == 16 && h != s) continue;
    add_products(products, held.a[h], x.half[h]);
    if (T::FLOOR || T::BITS > 0) add_products(T::FLOOR ? totals : products, ones, x.half[h]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[i] = fmaf(held.step[s][i / 2], products[i], sum[i]);
    if (T::FLOOR) sum[i] = fmaf(-held.floor[s][i / 2], totals[i], sum[i]);
  }
}

// sum += the group that is held . eight rows of x
template <class T>
DEV void add_group(const Held<T>& held, const Given& x, float* sum) {
  if constexpr (T::SPAN == 0) {  // plain types: the weights too are two bf16 numbers, or one
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      add_products(sum, held.a[h], x.half[h]);
      const u32 high[2] = {x.half[h].w[0], x.half[h].w[1]};
      if (!holds<As_bf16, T>::VALUE) multiply(sum, held.rest[h], high);
    }
  } else {
#pragma unroll
    for (int s = 0; s < Held<T>::SPANS; ++s) span<T>(held, s, x, sum);
  }
}

// Rows of x in parts, `quads` each, up to number `last`.
struct Rows {
  const Quad* x;
  int quads, last;
};

// The held group, of which this lane has the parts of x from `from` on, against all rows.
template <class T, int TIMES>
DEV void add_rows(const Held<T>& held, const Rows& rows, int from, float (&sum)[TIMES][4]) {
  const int g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int j = 0; j < TIMES; ++j) {
    const int row = ROWS * j + g < rows.last ? ROWS * j + g : rows.last;
    const Quad* x = rows.x + (u32)(row * rows.quads + from);
    Given here;
#pragma unroll
    for (int h = 0; h < 2; ++h) here.half[h] = x[T::SPAN == 16 ? 4 * h : h];
    add_group<T>(held, here, sum[j]);
  }
}

// sum += groups `first` .. of two rows of w, to a segment's end or the row's, . the rows of x.
template <class T, int TIMES>
DEV void add_groups(const u8* upper, int apart, i64 k, const Rows& rows, int first,
                    float (&sum)[TIMES][4]) {
  const int t = threadIdx.x % 4, left = (int)(k / 32) - first;
  constexpr int AT_ONCE = TIMES == 1 ? 4 : 1;  // as many as registers hold
#pragma unroll AT_ONCE
  for (int i = 0; i < (left < SEGMENT ? left : SEGMENT); ++i) {
    Held<T> held;
    if constexpr (T::SPAN == 0) hold_plain<T>(upper, upper + apart, 4 * (first + i) + t, k, held);
    else hold_blocks<T>(upper, upper + apart, first + i, held);
    add_rows<T, TIMES>(held, rows, 8 * (first + i) + begin_of<T>(0, t) / 4, sum);
  }
}

// What a lane holds of both its rows of a part; read before the part before is computed.
template <class T>
struct Both {
  typename T::Held rows[2];
};

// sum += groups `first` .. of a part, half of them, . the rows of x.
template <class T>
DEV void add_half(const Both<T>& both, const Rows& rows, int part, int first, float (&sum)[1][4]) {
#pragma unroll
  for (int i = first; i < first + T::TOGETHER / 2; ++i) {
    Held<T> held;
    hold_shared<T>(both.rows, i, held);
    const int group = T::TOGETHER * part + i;
    add_rows<T, 1>(held, rows, 8 * group + begin_of<T>(0, threadIdx.x % 4) / 4, sum);
  }
}

// A part of a tile of other block types, on its way through shared memory: what a lane needs of such
// blocks are two bytes here and there, which are read from there; from memory a warp reads whole
// sixteens, also where w ends among them (see `allocate` of driver.py).
template <class T>
struct Stage {
  static const int GROUPS = T::BLOCK > 32 ? SEGMENT : SEGMENT / 2;
  static const int BYTES = GROUPS * 32 / T::BLOCK * T::BYTES;  // of a row
  static const int QUADS = (BYTES + 15 + 15) / 16;             // wherever it begins
  static const int PITCH = QUADS | 1;  // so that rows begin in different banks
  Quad own[(TILE * QUADS + 31) / 32];  // of a lane
};

// The stored rows of a tile: number r begins at `first` + r * `bytes`, the last at `last`.
struct Stored {
  const u8 *first, *last;
  i64 bytes;
  DEV const u8* row(const Stored& s, int r) {
    const u8* at = s.first + r * s.bytes;
    return at < s.last ? at : s.last;
  }
};

// Bytes from the multiple of 16 before.
DEV int beyond(const u8* p) { return (int)((unsigned long long)p & 15); }

template <class T>
DEV Stage<T> read_part(const Stored& w, int part) {
  const int QUADS = Stage<T>::QUADS;
  Stage<T> read;
#pragma unroll
  for (int j = 0; j < (int)(sizeof read / sizeof(Quad)); ++j) {
    const int i = 32 * j + threadIdx.x % 32, r = i / QUADS, q = i % QUADS;
    const u8 *row = Stored::row(w, r), *from = row + part * Stage<T>::BYTES;
    from += 16 * q - beyond(from);
    if (r < TILE && from < row + w.bytes) read.own[j] = *(const Quad*)from;
  }
  return read;
}

template <class T>
DEV void put_part(const Stage<T>& read, Quad* stage) {
  const int QUADS = Stage<T>::QUADS;
#pragma unroll
  for (int j = 0; j < (int)(sizeof read / sizeof(Quad)); ++j) {
    const int i = 32 * j + threadIdx.x % 32, r = i / QUADS, q = i % QUADS;
    if (r < TILE) stage[r * Stage<T>::PITCH + q] = read.own[j];
  }
}

// sum += a part in shared memory . the rows of x.
template <class T>
DEV void add_staged(const Stored& w, int part, const Quad* stage, i64 k, const Rows& rows,
                    float (&sum)[1][4]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, first = Stage<T>::GROUPS * part;
  const u8* here[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const u8* from = Stored::row(w, g + 8 * r) + part * Stage<T>::BYTES;
    here[r] = (const u8*)(stage + (g + 8 * r) * Stage<T>::PITCH) + beyond(from);
  }
  const int left = (int)(k / 32) - first;
#pragma unroll 2  // as many as registers hold
  for (int i = 0; i < (left < Stage<T>::GROUPS ? left : Stage<T>::GROUPS); ++i) {
    Held<T> held;
    hold_blocks<T>(here[0], here[1], i, held);
    add_rows<T, 1>(held, rows, 8 * (first + i) + begin_of<T>(0, t) / 4, sum);
  }
}

// The tile at output n0 of w [n, k], by those strands of it that are this warp's: `first` and every
// number BESIDE behind. `keep` takes the sums of each.
template <class T, int TIMES, int BESIDE, class Keep>
DEV void strands_of(const u8* w, const Rows& rows, i64 n0, i64 n, i64 k, int first, Quad* stage,
                    Keep keep) {
  const int segments = (int)((k / 32 + SEGMENT - 1) / SEGMENT), g = threadIdx.x % 32 / 4;
  const i64 bytes = row_bytes<T>(k);
  const Stored tile = {w + n0 * bytes, w + (n - 1) * bytes, bytes};
  const u8* upper = Stored::row(tile, g);
  const int apart = (int)(Stored::row(tile, g + 8) - upper);  // from a lane's one row to its other
  constexpr bool AHEAD = T::SPAN > 0 && TIMES == 1, WHOLE = T::TOGETHER > 1;
  constexpr int PARTS = !AHEAD ? 1 : SEGMENT / (WHOLE ? T::TOGETHER : Stage<T>::GROUPS);
  auto read = [&](int part) {
    const int t = threadIdx.x % 4;
    if constexpr (!AHEAD) return t;
    else if constexpr (!WHOLE) return read_part<T>(tile, part);
    else return Both<T>{{T::hold(upper, part, t), T::hold(upper + apart, part, t)}};
  };
  auto next = read(first < segments ? PARTS * first : 0);
  for (int turn = 0; turn < STRANDS / BESIDE; ++turn) {
    const int v = first + turn * BESIDE;
    float sum[TIMES][4] = {};
    for (int at = v; at < segments; at += STRANDS) {
      if constexpr (!AHEAD) {
        add_groups<T, TIMES>(upper, apart, k, rows, SEGMENT * at, sum);
        continue;
      }
      const int after = at + STRANDS < segments ? at + STRANDS : v + BESIDE;
#pragma unroll 1  // registers
      for (int part = PARTS * at; part < PARTS * at + PARTS; ++part) {
        const bool last = part % PARTS == PARTS - 1;
        const int then = !last ? part + 1 : after < segments ? PARTS * after : part;
        if constexpr (AHEAD && WHOLE) {
          const Both<T> both = next;
          add_half<T>(both, rows, part, 0, sum);
          next = read(then);
          add_half<T>(both, rows, part, T::TOGETHER / 2, sum);
        } else if constexpr (AHEAD) {
          SYNC_WARP();  // all lanes are done with the part before
          put_part<T>(next, stage);
          SYNC_WARP();
          next = read(then);
          add_staged<T>(tile, part, stage, k, rows, sum);
        }
      }
    }
    keep(v, sum);
  }
}

// Where a lane's sums number 0 .. 3 of a tile and eight rows belong: output and row.
DEV int output_of(int i) { return threadIdx.x % 32 / 4 + i / 2 * 8; }
DEV int row_of(int i) { return threadIdx.x % 4 * 2 + i % 2; }

// What a block for up to eight rows shares: a segment of each warp, and the strands' sums.
struct Few {
  Quad stage[FEW_WARPS][STAGED ? TILE * Stage<WEIGHT>::PITCH : 1];
  float part[STRANDS][TILE][ROWS];
};

// Up to eight rows: the tile at output n0, whose strands are spread over all warps of a block.
DEV void few_of(const u8* w, const Rows& rows, i64 n0, i64 n, i64 k, Few& shared) {
  const int warp = threadIdx.x / 32;
  strands_of<WEIGHT, 1, FEW_WARPS>(w, rows, n0, n, k, warp, shared.stage[warp],
                                   [&](int v, const float (&sum)[1][4]) {
#pragma unroll
                                     for (int i = 0; i < 4; ++i)
                                       shared.part[v][output_of(i)][row_of(i)] = sum[0][i];
                                   });
  __syncthreads();
}

// The sum of all strands of an output and a row: those of a quarter, then the quarters.
DEV float total_of(const float (&part)[STRANDS][TILE][ROWS], int output, int row) {
  float total = 0.0f;
#pragma unroll
  for (int q = 0; q < QUARTERS; ++q) {
    float quarter = part[q][output][row];
#pragma unroll
    for (int v = q + QUARTERS; v < STRANDS; v += QUARTERS) quarter += part[v][output][row];
    total = q ? total + quarter : quarter;
  }
  return total;
}

// More rows: a block of WIDE_TILES tiles, of each of which a warp has a quarter of the strands.
template <class First, class Matrix>
DEV void wide_of(First n0, Matrix w, const Rows& rows, i64 n, i64 k,
                 float (&part)[QUARTERS][WIDE_TILES * TILE][WIDE * ROWS]) {
  const int warp = threadIdx.x / 32, tile = warp % WIDE_TILES, quarter = warp / WIDE_TILES;
  auto keep = [&](int v, const float (&sum)[WIDE][4]) {
#pragma unroll
    for (int i = 0; i < WIDE * 4; ++i) {
      const int output = TILE * tile + output_of(i % 4), row = i / 4 * ROWS + row_of(i % 4);
      volatile float& own = part[quarter][output][row];  // or else it stays in a register
      own = v < QUARTERS ? sum[i / 4][i % 4] : own + sum[i / 4][i % 4];
    }
  };
  strands_of<WEIGHT, WIDE, QUARTERS>(w(tile), rows, n0(tile), n, k, quarter, 0, keep);
  __syncthreads();
}

// The same of an output and a row.
DEV float total_of(const float (&part)[QUARTERS][WIDE_TILES * TILE][WIDE * ROWS], int output,
                   int row) {
  float total = part[0][output][row];
#pragma unroll
  for (int q = 1; q < QUARTERS; ++q) total += part[q][output][row];
  return total;
}

// Rows of x [m, k] from `from` on.
DEV Rows rows_from(const Quad* x, int from, i64 k, i64 m) {
  return {x + from * (k / 4), (int)k / 4, (int)m - 1 - from};
}

// One of several matrices [n, k], and where its results go.
struct One {
  const u8* w;
  float* y;
  i64 n, n0;
};

DEV void store(const One& one, const float* rest, i64 m, int output, int row, float total) {
  const i64 col = one.n0 + output, at = row * one.n + col;
  if (row < m && col < one.n) one.y[at] = rest ? total + rest[at] : total;
}

DEV void few_rows(const One& one, const Quad* x, const float* rest, i64 k, i64 m, Few& shared) {
  few_of(one.w, rows_from(x, 0, k, m), one.n0, one.n, k, shared);
  for (int i = threadIdx.x; i < TILE * (int)m; i += blockDim.x)
    store(one, rest, m, i % TILE, i / TILE, total_of(shared.part, i % TILE, i / TILE));
}

DEV void wide_rows(const One& one, const Quad* x, const float* rest, i64 k, i64 m,
                   float (&part)[QUARTERS][WIDE_TILES * TILE][WIDE * ROWS]) {
  const int from = blockIdx.x * (WIDE * ROWS), outputs = WIDE_TILES * TILE;
  wide_of([&](int tile) { return one.n0 + TILE * tile; }, [&](int) { return one.w; },
                  rows_from(x, from, k, m), one.n, k, part);
  for (int i = threadIdx.x; i < outputs * WIDE * ROWS; i += blockDim.x)
    store(one, rest, m, i % outputs, from + i / outputs, total_of(part, i % outputs, i / outputs));
}

// Up to four matrices; those that are not given have no outputs.
struct Matrices {
  const u8* of[4];
};

// Which of several matrices with n outputs each, one behind the other, is this block's.
DEV One one_of(const Matrices& w, float* y, const Axes& n, i64 m, int outputs) {
  One one = {w.of[0], y, n.v[0], 0};
  int block = blockIdx.y;
#pragma unroll
  for (int i = 1; i < 4; ++i) {
    const int blocks = (int)((one.n + outputs - 1) / outputs);
    if (block < blocks) break;
    block -= blocks, one.y += m * one.n, one.w = w.of[i], one.n = n.v[i];
  }
  one.n0 = (i64)block * outputs;
  return one;
}

// The gated unit (`op` as in units.cuh) of `count` rows from `from` on and `outputs` outputs from n0
// on, of the sums that `gate` and `up` give of output and row; in parts too where those are given: n
// is a multiple of four then.
template <class Gate, class Up>
DEV void gate_rows(Gate gate, Up up, float* y, Quad* parts, int op, i64 n0, int outputs, int from,
                   int count, i64 n, i64 m) {
  for (int i = threadIdx.x; i < outputs * count; i += blockDim.x) {
    const i64 row = from + i / outputs, col = n0 + i % outputs;
    if (row < m && col < n)
      y[row * n + col] = two_of(op, gate(i % outputs, i / outputs), up(i % outputs, i / outputs));
  }
  if (!parts) return;
  __syncthreads();
  for (int i = threadIdx.x; i < outputs / 4 * count; i += blockDim.x) {
    const i64 row = from + i / (outputs / 4), col = n0 + i % (outputs / 4) * 4;
    const float* v = y + row * n + col;
    if (row < m && col < n) parts[(row * n + col) / 4] = parts_of({v[0], v[1], v[2], v[3]});
  }
}

// y [m, n] = x [m, k] . w [n, k], plus rest [m, n] where given, of up to eight rows; grid (1, n / 16).
KERNEL_OF(FEW_WARPS * 32, FEW_BLOCKS)
mul_mat_tile(const u8* w, const Quad* x, float* y, const float* rest, i64 n, i64 k, i64 m) {
  SHARED Few shared;
  few_rows({w, y, n, (i64)blockIdx.y * TILE}, x, rest, k, m, shared);
}

// The same of any number of rows, with the same bits; grid (m / 32, n / 64): blocks that read the
// same weights run side by side, or else memory is read for each.
KERNEL_OF(WIDE_WARPS * 32, 1)
mul_mat_wide(const u8* w, const Quad* x, float* y, const float* rest, i64 n, i64 k, i64 m) {
  SHARED float part[QUARTERS][WIDE_TILES * TILE][WIDE * ROWS];
  wide_rows({w, y, n, (i64)blockIdx.y * (WIDE_TILES * TILE)}, x, rest, k, m, part);
}

// y = x [m, k] . w [n, k] of each matrix, [m, n] behind those before it: grid (1, sum of n / 16).
KERNEL_OF(FEW_WARPS * 32, FEW_BLOCKS)
mul_mats_tile(Matrices w, const Quad* x, float* y, Axes n, i64 k, i64 m) {
  SHARED Few shared;
  SHARED One one;
  if (threadIdx.x == 0) one = one_of(w, y, n, m, TILE);
  __syncthreads();
  few_rows(one, x, 0, k, m, shared);
}

// The same of any number of rows: grid (m / 32, sum of n / 64).
KERNEL_OF(WIDE_WARPS * 32, 1)
mul_mats_wide(Matrices w, const Quad* x, float* y, Axes n, i64 k, i64 m) {
  SHARED float part[QUARTERS][WIDE_TILES * TILE][WIDE * ROWS];
  SHARED One one;
  if (threadIdx.x == 0) one = one_of(w, y, n, m, WIDE_TILES * TILE);
  __syncthreads();
  wide_rows(one, x, 0, k, m, part);
}

// y [m, n] = the gated unit of x [m, k] . w [n, k] and x . up [n, k], and its parts where given, of
// up to eight rows; grid (1, n / 16).
KERNEL_OF(FEW_WARPS * 32, FEW_BLOCKS)
mul_mat_gated_tile(const u8* w, const u8* up, const Quad* x, float* y, Quad* parts, int op, i64 n,
                   i64 k, i64 m) {
  SHARED Few shared;
  SHARED float gate[ROWS][TILE];
#pragma unroll 1
  for (int second = 0; second < 2; ++second) {
    few_of(second ? up : w, rows_from(x, 0, k, m), (i64)blockIdx.y * TILE, n, k, shared);
    if (second) break;
    for (int i = threadIdx.x; i < TILE * (int)m; i += blockDim.x)
      gate[i / TILE][i % TILE] = total_of(shared.part, i % TILE, i / TILE);
    __syncthreads();  // before sums of the other are written
  }
  gate_rows([&](int output, int row) { return gate[row][output]; },
            [&](int output, int row) { return total_of(shared.part, output, row); }, y, parts, op,
            (i64)blockIdx.y * TILE, TILE, 0, (int)m, n, m);
}

// The same of any number of rows: grid (m / 32, n / 32), two tiles of each matrix.
KERNEL_OF(WIDE_WARPS * 32, 1)
mul_mat_gated_wide(const u8* w, const u8* up, const Quad* x, float* y, Quad* parts, int op, i64 n,
                   i64 k, i64 m) {
  SHARED float part[QUARTERS][WIDE_TILES * TILE][WIDE * ROWS];
  const int outputs = WIDE_TILES / 2 * TILE;
  const i64 n0 = (i64)blockIdx.y * outputs;
  const int from = blockIdx.x * (WIDE * ROWS);
  wide_of([&](int tile) { return n0 + tile / 2 * TILE; },
                  [&](int tile) { return tile % 2 ? up : w; }, rows_from(x, from, k, m), n, k,
                  part);
  auto total = [&](int output, int row, int second) {
    return total_of(part, output / TILE * (2 * TILE) + second * TILE + output % TILE, row);
  };
  gate_rows([&](int output, int row) { return total(output, row, 0); },
            [&](int output, int row) { return total(output, row, 1); }, y, parts, op, n0, outputs,
            from, WIDE * ROWS, n, m);
}

// y[p] = x[row of p] . w[ids[p]] for pairs p grouped by expert (experts.cu), eight at a time; a pair
// of token p / used takes x row p (each = 1) or p / used (each = 0). Group `experts` gives NaN. A
// pair's bits do not depend on its group. Grid (n / 16, groups).
KERNEL_OF(FEW_WARPS * 32, FEW_BLOCKS)
mul_mat_id_tile(const u8* w, const Quad* x, float* y, const int* order, const int* starts,
                const int* active, i64 n, i64 k, i64 experts, i64 used, int each) {
  SHARED Few shared;
  if ((int)blockIdx.y >= active[0]) return;  // the whole block
  const i64 expert = active[1 + blockIdx.y], n0 = (i64)blockIdx.x * TILE;
  const int end = starts[expert + 1];
  const u8* matrix = w + expert * n * row_bytes<WEIGHT>(k);
  for (int first = starts[expert]; first < end; first += ROWS) {
    const int mine = first + threadIdx.x % 32 / 4;
    const int pair = order[mine < end ? mine : end - 1];  // of which this lane has the row
    const Rows rows = {x + (i64)(each ? pair : pair / (int)used) * (k / 4), 0, 0};
    if (expert < experts) few_of(matrix, rows, n0, n, k, shared);
    for (int i = threadIdx.x; i < TILE * ROWS; i += blockDim.x) {
      const int at = first + i / TILE;
      const i64 col = n0 + i % TILE;
      if (at < end && col < n)
        y[order[at] * n + col] = expert < experts ? total_of(shared.part, i % TILE, i / TILE)
                                                  : bits_to_float(0x7fc00000u);
    }
    __syncthreads();  // before the next pass overwrites what is shared
  }
}
