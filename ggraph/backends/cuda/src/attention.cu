// Attention of few query rows over a cache of type CACHE with any mask (windows, trees), in two steps.
//
// `shown` lists the cache rows that each query row sees. The list, not the cache, is cut into splits
// of SPLIT rows. `attend` gives each split's largest score, sum and mixed values; `merge` adds the
// splits in order. So bits depend neither on the number of query rows, nor on the size of the cache,
// nor on where in it lies what a row sees: a tree's node gets the bits that it has as text.
//
// A block takes one split for a tile of TILE pairs (query row, head of one key-value head), which
// share what is read of the cache where their lists say the same, as those of a text's next tokens
// do; where they differ (behind a tree's fork, between texts) it goes over the split once per query
// row. A pair's bits do not depend on the tile's others. Cache rows that some row of the tile sees in
// the same place must be finite. f16 and bf16 go through the tensor cores as they lie there; q8_0 as
// two bf16 numbers per value, f32 as three, which are all its digits (pieces.cuh).
// Legend: T query rows, H query heads, K key-value heads, D and V head sizes, C cache rows; g, c: a
// lane's place in a fragment, pairs g and g + 8, cache rows or values 2c and 2c + 1.
// Source: FlashAttention, arXiv 2205.14135; split over the cache: Flash-Decoding.
#define MOST_THREADS 128
#include "parts.cuh"

#define SPLIT 128
#define MAX_HEAD 512
#define THREADS 128
#define WARPS 4
#define KEYS (SPLIT / WARPS)  // of a warp
#define TILE 16
#define PART 64               // values that are mixed at a time
#define DIMS 256              // of a query that are staged at a time

// How the cores take a type: as which, stored values in so many pieces, those of f32 in so many.
template <class T>
struct core {
  typedef As_bf16 type;
  static const int STORED = 2, GIVEN = 2;
};
template <>
struct core<bf16> {
  typedef As_bf16 type;
  static const int STORED = 1, GIVEN = 2;
};
template <>
struct core<f16> {
  typedef As_f16 type;
  static const int STORED = 1, GIVEN = 2;
};
template <>
struct core<f32> {
  typedef As_bf16 type;
  static const int STORED = 3, GIVEN = 3;
};
typedef core<CACHE>::type Core;
#define STORED core<CACHE>::STORED
#define GIVEN core<CACHE>::GIVEN

// sum += a . b by their pieces, but for what all digits of the larger ones hide.
DEV void add_products(float* sum, const u32 (&a)[GIVEN][4], const u32 (&b)[STORED][2]) {
#pragma unroll
  for (int s = 0; s < STORED; ++s)
#pragma unroll
    for (int p = 0; p + s < GIVEN; ++p) Core::add_product(sum, a[p], b[s]);
}

DEV float shown_at(const u8* mask, i64 row, int mask_type) {
  return mask ? load_plain(mask + row * plain_size(mask_type), mask_type) : 0.0f;
}

// lists [T, 1 + C]: how many cache rows a query row sees, then which, ascending.
KERNEL shown(const u8* mask, const int* length, int* lists, i64 context, i64 mask_row,
             int mask_type) {
  SHARED int counts[THREADS];
  const i64 t = blockIdx.x;
  const u8* own = mask ? mask + t * mask_row : 0;
  i64 seen = length ? length[0] : context;
  seen = seen < 0 ? 0 : seen > context ? context : seen;
  const i64 each = (seen + THREADS - 1) / THREADS, begin = threadIdx.x * each;
  const i64 end = begin + each > seen ? seen : begin + each;
  int count = 0;
  for (i64 r = begin; r < end; ++r) count += shown_at(own, r, mask_type) != -INF;
  counts[threadIdx.x] = count;
  __syncthreads();
  int* list = lists + t * (1 + context);
  int at = 1;
  for (int i = 0; i < (int)threadIdx.x; ++i) at += counts[i];
  for (i64 r = begin; r < end; ++r)
    if (shown_at(own, r, mask_type) != -INF) list[at++] = (int)r;
  if (threadIdx.x == THREADS - 1) list[0] = at - 1;
}

