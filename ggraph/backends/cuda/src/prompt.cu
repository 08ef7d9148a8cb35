// Attention of many query rows over a cache of type CACHE, on the tensor cores.
//
// A warp takes 16 rows of one head and goes over the cache 16 rows at a time with a running maximum;
// what all its rows are hidden from is passed over. Scores and mixtures are products of two bf16
// numbers per float (pieces.cuh). Cache rows that some row sees must be finite, as everywhere.
// Legend: T query rows, H query heads, D and V head sizes (multiples of 32, at most 128); r, c: a
// lane's place in a fragment, rows r and r + 8, columns 2c and 2c + 1.
// Source: FlashAttention-2, arXiv 2307.08691.
#define MOST_THREADS 128
#include "pieces.cuh"

#define ROWS 16    // query rows per warp, and cache rows per step
#define MOST 128   // of D and V
#define CHUNKS 4   // of 32 values in a row of MOST
#define HALVES 2   // of 64 values in it

// What a lane holds of the scaled queries: a chunk of rows r and r + 8 for every 32 values.
struct Queries {
  u32 high[CHUNKS][2][4], low[CHUNKS][2][4];
};

DEV void queries_of(const float* q, i64 row, i64 rows, i64 q_row, i64 dim, float scale,
                    Queries& to) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float v[8] = {};
      if (32 * i < dim && row + 8 * half < rows)
        load_chunk<f32>((const u8*)(q + (row + 8 * half) * q_row), 4 * i + c, dim, v);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] *= scale;
      split<As_bf16>(v, to.high[i][half], to.low[i][half]);
      split<As_bf16>(v + 4, to.high[i][half] + 2, to.low[i][half] + 2);
    }
}

// sum += queries . the key whose chunk this lane holds
DEV void scores_of(const Queries& q, const u8* key, i64 dim, float* sum) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    if (32 * i >= dim) continue;
    u32 words[2][4];
    words_of<As_bf16, CACHE, false>(key, 4 * i + c, dim, words);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 a[4] = {q.high[i][0][2 * h], q.high[i][1][2 * h], q.high[i][0][2 * h + 1],
                        q.high[i][1][2 * h + 1]};
      const u32 rest[4] = {q.low[i][0][2 * h], q.low[i][1][2 * h], q.low[i][0][2 * h + 1],
                           q.low[i][1][2 * h + 1]};
      const u32 b[2] = {words[0][2 * h], words[0][2 * h + 1]};
      multiply(sum, a, b);
      multiply(sum, rest, b);
      if (!holds<As_bf16, CACHE>::VALUE) {
        const u32 left_out[2] = {words[1][2 * h], words[1][2 * h + 1]};
        multiply(sum, a, left_out);
      }
    }
  }
}

// mixed += weights . values; `rows` are the four cache rows that this lane reads, 64 values apart.
DEV void mix(const u32 (&high)[4], const u32 (&low)[4], const u8* const (&rows)[4], i64 v_dim,
             float (&mixed)[HALVES][8][4]) {
  const int r = threadIdx.x % 32 / 4;
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    if (64 * half >= v_dim) continue;
    float v[4][8] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (64 * half + 8 * r < v_dim) load_chunk<CACHE>(rows[i], 8 * half + r, v_dim, v[i]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 b[2] = {bf16_pair(v[0][i], v[1][i]), bf16_pair(v[2][i], v[3][i])};
      multiply(mixed[half][i], high, b);
      multiply(mixed[half][i], low, b);
      if (!holds<As_bf16, CACHE>::VALUE) {
        const u32 rest[2] = {bf16_pair(v[0][i] - bits_to_float(b[0] << 16),
                                       v[1][i] - bits_to_float(b[0] & 0xffff0000u)),
                             bf16_pair(v[2][i] - bits_to_float(b[1] << 16),
                                       v[3][i] - bits_to_float(b[1] & 0xffff0000u))};
        multiply(mixed[half][i], high, rest);
      }
    }
  }
}

// The four lanes of a row: their largest, their sum.
DEV float row_max(float value) {
  for (int offset = 1; offset < 4; offset *= 2) {
    const float other = SHUFFLE_XOR(value, offset);
    value = other > value ? other : value;
  }
  return value;
}

