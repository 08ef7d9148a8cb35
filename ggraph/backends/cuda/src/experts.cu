// Pairs of (token, expert) grouped by expert, so that each expert's weights are read once for all of
// its rows. Pairs of an expert keep their order. Legend: p pairs, e experts.
#define MOST_THREADS 256
#include "common.cuh"

#define MOST_EXPERTS 1024

// The expert of a pair; ids outside [0, experts) share group `experts`.
DEV int group_of(const int* ids, i64 pair, i64 experts) {
  const int id = ids[pair];
  return id >= 0 && id < experts ? id : (int)experts;
}

// order [p]: pairs by group; starts [e + 2]: where a group begins in it; active [e + 2]: how many
// groups have pairs, then which. One block.
KERNEL group_pairs(const int* ids, int* order, int* starts, int* active, i64 pairs, i64 experts) {
  SHARED int first[MOST_EXPERTS + 1];
  for (i64 e = threadIdx.x; e <= experts; e += blockDim.x) {
    int count = 0;
    for (i64 p = 0; p < pairs; ++p) count += group_of(ids, p, experts) == e;
    first[e] = count;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int begin = 0, used = 0;
    for (i64 e = 0; e <= experts; ++e) {
      const int count = first[e];
      starts[e] = first[e] = begin;
      if (count) active[++used] = (int)e;
      begin += count;
    }
    starts[experts + 1] = begin;
    active[0] = used;
  }
  __syncthreads();
  for (i64 e = threadIdx.x; e <= experts; e += blockDim.x) {
    int at = first[e];
    for (i64 p = 0; p < pairs; ++p)
      if (group_of(ids, p, experts) == e) order[at++] = (int)p;
  }
}