// The same of rows that say themselves what they see: given [T, S], up to a number below 0, in their
// order; of what lies behind the length nothing is seen. lists [T, 1 + S].
KERNEL listed(const int* given, const int* length, int* lists, i64 context, i64 width) {
  SHARED int counts[THREADS];
  const i64 t = blockIdx.x, each = (width + THREADS - 1) / THREADS, begin = threadIdx.x * each;
  const int* own = given + t * width;
  i64 seen = length ? length[0] : context, end = 0;
  seen = seen < 0 ? 0 : seen > context ? context : seen;
  while (end < width && own[end] >= 0) ++end;
  end = begin + each > end ? end : begin + each;
  int count = 0;
  for (i64 i = begin; i < end; ++i) count += own[i] < seen;
  counts[threadIdx.x] = count;
  __syncthreads();
  int* list = lists + t * (1 + width);
  int at = 1;
  for (int i = 0; i < (int)threadIdx.x; ++i) at += counts[i];
  for (i64 i = begin; i < end; ++i)
    if (own[i] < seen) list[at++] = own[i];
  if (threadIdx.x == THREADS - 1) list[0] = at - 1;
}

// What a block shares. Rows are padded, so that lanes that read or write at once meet different banks.
union Room {
  Quad queries[GIVEN][TILE][DIMS / 8 + 4];  // scaled, by pieces; then:
  float mixed[WARPS][TILE][PART + 4];       // what each warp has mixed
};
struct Shared {
  Room room;
  float tops[WARPS][TILE], sums[WARPS][TILE];  // largest scores, sums of weights
  float lift[TILE], undo[TILE];                // bring a pair's query to Core's size, and back
  // Of this pass, by pair:
  const float* from[TILE];        // its query; none where it takes no part
  int row[TILE];                  // its query row's place in the tile; then -1
  i64 to[TILE];                   // place of its part (values)
  float mask[TILE][SPLIT];        // of query rows: added to scores; -inf behind the end of a list
  int differs;                    // whether lists say different things
};

struct Cache {
  const u8 *k, *v;  // of this key-value head
  i64 k_row, v_row;
  int dim, v_dim, rows;
};

// Lists of a plan that lacks an edge may hold anything: a value is corrupted then, not the device
// lost. How many of a split's cache rows a list has, which begins with the number of all.
DEV int seen_from(const int* list, int begin, i64 width) {
  const int seen = (list[0] < width ? list[0] : (int)width) - begin;
  return seen < 0 ? 0 : seen < SPLIT ? seen : SPLIT;
}

// The cache row at a place of a list, or its last one behind its end.
DEV i64 row_at(const int* list, int at, int last, const Cache& cache) {
  const int row = list[at < last ? at : last];
  return row < 0 ? 0 : row < cache.rows ? row : cache.rows - 1;
}

// How much each pair's query is brought to Core's size, and what takes that off.
DEV void measure(int dim, float scale, Shared& shared) {
  for (int m = threadIdx.x / 32; m < TILE; m += WARPS) {
    const float* row = shared.from[m];
    float most = 0.0f;
    for (int d = threadIdx.x % 32; row && d < dim; d += 32) {
      const float size = fabsf(row[d] * scale);
      most = size > most ? size : most;
    }
    most = warp_max(most);
    if (threadIdx.x % 32 == 0) {
      shared.lift[m] = lift_of<Core>(most);
      shared.undo[m] = inverse_of(shared.lift[m]);
    }
  }
}

// DIMS values from `first` on of each pair's query, in pieces; zeros behind the end.
DEV void stage(int first, int dim, float scale, Shared& shared) {
  for (int i = threadIdx.x; i < TILE * (DIMS / 8); i += THREADS) {
    const int m = i / (DIMS / 8), c = i % (DIMS / 8);
    if (first + 8 * c >= (dim + 31) / 32 * 32) continue;  // nobody reads it
    float v[8] = {};
    if (shared.from[m]) load_chunk<f32>((const u8*)shared.from[m], first / 8 + c, dim, v);
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = v[e] * scale * shared.lift[m];
    u32 words[GIVEN][4];
    pieces_of<Core>(v, words);
#pragma unroll
    for (int p = 0; p < GIVEN; ++p)
#pragma unroll
      for (int e = 0; e < 4; ++e) shared.room.queries[p][m][c].w[e] = words[p][e];
  }
}

