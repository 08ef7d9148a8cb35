// Products of a stored matrix of type WEIGHT and few rows, on the tensor cores.
//
// A warp computes a tile of 16 outputs for up to TIMES times eight rows; the last stands for those
// that are not given. A row's bits do not depend on how many there are: the order of its sums hangs
// on the columns alone. Eight groups of 32 columns are a segment, strand v sums segments v, v + 16,
// .. one after another, and strands are added as `total_of` says. How many warps share the strands
// of a tile, and how many tiles a block has, is a matter of speed.
//
// Plain types take x in parts (parts.cuh), two bf16 numbers a value; block types in codes, by which
// they multiply as codes.cuh says. Both, and w, begin at multiples of 16 bytes.
// Legend: n outputs, k columns (a multiple of 32), m rows of x; g, t: a lane's place in a fragment.
#include "codes.cuh"
#include "units.cuh"

#define TILE 16
#define ROWS 8
#define BLOCKS_OF (WEIGHT::SPAN > 0)  // whether WEIGHT is a block type
#define FEW_WARPS 8    // of a block for up to eight rows
#define FEW_BLOCKS 2   // on a multiprocessor
#define WIDE_WARPS 8   // of a block for more
#define WIDE_BLOCKS 2
#define SEGMENT 8   // groups
#define STRANDS 16
#define QUARTERS 4  // of the strands
#define WIDE 4      // times ROWS: what a block takes of more than eight rows
#define WIDE_TILES 4
#define GATED 2     // the most tiles of each matrix of a gated unit in a block for up to eight rows

// Rows of x for a lane: those of x [m, k] from a multiple of eight on, or, for up to eight rows, the
// one that it multiplies and the two that its results are of, wherever they are.
//
// In parts: row number i, up to `last`, begins at x + i * quads.
struct Parts {
  const Quad* x;
  int quads, last;
  DEV Parts from(const Quad* x, int first, i64 k, i64 m) {
    return {x + first * (k / 4), (int)k / 4, (int)m - 1 - first};
  }
  DEV Parts of(const Quad* x, i64 k, i64 own, i64, i64) { return {x + own * (k / 4), 0, 0}; }
};
// In codes: eight rows lie together, the next so many quads `apart`, up to eights number `last`.
struct Codes {
  Lanes lanes;
  int apart, last;
  DEV Codes from(const Quad* x, int first, i64 k, i64 m) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, last = (int)m - 1 - first;
    return {lanes_of(x, k, first + (g < last ? g : last), first + 2 * t, first + 2 * t + 1),
            (int)(k / 32) * CODED_QUADS, last / 8};
  }
  DEV Codes of(const Quad* x, i64 k, i64 own, i64 first, i64 second) {
    return {lanes_of(x, k, own, first, second), 0, 0};
  }
};
template <bool CODED>
struct rows_by {
  typedef Parts Type;
};
template <>
struct rows_by<true> {
  typedef Codes Type;
};
typedef rows_by<BLOCKS_OF>::Type Rows;

// What a lane holds of a group of 32 columns of two rows of a plain type: fragments of two products,
// and what they leave out.
struct Held {
  u32 a[2][4], rest[2][4];
};

// sum += a (rows g and g + 8) . x, both parts of x
DEV void add_products(float* sum, const u32 (&a)[4], const Quad& x) {
  const u32 high[2] = {x.w[0], x.w[1]}, low[2] = {x.w[2], x.w[3]};
  multiply(sum, a, high);
  multiply(sum, a, low);
}

// Words of two rows as the fragment of a product.
DEV void fragment(const u32* upper, const u32* lower, u32 (&a)[4]) {
  a[0] = upper[0], a[1] = lower[0], a[2] = upper[1], a[3] = lower[1];
}

