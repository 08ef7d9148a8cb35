// Attention of many query rows over a cache of type CACHE, on the tensor cores.
//
// A warp takes 16 rows of one head. The four warps of a block belong to heads of one key-value head
// and share its keys and values, 32 cache rows at a time, which lie in shared memory as the cores
// take them: f16 and bf16 are copied as they are while those before are at work, others become two
// bf16 numbers a value. `tiles_shown` says, once for all layers with one mask, of which 32 cache rows
// 16 rows see nothing, so that they are passed over, or everything, so that the mask is not read.
// Cache rows among 32 of which some row sees one must be finite. Queries and weights are two numbers
// of the cores a float.
// Legend: T query rows, H query heads, D and V head sizes (multiples of 32, at most 128); g, c: a
// lane's place in a fragment, rows g and g + 8, columns 2c and 2c + 1; unit: 16 rows of a head, heads
// of one key-value head side by side.
// Source: FlashAttention-2, arXiv 2307.08691.
#define MOST_THREADS 128
#include "pieces.cuh"

#define WARPS 4
#define ROWS 16    // query rows of a unit
#define KEYS 32    // cache rows per step, as many as a warp has lanes
#define MOST 128   // of D and V
#define CHUNKS 4   // of 32 values in a row of MOST
#define HALVES 2   // of 64 values in it
#define APART (MOST_THREADS / (MOST / 8))  // cache rows of which a block reads a chunk a thread

template <bool HALF>
struct core {
  typedef As_bf16 type;
};
template <>
struct core<true> {
  typedef As_f16 type;
};
typedef core<holds<As_f16, CACHE>::VALUE>::type Core;
#define STORED (holds<Core, CACHE>::VALUE ? 1 : 2)  // numbers of a key's or value's element
#define STAGES (2 / STORED)

// Cache rows in Core's numbers. Chunks are swapped among a row's by its number, so that lanes that
// read keys (two rows, four chunks) or values (four rows, two chunks) at once meet different banks.
typedef Quad Tile[STORED][KEYS][MOST / 8];
DEV int place_in(int row, int chunk) { return chunk ^ (row & 6) ^ (row & 1) << 2; }

// What 16 query rows see of 32 cache rows: nothing, all as it is, or what the mask says.
enum Sight { NONE = 0, MASKED = 1, ALL = 2 };

// tiles [T / 16, C / 32], rows of `pitch` bytes. Grid (pitch / 4, T / 16), a warp per byte.
KERNEL tiles_shown(const u8* mask, u8* tiles, i64 rows, i64 context, i64 mask_row, i64 pitch,
                   int mask_type) {
  const i64 tile = (i64)blockIdx.x * WARPS + threadIdx.x / 32, at = tile * KEYS + threadIdx.x % 32;
  float seen = 0.0f, changed = 0.0f;
  for (int r = 0; r < ROWS; ++r) {
    const i64 row = (i64)blockIdx.y * ROWS + r;
    if (row >= rows || at >= context) break;
    const float m = float_at(mask + row * mask_row + at * plain_size(mask_type), mask_type);
    if (m != -INF) seen = 1.0f;
    if (m != 0.0f) changed = 1.0f;
  }
  seen = warp_max(seen);
  changed = warp_max(changed);
  if (threadIdx.x % 32 == 0)
    tiles[blockIdx.y * pitch + tile] = seen == 0.0f ? NONE : changed == 0.0f ? ALL : MASKED;
}

// The first step from `at` on of which one of some rows of tiles sees something; `count` or more
// where none does.
DEV int next_shown(const u8* tiles, int rows, i64 pitch, int at, int count) {
  while (tiles && at < count) {
    u32 four = 0;
#pragma unroll 1
    for (int r = 0; r < rows; ++r) four |= word_at(tiles + r * pitch + at / 4 * 4);
    four >>= at % 4 * 8;
    if (four) {
      for (; !(four & 255); four >>= 8) ++at;
      break;
    }
    at = at / 4 * 4 + 4;
  }
  return at;
}

// Cache rows first .. first + 31, or the last one behind its end, on their way into shared memory.
template <bool ALIGNED>
DEV void stage_as(const u8* cache, i64 stride, i64 first, i64 last, int dim, Tile& to) {
  const int chunk = threadIdx.x % (MOST / 8);
  if (8 * chunk >= dim) return;
#pragma unroll(ALIGNED ? KEYS / APART : 1)
  for (int n = 0; n < KEYS / APART; ++n) {
    const int row = n * APART + threadIdx.x / (MOST / 8), place = place_in(row, chunk);
    const u8* from = cache + (first + row < last ? first + row : last) * stride;
    if (ALIGNED && STORED == 1) {
      copy_16(&to[0][row][place], from + 16 * chunk);
      continue;
    }
    u32 words[STORED][4];
    words_of<Core, CACHE, ALIGNED>(from, chunk, dim, words);
#pragma unroll
    for (int s = 0; s < STORED; ++s)
#pragma unroll
      for (int e = 0; e < 4; ++e) to[s][row][place].w[e] = words[s][e];
  }
}

