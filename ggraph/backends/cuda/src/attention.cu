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
#define DIMS 128              // of a query that are staged at a time

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
static const bool IN_THREE = STORED == 3;  // what is stored

// sum += a . b by their pieces, but for what all digits of the larger ones hide.
DEV void add_products(float* sum, const u32 (&a)[GIVEN][4], const u32 (&b)[STORED][2]) {
#pragma unroll
  for (int s = 0; s < STORED; ++s)
#pragma unroll
    for (int p = 0; p + s < GIVEN; ++p) Core::add_product(sum, a[p], b[s]);
}

DEV float shown_at(const u8* mask, i64 row, int mask_type) {
  return mask ? float_of(float_bits_at(mask + row * plain_size(mask_type), mask_type), mask_type)
              : 0.0f;
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
  i64 seen = length ? length[0] : context;
  seen = seen < 0 ? 0 : seen > context ? context : seen;
  const i64 last = begin + each > width ? width : begin + each;
  int first = (int)width;  // number below 0, of the thread's own: loads need not wait for one another
#pragma unroll 4
  for (i64 i = last - 1; i >= begin; --i) first = own[i] < 0 ? (int)i : first;
  counts[threadIdx.x] = first;
  __syncthreads();
#pragma unroll 8
  for (int i = 0; i < THREADS; ++i) first = counts[i] < first ? counts[i] : first;
  __syncthreads();
  const i64 end = last > first ? first : last;
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
  // Of this pass:
  float undo[TILE];         // takes off what a pair's query was brought to Core's size by
  int row[TILE];            // a pair's query row in the tile; -1 where it takes no part
  i64 to[TILE];             // place of a pair's part (values)
  int places[SPLIT];        // cache rows; behind the end the last one
  float mask[TILE][SPLIT];  // of query rows: added to scores; -inf behind the end of a list
  int differs;              // whether lists say different things
};

// What a block works on: heads of one key-value head, query rows from `first_row` on.
struct Tile {
  const float* q;
  const int* lists;
  const u8 *k, *v, *mask;  // keys and values of the key-value head
  i64 k_row, v_row, mask_row;
  int first_row, first_head, heads, all_heads, dim, v_dim, context, width, mask_type;
};

// The list of a query row of the tile, which begins with the number of all.
DEV const int* list_of(const Tile& tile, int row) {
  return tile.lists + (i64)(tile.first_row + row) * (1 + tile.width);
}

// Lists of a plan that lacks an edge may hold anything: a value is corrupted then, not the device
// lost. How many cache rows of this block's split a list has.
DEV int seen_from(const int* list, const Tile& tile) {
  const int seen = (list[0] < tile.width ? list[0] : tile.width) - (int)blockIdx.x * SPLIT;
  return seen < 0 ? 0 : seen < SPLIT ? seen : SPLIT;
}

// What a list has at a place of the split; anything behind its end, so that the number need not be
// known first.
DEV int place_in(const int* list, int place, const Tile& tile) {
  const int at = blockIdx.x * SPLIT + place, row = at < tile.width ? list[1 + at] : 0;
  return row < 0 ? 0 : row < tile.context ? row : tile.context - 1;
}

// Chunks of a pair's query from value `first` on, as this thread stages them: every eighth.
template <bool ALIGNED>
DEV void load_query(const float* from, int first, int dim, float (&v)[DIMS / 64][8]) {
#pragma unroll
  for (int i = 0; i < DIMS / 64; ++i) {
    const int c = first / 8 + threadIdx.x % 8 + 8 * i;
#pragma unroll
    for (int e = 0; e < 8; ++e) v[i][e] = 0.0f;
    if (!from || 8 * c >= dim) continue;
    if (ALIGNED) f32::eight(from + 8 * c, v[i]);
    else load_chunk<f32>((const u8*)from, c, dim, v[i]);
  }
}

// The largest size of what a thread has loaded of a query, and of `most`.
DEV float largest(const float (&v)[DIMS / 64][8], float scale, float most) {
#pragma unroll
  for (int i = 0; i < DIMS / 64; ++i)
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float size = fabsf(v[i][e] * scale);
      most = size > most ? size : most;
    }
  return most;
}