template <class T>
DEV void hold_plain(const u8* upper, const u8* lower, int chunk, i64 k, Held& held) {
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

// sum += groups `first` .. of two rows of a plain type, to a segment's end or the row's, . the rows.
template <class T, int TIMES>
DEV void add_plain(const u8* upper, const u8* lower, i64 k, const Parts& rows, int first,
                   float (&sum)[TIMES][4]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, left = (int)(k / 32) - first;
  constexpr int AT_ONCE = TIMES == 1 ? 4 : 1;  // as many as registers hold
#pragma unroll AT_ONCE
  for (int i = 0; i < (left < SEGMENT ? left : SEGMENT); ++i) {
    Held held;
    hold_plain<T>(upper, lower, 4 * (first + i) + t, k, held);
#pragma unroll
    for (int j = 0; j < TIMES; ++j) {
      const int row = ROWS * j + g < rows.last ? ROWS * j + g : rows.last;
      const Quad* x = rows.x + (u32)(row * rows.quads + 8 * (first + i) + 2 * t);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Quad here = x[h];
        add_products(sum[j], held.a[h], here);
        const u32 high[2] = {here.w[0], here.w[1]};
        if (!holds<As_bf16, T>::VALUE) multiply(sum[j], held.rest[h], high);
      }
    }
  }
}

// One of several matrices [n, k], where its results go, and the first output of a tile.
struct One {
  const u8* w;
  float* y;
  i64 n, n0;
};

// The stored rows of a tile: number r begins r * `bytes` behind `first`, the matrix's last, which stands
// for those that it does not have, `last` behind.
struct Stored {
  const u8* first;
  int last, bytes;
  DEV int begin(const Stored& s, int r) { return r * s.bytes < s.last ? r * s.bytes : s.last; }
};

template <class T>
DEV Stored tile_of(const One& one, i64 k) {
  const i64 rows = one.n - 1 - one.n0;
  const int bytes = (int)row_bytes<T>(k);
  return {one.w + one.n0 * bytes, (int)(rows < TILE ? rows : TILE) * bytes, bytes};
}

// The tile at output n0 of a plain matrix, by those strands of it that are this warp's: `first` and
// every number BESIDE behind. `keep` takes the sums of each.
template <class T, int TIMES, int BESIDE, class X, class Keep>
DEV void strands_of(const One& one, const X& rows, i64 k, int first, Keep keep) {
  const int groups = (int)(k / 32), segments = (groups + SEGMENT - 1) / SEGMENT;
  const int g = threadIdx.x % 32 / 4;
  const Stored tile = tile_of<T>(one, k);
  const u8* upper = tile.first + Stored::begin(tile, g);
  const u8* lower = tile.first + Stored::begin(tile, g + 8);
  for (int v = first; v < STRANDS; v += BESIDE) {
    float sum[TIMES][4] = {};
    for (int at = v; at < segments; at += STRANDS)
      add_plain<T, TIMES>(upper, lower, k, rows, SEGMENT * at, sum);
    keep(v, sum);
  }
}

// A segment of a tile of a block type on its way through shared memory: what a lane needs of blocks
// are bytes here and there, which are read from there; from memory a warp reads whole sixteens, row
// by row, also where w ends among them (see `allocate` of driver.py).
template <class T, int SLOTS, bool CODED = (T::SPAN > 0)>
struct Stage {
  static const int BYTES = SEGMENT * 32 / T::BLOCK * T::BYTES;
  static const bool ALIGNED = T::BLOCK == 256 && T::BYTES % 16 == 0;  // where all rows begin
  static const int PITCH = (ALIGNED ? BYTES / 16 : (BYTES + 15 + 15) / 16) | 1;  // banks
  static const int QUADS = TILE * PITCH, COPIES = (QUADS + 31) / 32;
  Quad quads[SLOTS][QUADS];  // of a warp; x needs what is left of the nearest cache
};
template <class T, int SLOTS>
struct Stage<T, SLOTS, false> {};

// Tiles number 0 .. of block types, at place(number), by those strands of each that are this warp's, as
// above: their segments come through the warp's stages one after another, across tiles, while it
// computes with those before. `keep` takes tile, strand and sums, `done` the tile when all of the
// block's warps are through with it. ONE: up to one row; NEAR: rows side by side.
template <class T, bool ONE, bool NEAR, int TIMES, int BESIDE, int SLOTS, class X, class Place,
          class Keep, class Done>