DEV void stage(const u8* cache, i64 stride, i64 first, i64 last, int dim, Tile& to) {
  const bool aligned = (((unsigned long long)cache | (unsigned long long)stride) & 15) == 0;
  if (aligned) stage_as<true>(cache, stride, first, last, dim, to);
  else stage_as<false>(cache, stride, first, last, dim, to);
}

// The largest of the four lanes of a row.
DEV float row_max(float value) {
  for (int offset = 1; offset < 4; offset *= 2) value = fmaxf(value, SHUFFLE_XOR(value, offset));
  return value;
}

// What a lane holds of the scaled queries, in two numbers: a chunk of rows g and g + 8 for every 32
// values; and what brings the rows' scores back to their size.
struct Queries {
  u32 words[CHUNKS][2][2][4];
  float undo[2];
};

DEV void queries_of(const float* q, i64 row, i64 rows, i64 q_row, int dim, float scale,
                    Queries& to) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float v[CHUNKS][8] = {}, most = 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      if (32 * i < dim && row + 8 * half < rows)
        load_chunk<f32>((const u8*)(q + (row + 8 * half) * q_row), 4 * i + c, dim, v[i]);
#pragma unroll
      for (int e = 0; e < 8; ++e) most = fmaxf(most, fabsf(v[i][e] *= scale));
    }
    const float lift = lift_of<Core>(row_max(most));
    to.undo[half] = inverse_of(lift);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) v[i][e] *= lift;
      pieces_of<Core>(v[i], to.words[i][half]);
    }
  }
}

// score[j] = queries . cache rows 8j .. 8j + 7. WHOLE: D is MOST, so that loads run ahead over chunks.
template <bool WHOLE>
DEV void scores_of(const Queries& q, const Tile& keys, int dim, float (&score)[KEYS / 8][4]) {
  const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    if (!WHOLE && 32 * i >= dim) continue;
#pragma unroll
    for (int s = 0; s < STORED; ++s) {
      Quad key[KEYS / 8];
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) key[j] = keys[s][8 * j + g][place_in(g, 4 * i + c)];
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int p = 0; p + s < 2; ++p) {
          const u32 a[4] = {q.words[i][0][p][2 * h], q.words[i][1][p][2 * h],
                            q.words[i][0][p][2 * h + 1], q.words[i][1][p][2 * h + 1]};
#pragma unroll
          for (int j = 0; j < KEYS / 8; ++j) {
            const u32 b[2] = {key[j].w[2 * h], key[j].w[2 * h + 1]};
            Core::add_product(score[j], a, b);
          }
        }
    }
  }
}

// mixed += weights . values, of which 16 rows make up a product's inner size. Column g of product i is
// value 8g + i of a half. WHOLE: V is MOST.
template <bool WHOLE>
DEV void mix(const u32 (&weights)[KEYS / 16][2][4], const Tile& values, int v_dim,
             float (&mixed)[HALVES][8][4]) {
  const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    if (!WHOLE && 64 * half >= v_dim) continue;  // nobody stores other columns behind V
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n)
#pragma unroll
      for (int s = 0; s < STORED; ++s) {
        Quad four[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int row = 16 * n + 2 * c + r % 2 + r / 2 * 8;
          four[r] = values[s][row][place_in(row, 8 * half + g)];
        }
        u32 pairs[8][2];
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            pairs[i][r] = permute(four[2 * r].w[i / 2], four[2 * r + 1].w[i / 2],
                                  i % 2 ? 0x7632 : 0x5410);
#pragma unroll
        for (int p = 0; p + s < 2; ++p)  // products that wait for one another lie apart
#pragma unroll
          for (int i = 0; i < 8; ++i) Core::add_product(mixed[half][i], weights[n][p], pairs[i]);
      }
  }
}