// Loaded chunks of each pair's query, in pieces.
DEV void stage(const float (&v)[DIMS / 64][8], int left, float scale, float lift, Room& room) {
#pragma unroll
  for (int i = 0; i < DIMS / 64; ++i) {
    const int c = threadIdx.x % 8 + 8 * i;
    if (8 * c >= (left + 31) / 32 * 32) continue;  // nobody reads it
    float lifted[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) lifted[e] = v[i][e] * scale * lift;
    u32 words[GIVEN][4];
    pieces_of<Core>(lifted, words);
#pragma unroll
    for (int p = 0; p < GIVEN; ++p)
#pragma unroll
      for (int e = 0; e < 4; ++e) room.queries[p][threadIdx.x / 8][c].w[e] = words[p][e];
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

// Values of this warp's cache rows, sixteen by sixteen, of which a lane reads 2c, 2c + 1, 2c + 8
// and 2c + 9: the g-th eight of those from `first` on.
template <bool ALIGNED>
DEV void load_values(const Shared& shared, const Tile& tile, int first,
                     u32 (&words)[KEYS / 16][4][STORED][4]) {
  const int c = threadIdx.x % 4, chunk = first / 8 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int n = 0; n < KEYS / 16; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int at = threadIdx.x / 32 * KEYS + 16 * n + 2 * c + r % 2 + r / 2 * 8;
#pragma unroll
      for (int i = 0; i < 4 * STORED; ++i) words[n][r][i / 4][i % 4] = 0;
      if (8 * chunk < tile.v_dim)
        words_of<Core, CACHE, ALIGNED>(tile.v + shared.places[at] * tile.v_row, chunk, tile.v_dim,
                                       words[n][r]);
    }
}

// mixed += weights . values of sixteen cache rows. Column g of product i is value 8g + i.
DEV void mix(const u32 (&weights)[GIVEN][4], const u32 (&words)[4][STORED][4],
             float (&mixed)[8][4]) {
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

// The largest of the four lanes of a pair.
DEV float pair_max(float value) {
  for (int offset = 1; offset < 4; offset *= 2) value = larger(value, SHUFFLE_XOR(value, offset));
  return value;
}

// One pass of a block over its split, for the query rows begin .. end of the tile, whose lists
// agree. What is read waits for the lists alone, on the way to which nothing else is waited for.
template <bool ALIGNED>
DEV void pass_of(int begin, int end, const Tile& tile, float scale, float softcap, Shared& shared,
                 float* parts) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  int count = 0, place = 0, longest = begin;
#pragma unroll 1  // more of them at once would take registers from all the rest
  for (int r = begin; r < end; ++r) {
    const int* list = list_of(tile, r);
    const int seen = seen_from(list, tile), own = place_in(list, threadIdx.x, tile);
    if ((int)threadIdx.x < seen) place = own;
    if (seen > count) count = seen, longest = r;
  }
  if (count == 0) return;  // the whole block
  if ((int)threadIdx.x >= count) {
    place = place_in(list_of(tile, longest), count - 1, tile);
  } else {
    ask_for(tile.k + place * tile.k_row, tile.dim / CACHE::BLOCK * CACHE::BYTES);
    ask_for(tile.v + place * tile.v_row, tile.v_dim / CACHE::BLOCK * CACHE::BYTES);
  }
  shared.places[threadIdx.x] = place;
  const int pair = threadIdx.x / 8, pair_row = pair / tile.heads;
  const i64 head = (i64)(tile.first_row + pair_row) * tile.all_heads + tile.first_head +
                   pair % tile.heads;
  const bool takes_part = pair_row >= begin && pair_row < end;
  const float* from = takes_part ? tile.q + head * tile.dim : 0;
  float query[DIMS / 64][8];
  load_query<ALIGNED>(from, 0, tile.dim, query);
#pragma unroll 2
  for (int r = begin; r < end; ++r) {
    const u8* mask = tile.mask ? tile.mask + (tile.first_row + r) * tile.mask_row : 0;
    const bool sees = (int)threadIdx.x < seen_from(list_of(tile, r), tile);
    shared.mask[r][threadIdx.x] = sees ? shown_at(mask, place, tile.mask_type) : -INF;
  }
  float most_of_query = largest(query, scale, 0.0f);
  for (int first = DIMS; first < tile.dim; first += DIMS) {
    float more[DIMS / 64][8];
    load_query<ALIGNED>(from, first, tile.dim, more);
    most_of_query = largest(more, scale, most_of_query);
  }
  for (int offset = 1; offset < 8; offset *= 2) {
    const float other = SHUFFLE_XOR(most_of_query, offset);
    most_of_query = other > most_of_query ? other : most_of_query;
  }
  const float lift = lift_of<Core>(most_of_query);
  if (threadIdx.x % 8 == 0) {
    shared.undo[pair] = inverse_of(lift);
    shared.row[pair] = takes_part ? pair_row : -1;
    shared.to[pair] = (head * gridDim.x + blockIdx.x) * (2 + tile.v_dim);
  }
  float score[KEYS / 8][4] = {};
  const u8* rows[KEYS / 8];
  const int mine = KEYS * warp;
  for (int first = 0; first < tile.dim; first += DIMS) {
    if (first) {
      __syncthreads();  // nobody reads what was staged before
      load_query<ALIGNED>(from, first, tile.dim, query);
    }
    stage(query, tile.dim - first, scale, lift, shared.room);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j)
      rows[j] = tile.k + shared.places[mine + 8 * j + g] * tile.k_row;
    scores_of<ALIGNED>(shared.room, rows, first, tile.dim, score);
  }
  // Values are on their way while scores become weights, but where their pieces would be too many
  // registers.
  const bool early = STORED == 1;
  u32 words[KEYS / 16][4][STORED][4];
  if (early) load_values<ALIGNED>(shared, tile, 0, words);
#pragma unroll
  for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) score[j][i] *= shared.undo[g + i / 2 * 8];
  if (softcap != 0.0f) {
    const float share = 1.0f / softcap;
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) score[j][i] = softcap * tanhf(score[j][i] * share);
  }
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
    sum[half] = four_sum(sum[half]);
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
  for (int first = 0; first < tile.v_dim; first += PART) {
    float mixed[8][4] = {};
    if (!early) load_values<ALIGNED>(shared, tile, first, words);
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n) mix(weights[n], words[n], mixed);
    if (early && first + PART < tile.v_dim)
      load_values<ALIGNED>(shared, tile, first + PART, words);
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        shared.room.mixed[warp][g + e / 2 * 8][8 * (2 * c + e % 2) + i] = mixed[i][e];
    __syncthreads();
    if (first == 0 && threadIdx.x < TILE && shared.row[threadIdx.x] >= 0) {
      float whole = 0.0f, top = -INF;
      for (int w = 0; w < WARPS; ++w) {
        whole += shared.sums[w][threadIdx.x];
        top = larger(top, shared.tops[w][threadIdx.x]);
      }
      float* part = parts + shared.to[threadIdx.x];
      part[0] = top;
      part[1] = whole;
    }
    for (int i = threadIdx.x; i < TILE * PART; i += THREADS) {
      const int m = i / PART, d = i % PART;
      if (shared.row[m] < 0 || first + d >= tile.v_dim) continue;
      float total = 0.0f;
      for (int w = 0; w < WARPS; ++w) total += shared.room.mixed[w][m][d];
      parts[shared.to[m] + 2 + first + d] = total * (1.0f / Core::UNIT);
    }
    __syncthreads();  // before the next values, or the next pass
  }
}

