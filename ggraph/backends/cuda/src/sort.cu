// The first k of each row in order, as indices; k = 1 is arg-max, k = n a full sort.
//
// Pick by pick: the best of what comes after the last pick in the order (value, then index). Ties
// go to the lowest index, NaN counts as the least value. Legend: n row length.
#include "common.cuh"

struct Pick {
  float value;
  int index;
};

// Whether a comes before b; an index of -1 is no pick.
DEV bool before(const Pick& a, const Pick& b) {
  if (a.index < 0 || b.index < 0) return a.index >= 0;
  return a.value != b.value ? a.value > b.value : a.index < b.index;
}

DEV Pick warp_first(Pick p) {
  for (int offset = 16; offset; offset >>= 1) {
    Pick other;
    other.value = SHUFFLE_XOR(p.value, offset);
    other.index = SHUFFLE_XOR(p.index, offset);
    if (before(other, p)) p = other;
  }
  return p;
}

// The best of a block's picks, for all its threads; `part` is shared, one per warp.
DEV Pick block_first(Pick best, Pick (&part)[32]) {
  best = warp_first(best);
  __syncthreads();  // readers of the last pick are done
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = best;
  __syncthreads();
  Pick first = part[0];
  for (int w = 1; w < (int)blockDim.x / 32; ++w)
    if (before(part[w], first)) first = part[w];
  return first;
}

DEV Pick pick_at(const u8* row, i64 i, int type) {
  Pick here;
  here.value = load_plain(row + i * plain_size(type), type);
  if (here.value != here.value) here.value = -INF;
  here.index = (int)i;
  return here;
}

// The best k of what `at` gives for begin .. end, in order, to `put`; behind all of them no picks.
template <class At, class Put>
DEV void firsts(i64 begin, i64 end, i64 k, Pick (&part)[32], At at, Put put) {
  Pick last = {INF, -1};
  for (i64 pick = 0; pick < k; ++pick) {
    Pick best = {-INF, -1};
    if (pick == 0 || last.index >= 0)
      for (i64 i = begin + threadIdx.x; i < end; i += blockDim.x) {
        const Pick here = at(i);
        if ((pick == 0 || before(last, here)) && before(here, best)) best = here;
      }
    last = block_first(best, part);
    if (threadIdx.x == 0) put(pick, last);
  }
}

KERNEL first_k(const u8* x, int* y, i64 n, i64 k, Axes shape, Axes strides, int type, int ascending) {
  SHARED Pick part[32];
  const u8* row = x + place_of(blockIdx.x, shape, strides);
  firsts(0, n, k, part,
         [&](i64 i) {
           Pick here = pick_at(row, i, type);
           if (ascending) here.value = -here.value;
           return here;
         },
         [&](i64 pick, const Pick& found) { y[blockIdx.x * k + pick] = found.index; });
}

// The best k of each part of `each` values: picks [rows, parts, k]. Grid (parts, rows).
KERNEL first_parts(const u8* x, Pick* picks, i64 n, i64 each, i64 k, Axes shape, Axes strides,
                   int type) {
  SHARED Pick part[32];
  const u8* row = x + place_of(blockIdx.y, shape, strides);
  const i64 begin = blockIdx.x * each, end = begin + each < n ? begin + each : n;
  Pick* own = picks + (blockIdx.y * gridDim.x + blockIdx.x) * k;
  firsts(begin, end, k, part, [&](i64 i) { return pick_at(row, i, type); },
         [&](i64 pick, const Pick& found) { own[pick] = found; });
}

// y [rows, k]: the best of `picks`, of which a row has `count`. Grid (rows).
KERNEL first_of(const Pick* picks, int* y, i64 count, i64 k) {
  SHARED Pick part[32];
  const Pick* own = picks + blockIdx.x * count;
  firsts(0, count, k, part, [&](i64 i) { return own[i]; },
         [&](i64 pick, const Pick& found) { y[blockIdx.x * k + pick] = found.index; });
}
