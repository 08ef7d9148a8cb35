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

KERNEL first_k(const u8* x, int* y, i64 n, i64 k, Axes shape, Axes strides, int type, int ascending) {
  SHARED Pick part[32];
  const int size = plain_size(type), warps = blockDim.x / 32;
  const u8* row = x + place_of(blockIdx.x, shape, strides);
  Pick last;
  last.value = INF;
  last.index = -1;
  for (i64 pick = 0; pick < k; ++pick) {
    Pick best;
    best.value = -INF;
    best.index = -1;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
      Pick here;
      here.value = load_plain(row + i * size, type);
      if (here.value != here.value) here.value = -INF;
      if (ascending) here.value = -here.value;
      here.index = (int)i;
      if ((last.index < 0 || before(last, here)) && before(here, best)) best = here;
    }
    best = warp_first(best);
    __syncthreads();  // readers of the last pick are done
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = best;
    __syncthreads();
    last = part[0];
    for (int w = 1; w < warps; ++w)
      if (before(part[w], last)) last = part[w];
    if (threadIdx.x == 0) y[blockIdx.x * k + pick] = last.index;
  }
}