// score[j] += the staged queries . this warp's cache rows 8j .. 8j + 7, of which rows[j] is the one
// whose chunks this lane reads.
template <bool ALIGNED>
DEV void scores_of(const Room& room, const u8* const (&rows)[KEYS / 8], int first, int dim,
                   float (&score)[KEYS / 8][4]) {
  const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll(ALIGNED ? 2 : 1)
  for (int i = 0; i < DIMS / 32 && first + 32 * i < dim; ++i) {
    u32 words[KEYS / 8][STORED][4] = {};
    const int chunk = first / 8 + 4 * i + c;
    if (8 * chunk < dim)
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j)
        words_of<Core, CACHE, ALIGNED>(rows[j], chunk, dim, words[j]);
    Quad q[GIVEN][2];  // of pairs g and g + 8
#pragma unroll
    for (int p = 0; p < GIVEN; ++p)
#pragma unroll
      for (int half = 0; half < 2; ++half) q[p][half] = room.queries[p][g + 8 * half][4 * i + c];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      u32 a[GIVEN][4];
#pragma unroll
      for (int p = 0; p < GIVEN; ++p)
#pragma unroll
        for (int e = 0; e < 4; ++e) a[p][e] = q[p][e % 2].w[2 * h + e / 2];
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) {
        u32 b[STORED][2];
#pragma unroll
        for (int s = 0; s < STORED; ++s)
#pragma unroll
          for (int e = 0; e < 2; ++e) b[s][e] = words[j][s][2 * h + e];
        add_products(score[j], a, b);
      }
    }
  }
}

// Eight values of each of two cache rows as words of pairs: words[i] has value i of both.
DEV void paired(const u32 (&one)[4], const u32 (&two)[4], u32 (&words)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[2 * i] = (one[i] & 0xffffu) | two[i] << 16;
    words[2 * i + 1] = one[i] >> 16 | (two[i] & 0xffff0000u);
  }
}

// mixed += weights . values of sixteen cache rows, of which this lane reads `rows`: 2c, 2c + 1,
// 2c + 8, 2c + 9. Column g of product i is value 8g + i of those from `first` on.
template <bool ALIGNED>
DEV void mix(const u32 (&weights)[GIVEN][4], const u8* const (&rows)[4], int first, int v_dim,
             float (&mixed)[8][4]) {
  const int chunk = first / 8 + threadIdx.x % 32 / 4;
  u32 words[4][STORED][4] = {};
  if (8 * chunk < v_dim)
#pragma unroll
    for (int r = 0; r < 4; ++r) words_of<Core, CACHE, ALIGNED>(rows[r], chunk, v_dim, words[r]);
  u32 upper[STORED][8], lower[STORED][8];
#pragma unroll
  for (int s = 0; s < STORED; ++s) {
    paired(words[0][s], words[1][s], upper[s]);
    paired(words[2][s], words[3][s], lower[s]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    u32 b[STORED][2];
#pragma unroll
    for (int s = 0; s < STORED; ++s) b[s][0] = upper[s][i], b[s][1] = lower[s][i];
    add_products(mixed[i], weights, b);
  }
}

// The larger one; what is no number stays, so that it is not taken for a row that sees nothing.
DEV float larger(float a, float b) { return b > a || b != b ? b : a; }

// The four lanes of a pair: their largest, their sum.
DEV float pair_max(float value) {
  for (int offset = 1; offset < 4; offset *= 2) value = larger(value, SHUFFLE_XOR(value, offset));
  return value;
}

DEV float pair_sum(float value) {
  for (int offset = 1; offset < 4; offset *= 2) value += SHUFFLE_XOR(value, offset);
  return value;
}

// One pass of a block over a split, of which `list` names `count` cache rows.
template <bool ALIGNED>
DEV void pass_of(const int* list, int count, const Cache& cache, float scale, float softcap,
                 Shared& shared, float* parts) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  const int last = count - 1, mine = KEYS * warp;
  float score[KEYS / 8][4] = {};
  const u8* rows[KEYS / 8];
#pragma unroll
  for (int j = 0; j < KEYS / 8; ++j) {
    const int at = mine + 8 * j + g;
    rows[j] = cache.k + row_at(list, at, last, cache) * cache.k_row;
  }
  measure(cache.dim, scale, shared);
  for (int first = 0; first < cache.dim; first += DIMS) {
    __syncthreads();  // `lift` is whole, and nobody reads what was staged before
    stage(first, cache.dim, scale, shared);
    __syncthreads();
    scores_of<ALIGNED>(shared.room, rows, first, cache.dim, score);
  }
#pragma unroll
  for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) score[j][i] *= shared.undo[g + i / 2 * 8];
  if (softcap != 0.0f)
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) score[j][i] = softcap * tanhf(score[j][i] / softcap);
  float most[2] = {-INF, -INF};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = shared.row[g + 8 * half];
    const float* added = shared.mask[row < 0 ? 0 : row] + mine + 2 * c;
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = score[j][2 * half + e];
        s = added[8 * j + e] == -INF ? -INF : s + added[8 * j + e];
        most[half] = larger(most[half], s);
      }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    most[half] = pair_max(most[half]);
    if (c == 0) shared.tops[warp][g + 8 * half] = most[half];
  }
  __syncthreads();  // `tops` is whole, and nobody reads the queries any more
  float sum[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half)
    for (int w = 0; w < WARPS; ++w) most[half] = larger(most[half], shared.tops[w][g + 8 * half]);