// y [T, H, V]; a row that sees nothing gives zeros. sinks[h] is one more score of the sum. Grid
// (key-value heads, units / 4): rows that see the most begin first.
KERNEL attend_rows(const float* q, const u8* k, const u8* v, const u8* mask, const u8* tiles,
                   const int* length, const float* sinks, float* y, i64 rows, i64 group, i64 dim,
                   i64 v_dim, i64 context, i64 pitch, i64 k_row, i64 k_head, i64 v_row, i64 v_head,
                   i64 mask_row, float scale, float softcap, int mask_type) {
  SHARED Tile keys[STAGES], values[STAGES];
  const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  const int units = ((int)rows + ROWS - 1) / ROWS * (int)group;
  const int begin = (int)(gridDim.y - 1 - blockIdx.y) * WARPS, unit = begin + threadIdx.x / 32;
  const int last = (begin + WARPS < units ? begin + WARPS : units) - 1;  // of the block
  const int head = blockIdx.x * (int)group + unit % (int)group, heads = gridDim.x * (int)group;
  const int tile = unit / (int)group, first_tile = begin / (int)group;
  const int tile_rows = last / (int)group - first_tile + 1;
  const i64 mine = (i64)tile * ROWS + g;
  const u8* shown = tiles ? tiles + first_tile * pitch : 0;
  const u8* own = tiles ? tiles + tile * pitch : 0;
  i64 seen = length ? length[0] : context;
  seen = seen < 0 ? 0 : seen > context ? context : seen;
  const int size = plain_size(mask_type), steps = (int)((seen + KEYS - 1) / KEYS);
  k += blockIdx.x * k_head;
  v += blockIdx.x * v_head;
  Queries given;
  float top[2] = {-INF, -INF}, sum[2] = {}, mixed[HALVES][8][4] = {};
  // With two stages a step's cache rows are on their way during the step before.
  for (int at = -1, held = 0; at < steps; held = 1 - held) {  // the whole block
    const int next = next_shown(shown, tile_rows, pitch, at + 1, steps);
    const int step = STAGES > 1 ? at : next, here = STAGES > 1 ? held : 0;
    copies_done();
    __syncthreads();  // these are whole, and nobody reads those before
    if (next < steps) {
      stage(k, k_row, (i64)next * KEYS, seen - 1, (int)dim, keys[STAGES - 1 - here]);
      stage(v, v_row, (i64)next * KEYS, seen - 1, (int)v_dim, values[STAGES - 1 - here]);
    }
    if (at < 0)
      queries_of(q + (i64)head * dim, unit < units ? mine : rows, rows, heads * dim, (int)dim, scale,
                 given);
    if (STAGES == 1) __syncthreads();
    at = next;
    if (step < 0 || step >= steps) continue;
    const int left = (int)(seen - (i64)step * KEYS);  // cache rows from the step's first one on
    const int sight = unit >= units ? NONE : own ? own[step] : ALL;
    if (sight != NONE) {  // the whole warp
      float score[KEYS / 8][4] = {};
      if (dim == MOST) scores_of<true>(given, keys[here], (int)dim, score);
      else scores_of<false>(given, keys[here], (int)dim, score);
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          score[j][i] *= given.undo[i / 2];
          if (softcap != 0.0f) score[j][i] = softcap * tanhf(score[j][i] / softcap);
        }
      if (sight == MASKED || left < KEYS) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const i64 row = mine + 8 * half < rows ? mine + 8 * half : rows - 1;
          const u8* from = mask + row * mask_row + ((i64)step * KEYS + 2 * c) * size;
#pragma unroll
          for (int i = 0; i < KEYS / 4; ++i) {
            float& s = score[i / 2][2 * half + i % 2];
            const int place = i / 2 * 8 + i % 2;
            float added = 2 * c + place < left ? 0.0f : -INF;
            if (sight == MASKED && added == 0.0f) added = float_at(from + place * size, mask_type);
            s = added == -INF ? -INF : s + added;
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float best = top[half];
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j)
          best = fmaxf(best, fmaxf(score[j][2 * half], score[j][2 * half + 1]));
        best = row_max(best);
        const float base = best == -INF ? 0.0f : best, kept = expf(top[half] - base);
        top[half] = best;
        sum[half] *= kept;
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int part = 0; part < HALVES; ++part) {
            mixed[part][i][2 * half] *= kept;
            mixed[part][i][2 * half + 1] *= kept;
          }
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float weight = expf(score[j][2 * half + e] - base);
            sum[half] += weight;
            score[j][2 * half + e] = weight * Core::UNIT;
          }
      }
      u32 weights[KEYS / 16][2][4];
#pragma unroll
      for (int n = 0; n < KEYS / 16; ++n) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = score[2 * n + i / 4][i % 4];
        pieces_of<Core>(v, weights[n]);
      }
      if (v_dim == MOST) mix<true>(weights, values[here], (int)v_dim, mixed);
      else mix<false>(weights, values[here], (int)v_dim, mixed);
    }
  }
  if (unit >= units) return;  // the whole warp
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = four_sum(sum[half]), kept = 1.0f;
    const i64 row = mine + 8 * half;
    if (row >= rows) continue;
    if (sinks && sinks[head] != -INF) {
      const float best = fmaxf(sinks[head], top[half]);
      kept = expf(top[half] - best);
      total = total * kept + expf(sinks[head] - best);
    }
    const float share = total == 0.0f ? 0.0f : kept / (Core::UNIT * total);
    float* out = y + (row * heads + head) * v_dim;
#pragma unroll
    for (int part = 0; part < HALVES; ++part)
#pragma unroll
      for (int e = 0; e < 2; ++e) {  // column 2c + e of product i is value 8 (2c + e) + i
        const int d = 64 * part + 8 * (2 * c + e);
        if (d >= v_dim) continue;
        float eight[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) eight[i] = mixed[part][i][2 * half + e] * share;
        store_eight((u8*)(out + d), F32, eight);
      }
  }
}