// parts [T, H, splits, 2 + V]: largest score, sum of weights, and the values they mix; splits behind
// the end of a row's list are not written. Grid (splits, tiles of heads, tiles of query rows).
template <bool ALIGNED>
DEV void attend_tile(const float* q, const u8* k, const u8* v, const u8* mask, const int* lists,
                     float* parts, int rows, int heads, int group, int dim, int v_dim, int context,
                     int width, i64 k_row, i64 k_head, i64 v_row, i64 v_head, i64 mask_row,
                     float scale, float softcap, int mask_type, int tile_rows, Shared& shared) {
  int kv_head = blockIdx.y, skipped = 0;
  if (group > TILE) {  // a tile has not all heads of a group
    const int tiles = (group + TILE - 1) / TILE;
    kv_head = blockIdx.y / tiles;
    skipped = blockIdx.y % tiles * TILE;
  }
  const int here_heads = group - skipped < TILE ? group - skipped : TILE;
  const int first_row = blockIdx.z * tile_rows;
  const int here = rows - first_row < tile_rows ? rows - first_row : tile_rows;
  const Tile tile = {q, lists, k + kv_head * k_head, v + kv_head * v_head, mask, k_row, v_row,
                     mask_row, first_row, kv_head * group + skipped, here_heads, heads, dim, v_dim,
                     context, width, mask_type};
  int together = here;  // query rows of a pass
  if (here > 1) {
    if (threadIdx.x == 0) shared.differs = 0;
    __syncthreads();
    int known = -1;  // what the lists say of this thread's place
    for (int r = 0; r < here; ++r) {
      const int* list = list_of(tile, r);
      const int seen = seen_from(list, tile), own = place_in(list, threadIdx.x, tile);
      if ((int)threadIdx.x >= seen) continue;
      if (known >= 0 && known != own) shared.differs = 1;
      known = own;
    }
    __syncthreads();
    if (shared.differs) together = 1;
  }
  for (int r = 0; r < here; r += together)
    pass_of<ALIGNED>(r, r + together, tile, scale, softcap, shared, parts);
}