#pragma unroll
  for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float weight = score[j][i] == -INF ? 0.0f : expf(score[j][i] - most[i / 2]);
      sum[i / 2] += weight;
      score[j][i] = weight * Core::UNIT;
    }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] = pair_sum(sum[half]);
    if (c == 0) shared.sums[warp][g + 8 * half] = sum[half];
  }
  u32 weights[KEYS / 16][GIVEN][4];  // of sixteen cache rows each
#pragma unroll
  for (int n = 0; n < KEYS / 16; ++n) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = score[2 * n + i / 4][i % 4];
    pieces_of<Core>(v, weights[n]);
  }
  for (int first = 0; first < cache.v_dim; first += PART) {
    float mixed[8][4] = {};
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n) {
      const u8* four[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int at = mine + 16 * n + 2 * c + r % 2 + r / 2 * 8;
        four[r] = cache.v + row_at(list, at, last, cache) * cache.v_row;
      }
      mix<ALIGNED>(weights[n], four, first, cache.v_dim, mixed);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        shared.room.mixed[warp][g + e / 2 * 8][8 * (2 * c + e % 2) + i] = mixed[i][e];
    __syncthreads();
    for (int i = threadIdx.x; i < TILE * PART; i += THREADS) {
      const int m = i / PART, d = i % PART;
      if (shared.row[m] < 0 || first + d >= cache.v_dim) continue;
      float* part = parts + shared.to[m];
      float total = 0.0f, whole = 0.0f, top = -INF;
      for (int w = 0; w < WARPS; ++w) {
        total += shared.room.mixed[w][m][d];
        whole += shared.sums[w][m];
        top = larger(top, shared.tops[w][m]);
      }
      part[2 + first + d] = total * (1.0f / Core::UNIT);
      if (first + d == 0) {
        part[0] = top;
        part[1] = whole;
      }
    }
    __syncthreads();  // before the next values, or the next pass
  }
}

// parts [T, H, splits, 2 + V]: largest score, sum of weights, and the values they mix; splits behind
// the end of a row's list are not written. Grid (splits, tiles of heads, tiles of query rows).
template <bool ALIGNED>
DEV void attend_tile(const float* q, const u8* k, const u8* v, const u8* mask, const int* lists,
                     float* parts, i64 rows, i64 heads, i64 kv_heads, i64 dim, i64 v_dim,
                     i64 context, i64 width, i64 k_row, i64 k_head, i64 v_row, i64 v_head, i64 mask_row,
                     float scale, float softcap, int mask_type, Shared& shared) {
  const i64 group = heads / kv_heads, most_heads = group < TILE ? group : TILE;
  const i64 tiles = (group + TILE - 1) / TILE, kv_head = blockIdx.y / tiles;
  const i64 skipped = blockIdx.y % tiles * TILE, first_row = blockIdx.z * (TILE / most_heads);
  const i64 here = rows - first_row < TILE / most_heads ? rows - first_row : TILE / most_heads;
  const int begin = (int)blockIdx.x * SPLIT;
  const int* list = lists;  // of the row that sees most of the split
  int count = 0;
  for (int r = 0; r < here; ++r) {
    const int* own = lists + (first_row + r) * (1 + width);
    const int seen = seen_from(own, begin, width);
    if (seen > count) count = seen, list = own + 1 + begin;
  }
  if (count == 0) return;  // the whole block
  if (threadIdx.x == 0) shared.differs = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < here * SPLIT; i += THREADS) {
    const int* own = lists + (first_row + i / SPLIT) * (1 + width);
    const int at = i % SPLIT;
    if (at < seen_from(own, begin, width) && own[1 + begin + at] != list[at]) shared.differs = 1;
  }
  const Cache cache = {k + kv_head * k_head, v + kv_head * v_head, k_row, v_row,
                       (int)dim, (int)v_dim, (int)context};
  __syncthreads();
  const int passes = shared.differs ? (int)here : 1;
  for (int p = 0; p < passes; ++p) {
    if (shared.differs) {
      const int* own = lists + (first_row + p) * (1 + width);
      count = seen_from(own, begin, width);
      list = own + 1 + begin;
      if (count == 0) continue;  // the whole block
    }
    if (threadIdx.x < TILE) {
      const int m = threadIdx.x;
      const i64 r = m / most_heads, h = skipped + m % most_heads, t = first_row + r;
      const i64 head = kv_head * group + h;
      const bool takes_part = r < here && h < group && (!shared.differs || r == p);
      shared.row[m] = takes_part ? (int)r : -1;
      shared.to[m] = ((t * heads + head) * gridDim.x + blockIdx.x) * (2 + v_dim);
      shared.from[m] = takes_part ? q + (t * heads + head) * dim : 0;
    }
    for (int i = threadIdx.x; i < here * SPLIT; i += THREADS) {
      const i64 t = first_row + i / SPLIT;
      const int at = i % SPLIT;
      const bool sees = at < count && at < seen_from(lists + t * (1 + width), begin, width);
      const u8* own = mask ? mask + t * mask_row : 0;
      shared.mask[i / SPLIT][at] =
          sees ? shown_at(own, row_at(list, at, count - 1, cache), mask_type) : -INF;
    }
    __syncthreads();
    pass_of<ALIGNED>(list, count, cache, scale, softcap, shared, parts);
  }
}

