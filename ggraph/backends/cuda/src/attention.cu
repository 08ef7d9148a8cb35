// Attention of few query rows over a cache of type CACHE with any mask (windows, trees), in two steps.
//
// `shown` lists the cache rows that each query row sees. The list, not the cache, is cut into splits
// of SPLIT rows. `attend` gives each split's largest score, sum and mixed values; `merge` adds the
// splits in order. So bits depend neither on the number of query rows, nor on the size of the cache,
// nor on where in it lies what a row sees: a tree's node gets the bits that it has as text.
// Legend: T query rows, H query heads, K key-value heads, D and V head sizes, C cache rows.
// Source: FlashAttention, arXiv 2205.14135; split over the cache: Flash-Decoding.
#define MOST_THREADS 128
#include "blocks.cuh"

#define SPLIT 64
#define MAX_HEAD 512
#define THREADS 128

// Value d of a cache row.
DEV float value_at(const u8* row, i64 d) {
  if constexpr (CACHE::BLOCK == 1) {
    float v[8];
    load_chunk<CACHE>(row + d * CACHE::BYTES, 0, 1, v);
    return v[0];
  }
  const u8* b = row + d / 32 * 34;  // Q8_0
  return (float)((const i8*)b)[2 + d % 32] * half_at(b);
}

struct Cache {
  const u8 *k, *v;
  i64 k_row, k_head, v_row, v_head;  // strides in bytes
};

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

// Scores of the split's `rows` rows, those in `list`, into `score`; -inf behind them.
DEV void scores_of(const Cache& cache, const float* query, const u8* mask, int mask_type,
                   float softcap, i64 kv_head, i64 dim, const int* list, i64 rows, float* score) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  for (i64 r = warp; r < SPLIT; r += warps) {
    float sum = 0.0f;
    if (r < rows) {  // the whole warp
      const u8* key = cache.k + list[r] * cache.k_row + kv_head * cache.k_head;
      for (i64 d = lane; d < dim; d += 32) sum = fmaf(query[d], value_at(key, d), sum);
    }
    sum = warp_sum(sum);
    if (softcap != 0.0f) sum = softcap * tanhf(sum / softcap);
    if (lane == 0) score[r] = r < rows ? sum + shown_at(mask, list[r], mask_type) : -INF;
  }
}

// parts [T, H, splits, 2 + V]: largest score, sum of weights, and the values they mix.
KERNEL attend(const float* q, const u8* k, const u8* v, const u8* mask, const int* lists,
              float* parts, i64 kv_heads, i64 dim, i64 v_dim, i64 context, i64 k_row, i64 k_head,
              i64 v_row, i64 v_head, i64 q_row, i64 mask_row, float scale, float softcap,
              int mask_type) {
  SHARED float query[MAX_HEAD], score[SPLIT], weight[SPLIT];
  const i64 split = blockIdx.x, h = blockIdx.y, t = blockIdx.z, heads = gridDim.y;
  const i64 begin = split * SPLIT, kv_head = h / (heads / kv_heads);
  const int* list = lists + t * (1 + context);
  const i64 left = list[0] - begin, rows = left < 0 ? 0 : left > SPLIT ? SPLIT : left;
  list += 1 + begin;
  const Cache cache = {k, v, k_row, k_head, v_row, v_head};
  for (i64 d = threadIdx.x; d < dim; d += blockDim.x) query[d] = q[t * q_row + h * dim + d] * scale;
  __syncthreads();
  scores_of(cache, query, mask ? mask + t * mask_row : 0, mask_type, softcap, kv_head, dim, list,
            rows, score);
  __syncthreads();
  float top = -INF, sum = 0.0f;
  for (int r = 0; r < SPLIT; ++r) top = score[r] > top ? score[r] : top;
  for (int r = threadIdx.x; r < SPLIT; r += blockDim.x)
    weight[r] = score[r] == -INF ? 0.0f : expf(score[r] - top);
  __syncthreads();
  for (int r = 0; r < SPLIT; ++r) sum += weight[r];
  float* part = parts + ((t * heads + h) * gridDim.x + split) * (2 + v_dim);
  if (threadIdx.x == 0) {
    part[0] = top;
    part[1] = sum;
  }
  for (i64 d = threadIdx.x; d < v_dim; d += blockDim.x) {
    float mixed = 0.0f;
    for (i64 r = 0; r < rows; ++r)
      if (weight[r] != 0.0f)
        mixed = fmaf(weight[r],
                     value_at(cache.v + list[r] * v_row + kv_head * v_head, d), mixed);
    part[2 + d] = mixed;
  }
}

// y [T, H, V]; a row that sees nothing gives zeros. sinks[h] is one more score of the sum.
KERNEL merge(const float* parts, const float* sinks, float* y, i64 splits, i64 v_dim) {
  const i64 at = (i64)blockIdx.y * gridDim.x + blockIdx.x;  // t * H + h
  const float* part = parts + at * splits * (2 + v_dim);
  const float sink = sinks ? sinks[blockIdx.x] : -INF;
  float top = sink;
  for (i64 s = 0; s < splits; ++s) {
    const float here = part[s * (2 + v_dim)];
    top = here > top ? here : top;
  }
  for (i64 d = threadIdx.x; d < v_dim; d += blockDim.x) {
    float sum = sink == -INF ? 0.0f : expf(sink - top), mixed = 0.0f;
    for (i64 s = 0; s < splits; ++s) {
      const float* p = part + s * (2 + v_dim);
      if (p[0] == -INF) continue;
      const float share = expf(p[0] - top);
      sum = fmaf(p[1], share, sum);
      mixed = fmaf(p[2 + d], share, mixed);
    }
    y[at * v_dim + d] = sum == 0.0f ? 0.0f : mixed / sum;
  }
}