DEV void stream_of(Place place, int tiles, const X& rows, i64 k, int first, Stage<T, SLOTS>& stage,
                   Keep keep, Done done) {
  typedef Stage<T, SLOTS> S;
  const int groups = (int)(k / 32), segments = (groups + SEGMENT - 1) / SEGMENT;
  const int lane = threadIdx.x % 32, g = lane / 4;
  auto fetch = [&](const Stored& tile, int at, int slot) {
    const int past = at * S::BYTES;
    const u8* from = tile.first + past;
    const int off = (int)((unsigned long long)from & 15);
#pragma unroll
    for (int j = 0; j < S::COPIES; ++j) {
      const int i = 32 * j + lane, begin = Stored::begin(tile, i / S::PITCH);
      const int skipped = i % S::PITCH * 16 - (S::ALIGNED ? 0 : off + begin & 15);
      const bool there = S::ALIGNED || past + skipped < tile.bytes;
      if ((j < S::COPIES - 1 || i < S::QUADS) && there)
        copy_16(stage.quads[slot] + i, from + (begin + skipped));
    }
  };
  Stored source = tile_of<T>(place(0), k);
  if (first < segments && tiles) fetch(source, first, 0);
  int slot = 0;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    int off[2] = {};  // of this lane's rows, from multiples of 16
#pragma unroll
    for (int r = 0; r < 2 && !S::ALIGNED; ++r)
      off[r] = (int)((unsigned long long)source.first & 15) + Stored::begin(source, g + 8 * r);
#pragma unroll 1
    for (int own = first; own < STRANDS; own += BESIDE) {
      float sum[TIMES][4] = {};
#pragma unroll 1
      for (int at = own; at < segments; at += STRANDS) {
        const int x = CODED_QUADS * SEGMENT * at;
        copies_done();
        SYNC_WARP();  // all lanes' copies are there, and all are done with the segment before
        int then = at + STRANDS < segments ? at + STRANDS : own + BESIDE;
        bool more = then < segments && (then != own + BESIDE || then < STRANDS);
        if (!more && tile + 1 < tiles) {
          more = true, then = first, source = tile_of<T>(place(tile + 1), k);
        }
        if (more && SLOTS > 1) fetch(source, then, slot ^ 1);
        const Quad* quads = stage.quads[slot];
        const u8* mine[2] = {(const u8*)(quads + g * S::PITCH),
                             (const u8*)(quads + (g + 8) * S::PITCH)};
#pragma unroll
        for (int r = 0; r < 2 && !S::ALIGNED; ++r) mine[r] += off[r] + at * S::BYTES & 15;
        constexpr int AT_ONCE = TIMES != 1 ? 1 : T::SPAN == 16 || T::LOOKS_UP ? 2 : 4;
        each_group<T, AT_ONCE, TIMES == 1 && NEAR ? WRITTEN_OUT : 1>(
            mine, groups - SEGMENT * at, [&](int i, const Coded<T>& held) {
              int from = x + CODED_QUADS * i;
#pragma unroll
              for (int j = 0; j < TIMES; ++j) {
                if (TIMES > 1) LOADS_IN_ORDER();
                if (j && j <= rows.last) from += rows.apart;
                const Pieces own = pieces_at(rows.lanes, from);
                add_group<T, ONE, NEAR>(held, rows.lanes, from, own, sum[j]);
              }
            });
        if (SLOTS > 1) {
          slot ^= 1;
        } else {
          SYNC_WARP();
          if (more) fetch(source, then, slot);
        }
      }
      keep(tile, own, sum);
    }
    __syncthreads();
    done(tile);
  }
}

// Where a lane's sums number 0 .. 3 of a tile and eight rows belong: output and row.
DEV int output_of(int i) { return threadIdx.x % 32 / 4 + i / 2 * 8; }
DEV int row_of(int i) { return threadIdx.x % 4 * 2 + i % 2; }

// What a block for up to eight rows shares: stages of each warp, and the strands' sums of two tiles.
typedef float Strands[STRANDS][ROWS][TILE + 1];  // and what keeps lanes in banks of their own
struct Few {
  Stage<WEIGHT, 2> stage[FEW_WARPS];
  Strands part[2];
  float made[2][ROWS][GATED * TILE];  // of a gate, and of what it opens
};

