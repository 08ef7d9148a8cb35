// Pairs of (token, expert) grouped by expert, so that each expert's weights are read once for all of
// its rows. Pairs of an expert keep their order. Legend: p pairs, e experts.
#define MOST_THREADS 256
#include "common.cuh"

#define MOST_EXPERTS 1024
#define WARPS (MOST_THREADS / 32)

// The expert of a pair; ids outside [0, experts) share group `experts`.
DEV int group_of(const int* ids, i64 pair, i64 experts) {
  const int id = ids[pair];
  return id >= 0 && id < experts ? id : (int)experts;
}

// Lanes of a warp take pairs begin .. end, 32 at a time and in order. `at` counts the pairs of each
// group: `take` gets a pair, and what its group's count is before it.
template <class Take>
DEV void walk(const int* ids, int begin, int end, i64 experts, int* at, Take take) {
  const int lane = threadIdx.x % 32;
  for (int first = begin; first < end; first += 32) {
    const int pair = first + lane, group = pair < end ? group_of(ids, pair, experts) : -1;
    const u32 alike = ALIKE(group);
    const int before = __popc(alike & ((1u << lane) - 1));
    const int count = group < 0 ? 0 : at[group];
    if (group >= 0) take(pair, count + before);
    SYNC_WARP();  // all have read
    if (group >= 0 && !before) at[group] = count + __popc(alike);
    SYNC_WARP();
  }
}

// order [p]: pairs by group; starts [e + 2]: where a group begins in it; active [e + 2]: how many
// groups have pairs, then which. One block, each warp of which has a share of the pairs.
KERNEL group_pairs(const int* ids, int* order, int* starts, int* active, i64 pairs, i64 experts) {
  SHARED int places[WARPS][MOST_EXPERTS + 1];  // of each warp: counts of groups; then where they go
  SHARED int counts[MOST_EXPERTS + 1];         // of all warps
  const int warp = threadIdx.x / 32, each = ((int)pairs + WARPS - 1) / WARPS;
  const int begin = warp * each, end = begin + each < pairs ? begin + each : (int)pairs;
  int* at = places[warp];
  for (int e = threadIdx.x % 32; e <= experts; e += 32) at[e] = 0;
  SYNC_WARP();
  walk(ids, begin, end, experts, at, [](int, int) {});
  __syncthreads();
  for (int e = threadIdx.x; e <= experts; e += blockDim.x) {
    int sum = 0;
    for (int w = 0; w < WARPS; ++w) sum += places[w][e];
    counts[e] = sum;
  }
  __syncthreads();
  for (int e = threadIdx.x; e <= experts; e += blockDim.x) {
    int start = 0, used = 0;
    for (int i = 0; i < e; ++i) start += counts[i], used += counts[i] > 0;
    starts[e] = start;
    if (counts[e]) active[1 + used] = e;
    if (e == experts) starts[e + 1] = (int)pairs, active[0] = used + (counts[e] > 0);
    for (int w = 0; w < WARPS; ++w) {
      const int count = places[w][e];
      places[w][e] = start;
      start += count;
    }
  }
  __syncthreads();
  walk(ids, begin, end, experts, at, [&](int pair, int place) { order[place] = pair; });
}