DEV float row_sum(float value) {
  for (int offset = 1; offset < 4; offset *= 2) value += SHUFFLE_XOR(value, offset);
  return value;
}

// y [T, H, V]; a row that sees nothing gives zeros. sinks[h] is one more score of the sum. Grid
// (T / 64, H), four warps.
KERNEL attend_rows(const float* q, const u8* k, const u8* v, const u8* mask, const int* length,
                   const float* sinks, float* y, i64 rows, i64 kv_heads, i64 dim, i64 v_dim,
                   i64 context, i64 k_row, i64 k_head, i64 v_row, i64 v_head, i64 mask_row,
                   float scale, float softcap, int mask_type) {
  const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  const i64 h = blockIdx.y, heads = gridDim.y, kv_head = h / (heads / kv_heads);
  const i64 first = ((i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * ROWS;
  const i64 mine = first + r;
  if (first >= rows) return;  // the whole warp
  i64 seen = length ? length[0] : context;
  seen = seen < 0 ? 0 : seen > context ? context : seen;
  const u8 *keys = k + kv_head * k_head, *values = v + kv_head * v_head;
  const int size = plain_size(mask_type);
  Queries given;
  queries_of(q + h * dim, mine, rows, heads * dim, dim, scale, given);
  float top[2] = {-INF, -INF}, sum[2] = {}, mixed[HALVES][8][4] = {};
  for (i64 begin = 0; begin < seen; begin += ROWS) {
    float score[2][4], most = -INF;  // of cache rows begin + 8j + 2c and the next one
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const i64 row = mine + i / 2 * 8, at = begin + 8 * j + 2 * c + i % 2;
        score[j][i] = row >= rows || at >= seen ? -INF
                      : mask ? load_plain(mask + row * mask_row + at * size, mask_type) : 0.0f;
        most = score[j][i] > most ? score[j][i] : most;
      }
    if (warp_max(most) == -INF) continue;  // the whole warp
    float best[2] = {top[0], top[1]};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const i64 at = begin + 8 * j + r;
      float found[4] = {};
      scores_of(given, keys + (at < seen ? at : seen - 1) * k_row, dim, found);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float s = softcap != 0.0f ? softcap * tanhf(found[i] / softcap) : found[i];
        score[j][i] = score[j][i] == -INF ? -INF : s + score[j][i];
        best[i / 2] = score[j][i] > best[i / 2] ? score[j][i] : best[i / 2];
      }
    }
    float weight[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      best[half] = row_max(best[half]);
      const float kept = top[half] == -INF ? 0.0f : expf(top[half] - best[half]);
      top[half] = best[half];
      sum[half] *= kept;
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int part = 0; part < HALVES; ++part) {
          mixed[part][i][2 * half] *= kept;
          mixed[part][i][2 * half + 1] *= kept;
        }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weight[j][i] = score[j][i] == -INF ? 0.0f : expf(score[j][i] - top[i / 2]);
        sum[i / 2] += weight[j][i];
      }
    u32 high[4], low[4];  // rows r and r + 8 of the first eight cache rows, then of the others
    split<As_bf16>(weight[0], high, low);
    split<As_bf16>(weight[1], high + 2, low + 2);
    const u8* four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const i64 at = begin + 2 * c + i % 2 + i / 2 * 8;
      four[i] = values + (at < seen ? at : seen - 1) * v_row;
    }
    mix(high, low, four, v_dim, mixed);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = row_sum(sum[half]), kept = 1.0f;
    const i64 row = mine + 8 * half;
    if (row >= rows) continue;
    if (sinks && sinks[h] != -INF) {
      const float best = sinks[h] > top[half] ? sinks[h] : top[half];
      kept = expf(top[half] - best);
      total = total * kept + expf(sinks[h] - best);
    }
    float* out = y + (row * heads + h) * v_dim;
#pragma unroll
    for (int part = 0; part < HALVES; ++part)
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {  // column 2c + e of product i is value 8 (2c + e) + i
          const i64 d = 64 * part + 8 * (2 * c + e) + i;
          if (d < v_dim) out[d] = total == 0.0f ? 0.0f : mixed[part][i][2 * half + e] * kept / total;
        }
  }
}