// Up to eight rows, or ONE: tiles number 0 .. of a block, whose strands are spread over all warps. `done`
// takes the number and the strands' sums.
template <bool ONE, bool NEAR, class T, class Place, class Done>
DEV void tiles_of(Place place, int tiles, const Rows& rows, i64 k, Few& shared, Done done) {
  const int warp = threadIdx.x / 32;
  auto keep = [&](int tile, int v, const float (&sum)[1][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) shared.part[tile % 2][v][row_of(i)][output_of(i)] = sum[0][i];
  };
  auto end = [&](int tile) { done(tile, shared.part[tile % 2]); };
  if constexpr (T::SPAN > 0) {
    stream_of<T, ONE, NEAR, 1, FEW_WARPS>(place, tiles, rows, k, warp, shared.stage[warp], keep, end);
  } else {
    for (int i = 0; i < tiles; ++i) {
      strands_of<T, 1, FEW_WARPS>(place(i), rows, k, warp,
                                  [&](int v, const float (&sum)[1][4]) { keep(i, v, sum); });
      __syncthreads();
      end(i);
    }
  }
}

// The same of m rows of x.
template <class Place, class Done>
DEV void few_of(Place place, int tiles, const Quad* x, i64 k, i64 m, Few& shared, Done done) {
  const Rows rows = Rows::from(x, 0, k, m);
  if (BLOCKS_OF && m == 1) tiles_of<true, true, WEIGHT>(place, tiles, rows, k, shared, done);
  else tiles_of<false, true, WEIGHT>(place, tiles, rows, k, shared, done);
}

// The sum of all strands of an output and a row: those of a quarter, then the quarters.
DEV float total_of(const Strands& part, int output, int row) {
  float total = 0.0f;
#pragma unroll
  for (int q = 0; q < QUARTERS; ++q) {
    float quarter = part[q][row][output];
#pragma unroll
    for (int v = q + QUARTERS; v < STRANDS; v += QUARTERS) quarter += part[v][row][output];
    total = q ? total + quarter : quarter;
  }
  return total;
}

// What a block for more rows shares: stages of each warp, and sums of quarters.
typedef float Quarters[QUARTERS][WIDE * ROWS][WIDE_TILES * TILE + 4];
template <int SLOTS>
struct WideBy {
  Stage<WEIGHT, SLOTS> stage[WIDE_WARPS];
  Quarters part;
};
typedef WideBy<(sizeof(WideBy<2>) > MOST_SHARED * 1024 ? 1 : 2)> Wide;

// More rows: a block of WIDE_TILES tiles at place(number), of each of which a warp has every so manieth
// strand.
template <class T, class Place>
DEV void wide_of(Place place, const Quad* x, int from, i64 k, i64 m, Wide& shared) {
  constexpr int BESIDE = WIDE_WARPS / WIDE_TILES;
  const int warp = threadIdx.x / 32, tile = warp % WIDE_TILES, first = warp / WIDE_TILES;
  const Rows rows = Rows::from(x, from, k, m);
  auto keep = [&](int v, const float (&sum)[WIDE][4]) {
#pragma unroll
    for (int i = 0; i < WIDE * 4; ++i) {
      const int output = TILE * tile + output_of(i % 4), row = i / 4 * ROWS + row_of(i % 4);
      volatile float& own = shared.part[v % QUARTERS][row][output];  // or else it stays in a register
      own = v < QUARTERS ? sum[i / 4][i % 4] : own + sum[i / 4][i % 4];
    }
  };
  const One one = place(tile);
  if constexpr (T::SPAN > 0) {
    stream_of<T, false, true, WIDE, BESIDE>([&](int) { return one; }, 1, rows, k, first,
                                        shared.stage[warp],
                                        [&](int, int v, const float (&sum)[WIDE][4]) { keep(v, sum); },
                                        [](int) {});
  } else {
    strands_of<T, WIDE, BESIDE>(one, rows, k, first, keep);
    __syncthreads();
  }
}