// Queries, and rows of keys and values of plain types, begin at multiples of 16 bytes, and head
// sizes are multiples of 8. A tile has `tile_rows` query rows.
KERNEL_OF(MOST_THREADS, IN_THREE ? 1 : 0)
attend(const float* q, const u8* k, const u8* v, const u8* mask,
                           const int* lists, float* parts, int rows, int heads, int group,
                           int dim, int v_dim, int context, int width, i64 k_row, i64 k_head,
                           i64 v_row, i64 v_head, i64 mask_row, float scale, float softcap,
                           int mask_type, int tile_rows) {
  SHARED Shared shared;
  attend_tile<true>(q, k, v, mask, lists, parts, rows, heads, group, dim, v_dim, context, width,
                    k_row, k_head, v_row, v_head, mask_row, scale, softcap, mask_type, tile_rows,
                    shared);
}

// The same wherever they begin.
KERNEL_OF(MOST_THREADS, IN_THREE ? 1 : 0)
attend_odd(const float* q, const u8* k, const u8* v, const u8* mask,
                               const int* lists, float* parts, int rows, int heads, int group,
                               int dim, int v_dim, int context, int width, i64 k_row, i64 k_head,
                               i64 v_row, i64 v_head, i64 mask_row, float scale, float softcap,
                               int mask_type, int tile_rows) {
  SHARED Shared shared;
  attend_tile<false>(q, k, v, mask, lists, parts, rows, heads, group, dim, v_dim, context, width,
                     k_row, k_head, v_row, v_head, mask_row, scale, softcap, mask_type, tile_rows,
                     shared);
}

// y [T, H, V]; a row that sees nothing gives zeros. sinks[h] is one more score of the sum.
// Grid (H, T); `splits` are those that there is room for. y in parts as well where there is `given`,
// and in codes where those are: row 0 is row `from` of them, and V a multiple of 32.
KERNEL merge(const float* parts, const int* lists, const float* sinks, float* y, Quad* given,
             Quad* codes, int splits, int v_dim, int width, int from) {
  SHARED float shares[THREADS], sums[THREADS], tops[WARPS];
  const i64 at = (i64)blockIdx.y * gridDim.x + blockIdx.x;  // t * H + h
  const int row = 2 + v_dim, thread = threadIdx.x;
  const float* part = parts + at * splits * row;
  // What the first splits say is read before it is known how many there are.
  const float first_top = thread < splits ? part[thread * (i64)row] : -INF;
  const float first_sum = thread < splits ? part[thread * (i64)row + 1] : 0.0f;
  const float sink = sinks ? sinks[blockIdx.x] : -INF;
  const int seen = lists[blockIdx.y * (i64)(1 + width)];
  const int all = ((seen < width ? seen : width) + SPLIT - 1) / SPLIT;
  const int used = all < splits ? all : splits;
  float top = larger(sink, thread < used ? first_top : -INF);
#pragma unroll 1
  for (int s = thread + THREADS; s < used; s += THREADS) top = larger(top, part[s * (i64)row]);
  top = block_max(top, tops);
  for (int first = 0; first < v_dim; first += THREADS) {
    const int d = first + thread;
    float sum = sink == -INF ? 0.0f : expf(sink - top), mixed = 0.0f;
    for (int begin = 0; begin < used; begin += THREADS) {
      const int here = used - begin < THREADS ? used - begin : THREADS;
      const float* own = part + begin * (i64)row;
      __syncthreads();  // readers of the last shares are done
      if (thread < here) {
        const float most = begin ? own[thread * (i64)row] : first_top;
        shares[thread] = most == -INF ? 0.0f : expf(most - top);
        sums[thread] = begin ? own[thread * (i64)row + 1] : first_sum;
      }
      __syncthreads();
      own += d < v_dim ? 2 + d : 0;
#pragma unroll 8
      for (int s = 0; s < here; ++s) {
        sum = fmaf(sums[s], shares[s], sum);
        mixed = fmaf(own[s * (i64)row], shares[s], mixed);
      }
    }
    const float value = sum == 0.0f ? 0.0f : mixed / sum;
    if (d < v_dim) y[at * v_dim + d] = value;
    if (given) give_lanes_part(value, given + (at * v_dim + d) / 4, d < v_dim);
    if (codes)
      give_lanes_codes(value, d < v_dim, codes, gridDim.x * v_dim, from + blockIdx.y,
                       blockIdx.x * v_dim + d);
  }
}