// Rows of keys and values of plain types begin at multiples of 16 bytes, and head sizes are multiples
// of 8.
KERNEL attend(const float* q, const u8* k, const u8* v, const u8* mask, const int* lists,
              float* parts, i64 rows, i64 heads, i64 kv_heads, i64 dim, i64 v_dim, i64 context,
              i64 width, i64 k_row, i64 k_head, i64 v_row, i64 v_head, i64 mask_row, float scale,
              float softcap, int mask_type) {
  SHARED Shared shared;
  attend_tile<true>(q, k, v, mask, lists, parts, rows, heads, kv_heads, dim, v_dim, context, width,
                    k_row, k_head, v_row, v_head, mask_row, scale, softcap, mask_type, shared);
}

// The same wherever they begin.
KERNEL attend_odd(const float* q, const u8* k, const u8* v, const u8* mask, const int* lists,
                  float* parts, i64 rows, i64 heads, i64 kv_heads, i64 dim, i64 v_dim, i64 context,
                  i64 width, i64 k_row, i64 k_head, i64 v_row, i64 v_head, i64 mask_row, float scale,
                  float softcap, int mask_type) {
  SHARED Shared shared;
  attend_tile<false>(q, k, v, mask, lists, parts, rows, heads, kv_heads, dim, v_dim, context, width,
                     k_row, k_head, v_row, v_head, mask_row, scale, softcap, mask_type, shared);
}

// y [T, H, V]; a row that sees nothing gives zeros. sinks[h] is one more score of the sum.
// Grid (H, T); `splits` are those that there is room for. y in parts as well where there is `given`.
KERNEL merge(const float* parts, const int* lists, const float* sinks, float* y, Quad* given,
             i64 splits, i64 v_dim, i64 width) {
  const i64 at = (i64)blockIdx.y * gridDim.x + blockIdx.x;  // t * H + h
  const float* part = parts + at * splits * (2 + v_dim);
  const i64 all = (lists[blockIdx.y * (1 + width)] + SPLIT - 1) / SPLIT;
  const i64 used = all < splits ? all : splits;
  const float sink = sinks ? sinks[blockIdx.x] : -INF;
  float top = sink;
  for (i64 s = 0; s < used; ++s) top = larger(top, part[s * (2 + v_dim)]);
  for (i64 d = threadIdx.x; d < v_dim; d += blockDim.x) {
    float sum = sink == -INF ? 0.0f : expf(sink - top), mixed = 0.0f;
    for (i64 s = 0; s < used; ++s) {
      const float* p = part + s * (2 + v_dim);
      if (p[0] == -INF) continue;
      const float share = expf(p[0] - top);
      sum = fmaf(p[1], share, sum);
      mixed = fmaf(p[2 + d], share, mixed);
    }
    y[at * v_dim + d] = sum == 0.0f ? 0.0f : mixed / sum;
  }
  if (given) give_parts(y + at * v_dim, given + at * (v_dim / 4), v_dim);
}