// The same of an output and a row.
DEV float total_of(const Quarters& part, int output, int row) {
  float total = part[0][row][output];
#pragma unroll
  for (int q = 1; q < QUARTERS; ++q) total += part[q][row][output];
  return total;
}

DEV void store(const One& one, const float* rest, i64 m, int output, int row, float total) {
  const i64 col = one.n0 + output, at = row * one.n + col;
  if (row < m && col < one.n) one.y[at] = rest ? total + rest[at] : total;
}

// Tiles of a block: its own number and every so many blocks behind, of `all`.
DEV int tiles_here(i64 all) { return ((u32)all - blockIdx.y + gridDim.y - 1) / gridDim.y; }
DEV i64 tile_here(int i) { return blockIdx.y + (u32)i * gridDim.y; }

// Before FOLLOW, while others still work: what a block's warps read first of a tile is on its way to the
// L2 cache. It is only asked for, so that it does not matter who writes it.
DEV void ask_for_tile(const One& one, i64 k) {
  constexpr int GROUPS = FEW_WARPS * SEGMENT, BESIDE = FEW_WARPS * 32 / TILE, STEP = 64;
  const Stored tile = tile_of<WEIGHT>(one, k);
  const u8* row = tile.first + Stored::begin(tile, threadIdx.x / BESIDE);
  const int first = (int)row_bytes<WEIGHT>(32 * GROUPS);
#pragma unroll 1
  for (int at = threadIdx.x % BESIDE * STEP; at < first && at < tile.bytes; at += BESIDE * STEP)
    ask_for(row + at, 1);
}

template <class Place>
DEV void few_rows(Place place, i64 all, const Quad* x, const float* rest, i64 k, i64 m, Few& shared) {
  few_of(place, tiles_here(all), x, k, m, shared, [&](int tile, const Strands& part) {
    const One one = place(tile);
#pragma unroll 1  // or else what it counts stays in registers
    for (int i = threadIdx.x; i < TILE * (int)m; i += FEW_WARPS * 32)
      store(one, rest, m, i % TILE, i / TILE, total_of(part, i % TILE, i / TILE));
  });
}

// The tiles from `one` on.
DEV void wide_rows(const One& one, const Quad* x, const float* rest, i64 k, i64 m, Wide& shared) {
  const int from = blockIdx.x * (WIDE * ROWS), outputs = WIDE_TILES * TILE;
  wide_of<WEIGHT>([&](int tile) { return One{one.w, one.y, one.n, one.n0 + TILE * tile}; }, x, from, k,
                  m, shared);
  for (int i = threadIdx.x; i < outputs * WIDE * ROWS; i += blockDim.x)
    store(one, rest, m, i % outputs, from + i / outputs,
          total_of(shared.part, i % outputs, i / outputs));
}

// Up to four matrices; those that are not given have no outputs.
struct Matrices {
  const u8* of[4];
};

// Which of several matrices with n outputs each, one behind the other, has block number `block` of so
// many outputs.
DEV One one_of(const Matrices& w, float* y, const Axes& n, i64 m, int outputs, u32 block) {
  One one = {w.of[0], y, n.v[0], 0};
#pragma unroll
  for (int i = 1; i < 4; ++i) {
    const u32 blocks = ((u32)one.n + outputs - 1) / outputs;
    if (block < blocks) break;
    block -= blocks, one.y += (u32)m * (i64)(u32)one.n, one.w = w.of[i], one.n = n.v[i];
  }
  one.n0 = (i64)block * outputs;
  return one;
}

