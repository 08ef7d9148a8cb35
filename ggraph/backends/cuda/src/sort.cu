// The first k of each row in order, as indices; k = 1 is arg-max, k = n a full sort.
//
// Pick by pick: the best of what comes after the last pick in the order (value, then index). Ties
// go to the lowest index, NaN counts as the least value. Legend: n row length.
#include "common.cuh"

#define TOGETHER 4  // values of a thread that are on their way at once

// A value and its index as one number: the larger comes first. 0 is no pick.
typedef unsigned long long Pick;

DEV Pick pick_of(float value, int index) {
  const u32 bits = float_to_bits(value == value ? value + 0.0f : -INF);  // of zeros there is one
  const u32 rank = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (Pick)rank << 32 | ~(u32)index;
}

// Of no pick: -1.
DEV int index_of(Pick pick) { return (int)~(u32)pick; }

DEV Pick warp_first(Pick p) {
  for (int offset = 16; offset; offset >>= 1) {
    const Pick above = SHUFFLE_XOR((u32)(p >> 32), offset), below = SHUFFLE_XOR((u32)p, offset);
    const Pick other = above << 32 | below;
    p = other > p ? other : p;
  }
  return p;
}

// The best of a block's picks, for all its threads; `part` is shared, one per warp.
DEV Pick block_first(Pick best, Pick (&part)[32]) {
  best = warp_first(best);
  __syncthreads();  // readers of the last pick are done
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = best;
  __syncthreads();
  return warp_first(threadIdx.x % 32 < blockDim.x / 32 ? part[threadIdx.x % 32] : 0);
}

DEV float value_at(const u8* row, int i, int type) {
  return float_of(float_bits_at(row + (i64)i * plain_size(type), type), type);
}

// The best k of what `at` gives for begin .. end, in order, to `put`; behind all of them no picks.
template <class At, class Put>
DEV void firsts(int begin, int end, i64 k, Pick (&part)[32], At at, Put put) {
  Pick last = ~(Pick)0;
  for (i64 pick = 0; pick < k; ++pick) {
    Pick best = 0;
    for (int first = begin + threadIdx.x; first < end; first += TOGETHER * blockDim.x) {
      Pick here[TOGETHER];
#pragma unroll
      for (int j = 0; j < TOGETHER; ++j) {
        const int i = first + j * blockDim.x;
        here[j] = i < end ? at(i) : 0;
      }
#pragma unroll
      for (int j = 0; j < TOGETHER; ++j)
        best = here[j] < last && here[j] > best ? here[j] : best;
    }
    last = block_first(best, part);
    if (threadIdx.x == 0) put(pick, last);
  }
}

KERNEL first_k(const u8* x, int* y, i64 n, i64 k, Axes shape, Axes strides, int type, int ascending) {
  SHARED Pick part[32];
  const u8* row = x + place_of(blockIdx.x, shape, strides);
  firsts(0, (int)n, k, part,
         [&](int i) {
           const float value = value_at(row, i, type);
           return pick_of(!ascending ? value : value == value ? -value : INF, i);
         },
         [&](i64 pick, Pick found) { y[blockIdx.x * k + pick] = index_of(found); });
}

// The best k of each part of `each` values: picks [rows, parts, k]. Grid (parts, rows).
KERNEL first_parts(const u8* x, Pick* picks, i64 n, i64 each, i64 k, Axes shape, Axes strides,
                   int type) {
  SHARED Pick part[32];
  const u8* row = x + place_of(blockIdx.y, shape, strides);
  const int begin = (int)(blockIdx.x * each), end = (int)(begin + each < n ? begin + each : n);
  Pick* own = picks + (blockIdx.y * gridDim.x + blockIdx.x) * k;
  firsts(begin, end, k, part, [&](int i) { return pick_of(value_at(row, i, type), i); },
         [&](i64 pick, Pick found) { own[pick] = found; });
}

// y [rows, k]: the best of `picks`, of which a row has `count`. Grid (rows).
KERNEL first_of(const Pick* picks, int* y, i64 count, i64 k) {
  SHARED Pick part[32];
  const Pick* own = picks + blockIdx.x * count;
  firsts(0, (int)count, k, part, [&](int i) { return own[i]; },
         [&](i64 pick, Pick found) { y[blockIdx.x * k + pick] = index_of(found); });
}