// The gated unit (`op` as in units.cuh) of `count` rows from `from` on and `outputs` outputs from n0
// on, of the sums that `gate` and `up` give of output and row; in parts and codes too where those are
// given: n is a multiple of four then, and for codes of 32, as are outputs.
template <class Gate, class Up>
DEV void gate_rows(Gate gate, Up up, float* y, Quad* parts, Quad* codes, int op, i64 n0, int outputs,
                   int from, int count, i64 n, i64 m) {
  for (int i = threadIdx.x; i < outputs * count; i += blockDim.x) {
    const i64 row = from + i / outputs, col = n0 + i % outputs;
    if (row < m && col < n)
      y[row * n + col] = two_of(op, gate(i % outputs, i / outputs), up(i % outputs, i / outputs));
  }
  if (!parts && !codes) return;
  __syncthreads();
  const int fours = outputs / 4;
  for (int first = 0; first < fours * count; first += blockDim.x) {
    const int i = first + threadIdx.x;
    const i64 row = from + i / fours, col = n0 + i % fours * 4;
    const bool there = i < fours * count && row < m && col < n;
    float v[4] = {};
    if (there) four_floats(y + row * n + col, v);
    if (there && parts) parts[(row * n + col) / 4] = parts_of(v);
    if (codes) give_codes(v, there, codes, n, row, (int)(col / 4));
  }
}

// y [m, n] = x [m, k] . w [n, k], plus rest [m, n] where given, of up to eight rows; grid (1, up to
// n / 16).
SHARES(mul_mat_tile, Few)
KERNEL_OF(FEW_WARPS * 32, FEW_BLOCKS)
mul_mat_tile(const u8* w, const Quad* x, float* y, const float* rest, i64 n, i64 k, i64 m) {
  SHARED_OBJECT(Few, shared);
  auto place = [&](int i) { return One{w, y, n, TILE * tile_here(i)}; };
  ask_for_tile(place(0), k);
  FOLLOW();
  few_rows(place, (n + TILE - 1) / TILE, x, rest, k, m, shared);
}

// The same of any number of rows, with the same bits; grid (m / 32, n / 64): blocks that read the
// same weights run side by side, or else memory is read for each.
SHARES(mul_mat_wide, Wide)
KERNEL_OF(WIDE_WARPS * 32, WIDE_BLOCKS)
mul_mat_wide(const u8* w, const Quad* x, float* y, const float* rest, i64 n, i64 k, i64 m) {
  SHARED_OBJECT(Wide, shared);
  FOLLOW();
  wide_rows({w, y, n, (i64)blockIdx.y * (WIDE_TILES * TILE)}, x, rest, k, m, shared);
}

// y = x [m, k] . w [n, k] of each matrix, [m, n] behind those before it: of `all` tiles; grid (1, up to
// all).
SHARES(mul_mats_tile, Few)
KERNEL_OF(FEW_WARPS * 32, FEW_BLOCKS)
mul_mats_tile(Matrices w, const Quad* x, float* y, Axes n, i64 k, i64 m, i64 all) {
  SHARED_OBJECT(Few, shared);
  auto place = [&](int i) { return one_of(w, y, n, m, TILE, tile_here(i)); };
  ask_for_tile(place(0), k);
  FOLLOW();
  few_rows(place, all, x, 0, k, m, shared);
}

// The same of any number of rows: grid (m / 32, sum of n / 64).
SHARES(mul_mats_wide, Wide)
KERNEL_OF(WIDE_WARPS * 32, WIDE_BLOCKS)
mul_mats_wide(Matrices w, const Quad* x, float* y, Axes n, i64 k, i64 m) {
  SHARED_OBJECT(Wide, shared);
  FOLLOW();
  wide_rows(one_of(w, y, n, m, WIDE_TILES * TILE, blockIdx.y), x, 0, k, m, shared);
}

// y [m, n] = the gated unit of x [m, k] . w [n, k] and x . up [n, k], and its parts and codes where
// given, of up to eight rows; `tiles` of each matrix at once, up to GATED: grid (1, up to n / 16 / tiles).
SHARES(mul_mat_gated_tile, Few)
KERNEL_OF(FEW_WARPS * 32, FEW_BLOCKS)
mul_mat_gated_tile(const u8* w, const u8* up, const Quad* x, float* y, Quad* parts, Quad* codes,
                   int op, int tiles, i64 n, i64 k, i64 m) {
  SHARED_OBJECT(Few, shared);
  const int outputs = tiles * TILE, each = 2 * tiles;
  const int units = tiles_here(((u32)n + outputs - 1) / (u32)outputs);
  auto place = [&](int i) {  // gate and what it opens in turn
    return One{i % 2 ? up : w, y, n, outputs * tile_here(i / each) + i % each / 2 * TILE};
  };
  ask_for_tile(place(0), k);
  ask_for_tile(place(1), k);
  FOLLOW();
  few_of(place, units * each, x, k, m, shared, [&](int i, const Strands& part) {
#pragma unroll 1
    for (int j = threadIdx.x; j < TILE * (int)m; j += FEW_WARPS * 32)
      shared.made[i % 2][j / TILE][i % each / 2 * TILE + j % TILE] =
          total_of(part, j % TILE, j / TILE);
    if (i % each < each - 1) return;
    __syncthreads();
    gate_rows([&](int output, int row) { return shared.made[0][row][output]; },
              [&](int output, int row) { return shared.made[1][row][output]; }, y, parts, codes, op,
              outputs * tile_here(i / each), outputs, 0, (int)m, n, m);
  });
}

// The same of any number of rows: grid (m / 32, n / 32), two tiles of each matrix.
SHARES(mul_mat_gated_wide, Wide)
KERNEL_OF(WIDE_WARPS * 32, WIDE_BLOCKS)
mul_mat_gated_wide(const u8* w, const u8* up, const Quad* x, float* y, Quad* parts, Quad* codes,
                   int op, i64 n, i64 k, i64 m) {
  SHARED_OBJECT(Wide, shared);
  FOLLOW();
  const int outputs = WIDE_TILES / 2 * TILE;
  const i64 n0 = (i64)blockIdx.y * outputs;
  const int from = blockIdx.x * (WIDE * ROWS);
  wide_of<WEIGHT>([&](int tile) { return One{tile % 2 ? up : w, y, n, n0 + tile / 2 * TILE}; }, x,
                  from, k, m, shared);
  auto total = [&](int output, int row, int second) {
    return total_of(shared.part, output / TILE * (2 * TILE) + second * TILE + output % TILE, row);
  };
  gate_rows([&](int output, int row) { return total(output, row, 0); },
            [&](int output, int row) { return total(output, row, 1); }, y, parts, codes, op, n0,
            outputs, from, WIDE * ROWS, n, m);
}

// y[p] = x[row of p] . w[ids[p]] for pairs p grouped by expert (experts.cu), eight at a time; a pair
// of token p / used takes x row p (each = 1) or p / used (each = 0). Group `experts` gives NaN. A
// pair's bits do not depend on its group. Grid (n / 16, groups).
SHARES(mul_mat_id_tile, Few)
KERNEL_OF(FEW_WARPS * 32, FEW_BLOCKS)
mul_mat_id_tile(const u8* w, const Quad* x, float* y, const int* order, const int* starts,
                const int* active, i64 n, i64 k, i64 experts, i64 used, int each) {
  SHARED_OBJECT(Few, shared);
  FOLLOW();
  if ((int)blockIdx.y >= active[0]) return;  // the whole block
  const i64 expert = active[1 + blockIdx.y], n0 = (i64)blockIdx.x * TILE;
  const int end = starts[expert + 1];
  const One one = {w + expert * n * row_bytes<WEIGHT>(k), y, n, n0};
  for (int first = starts[expert]; first < end; first += ROWS) {
    auto row = [&](int i) {
      const int pair = order[first + i < end ? first + i : end - 1];
      return (i64)(each ? pair : pair / (int)used);
    };
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const Rows rows = Rows::of(x, k, row(g), row(2 * t), row(2 * t + 1));
    auto put = [&](int i, float total) {
      const int at = first + i / TILE;
      const i64 col = n0 + i % TILE;
      if (at < end && col < n) y[order[at] * n + col] = total;
    };
    if (expert < experts) {
      tiles_of<false, false, WEIGHT>([&](int) { return one; }, 1, rows, k, shared,
                              [&](int, const Strands& part) {
                                for (int i = threadIdx.x; i < TILE * ROWS; i += blockDim.x)
                                  put(i, total_of(part, i % TILE, i / TILE));
                              });
    } else {
      for (int i = threadIdx.x; i < TILE * ROWS; i += blockDim.x)
        put(i, bits_to_float(0x7fc00000u));
    }
    __syncthreads();  // before the next pass overwrites what is shared
  }
}
