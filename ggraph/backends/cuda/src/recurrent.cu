// Layers that carry a state: short convolutions, gated delta nets and state spaces, which correct
// nothing.
//
// `ggraph.ops.recurrent` says what the course of a text's rows is: the state that text has for
// certain, rows of the log that became text, a row's forerunners, the row. One order of operations
// for all of them: a node of a draft tree gets the bits that it has as text.
// Legend: N slots with a text's state each, m rows, n channels, L rows of the log, R most replayed rows, P remembered inputs, K = P + 1;
// H heads of values, G of keys, D numbers per key, V per value.
#include "common.cuh"

#define MOST_TAPS 8
#define MOST_KEY 256
#define MOST_ROWS 512  // of a step
#define COLUMNS 32  // of a head's values per block
#define PARTS 4     // threads that share a column's numbers

// How many rows of the log became text in a slot.
DEV i64 replayed_count(const int* replay, i64 slot, i64 most, i64 limit) {
  i64 count = 0;
  while (count < most && replay[slot * most + count] >= 0 && replay[slot * most + count] < limit)
    ++count;
  return count;
}

// The row before row t in its course; below 0 that is what was replayed in slot -1 - it.
DEV i64 before(const int* parents, i64 t) {
  const i64 found = parents[t];
  return found < t ? found : t - 1;
}

// The slot below 0 of a course.
DEV i64 slot_of(i64 at, i64 slots) { return -1 - at < slots ? -1 - at : slots - 1; }

// The last row of a slot that is text for certain, -1 where there is none.
DEV i64 last_certain(const int* certain, i64 slot, i64 m) {
  return certain[slot] < m ? certain[slot] : m - 1;
}

// Channel c of a slot's input `back` (1 ..) rows before its first one of the step.
DEV float remembered(const float* state, const float* log, const int* replay, i64 count, bool begun,
                     i64 held, i64 n, i64 c, i64 back) {
  if (back <= count) return log[replay[count - back] * n + c];
  const i64 row = held + count - back;
  return begun && row >= 0 ? state[row * n + c] : 0.0f;
}

// y [m, n]: the last K inputs of each row's course by w [K, n]; one value per thread.
KERNEL ssm_conv(const float* state, const float* log, const float* x, const float* w,
                const int* parents, const int* replay, const int* past, float* y, i64 count, i64 slots,
                i64 n, i64 taps, i64 most, i64 limit) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const i64 c = i % n;
  float seen[MOST_TAPS], sum = 0.0f;
  i64 at = i / n, j = taps - 1;
  for (; j >= 0 && at >= 0; --j) {
    seen[j] = x[at * n + c];
    at = before(parents, at);
  }
  if (j >= 0) {
    const i64 slot = slot_of(at, slots), became = replayed_count(replay, slot, most, limit);
    for (i64 back = 1; j >= 0; --j, ++back)
      seen[j] = remembered(state + slot * (taps - 1) * n, log, replay + slot * most, became,
                           past[slot] != 0, taps - 1, n, c, back);
  }
  for (j = 0; j < taps; ++j) sum = fmaf(seen[j], w[j * n + c], sum);
  y[i] = sum;
}

// y [N, P, n]: the inputs that texts end with. y is the state itself; one channel of a slot per
// thread.
KERNEL ssm_conv_next(const float* state, const float* log, const float* x, const int* parents,
                     const int* replay, const int* past, const int* certain, float* y, i64 count,
                     i64 m, i64 n, i64 held, i64 most, i64 limit) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const i64 c = i % n, slot = i / n, became = replayed_count(replay, slot, most, limit);
  float seen[MOST_TAPS];
  i64 at = last_certain(certain, slot, m), j = held - 1;
  for (; j >= 0 && at >= 0; --j) {
    seen[j] = x[at * n + c];
    at = before(parents, at);
  }
  for (i64 back = 1; j >= 0; --j, ++back)
    seen[j] = remembered(state + slot * held * n, log, replay + slot * most, became,
                         past[slot] != 0, held, n, c, back);
  for (j = 0; j < held; ++j) y[(slot * held + j) * n + c] = seen[j];
}

struct Net {
  i64 heads, groups, d, v, width, corrects;
};

// Whose keys and queries head h has: heads take turns, or in a state space stand together.
DEV i64 group_of(const Net& net, i64 h) {
  return net.corrects ? h % net.groups : h * net.groups / net.heads;
}

// Sum over the PARTS threads of a column, in their order.
DEV float column_sum(float value, float (*part)[COLUMNS]) {
  const int lane = threadIdx.x % COLUMNS;
  __syncthreads();  // readers of the last use are done
  part[threadIdx.x / COLUMNS][lane] = value;
  __syncthreads();
  float total = 0.0f;
  for (int p = 0; p < PARTS; ++p) total += part[p][lane];
  return total;
}

// s [D, COLUMNS] after a row: faded by the gate, then v is added along k, or what is found there is
// corrected towards it. Either way all threads meet: who writes a path relies on that.
DEV void advance(const Net& net, const float* row, float* s, float (*part)[COLUMNS]) {
  const int lane = threadIdx.x % COLUMNS, first = threadIdx.x / COLUMNS;
  const i64 h = blockIdx.x, column = (i64)blockIdx.y * COLUMNS + lane;
  const float* k = row + group_of(net, h) * net.d;
  const float* v = row + net.groups * net.d + h * net.v;
  const float* gates = row + net.groups * net.d + net.heads * net.v;
  const float fade = expf(gates[h]), beta = gates[net.heads + h];
  float sum = 0.0f;
  for (i64 d = first; d < net.d; d += PARTS) {
    const float faded = s[d * COLUMNS + lane] * fade;
    s[d * COLUMNS + lane] = faded;
    sum = fmaf(k[d], faded, sum);
  }
  const float found = column_sum(sum, part), known = net.corrects ? found : 0.0f;
  const float missing = column < net.v ? (v[column] - known) * beta : 0.0f;
  for (i64 d = first; d < net.d; d += PARTS)
    s[d * COLUMNS + lane] = fmaf(k[d], missing, s[d * COLUMNS + lane]);
}

// s before a slot's first row of the step.
DEV void base(const Net& net, i64 slot, const float* state, const float* log, const int* replay,
              const int* past, i64 most, i64 limit, float* s, float (*part)[COLUMNS]) {
  const int lane = threadIdx.x % COLUMNS;
  const i64 column = (i64)blockIdx.y * COLUMNS + lane;
  const i64 count = replayed_count(replay, slot, most, limit);
  const bool begun = past[slot] != 0;
  const float* own = state + (slot * net.heads + blockIdx.x) * net.d * net.v + column;
  for (i64 d = threadIdx.x / COLUMNS; d < net.d; d += PARTS)
    s[d * COLUMNS + lane] = begun && column < net.v ? own[d * net.v] : 0.0f;
  for (i64 i = 0; i < count; ++i)
    advance(net, log + replay[slot * most + i] * net.width, s, part);
}

// s after rows of a course that ends in row `end`, the first one first.
DEV void follow(const Net& net, const float* rows, const int* parents, i64 end, float* s,
                float (*part)[COLUMNS], short* path) {
  i64 depth = 0;
  for (i64 at = end; at >= 0; at = before(parents, at), ++depth)
    if (threadIdx.x == 0) path[depth] = (short)at;
  __syncthreads();  // the path is there; who read an earlier one has passed `advance` since
  while (depth > 0) advance(net, rows + path[--depth] * net.width, s, part);
}

// y [m, H, V]: what q [m, G, D] finds after each row. Grid (H, V / COLUMNS), PARTS * COLUMNS threads.
KERNEL delta_net(const float* state, const float* log, const float* rows, const float* q,
                 const int* parents, const int* replay, const int* past, float* y, i64 slots, i64 m,
                 i64 heads, i64 groups, i64 d, i64 v, i64 width, i64 corrects, i64 most, i64 limit) {
  SHARED float s[MOST_KEY * COLUMNS], part[PARTS][COLUMNS];
  SHARED short path[MOST_ROWS];
  const Net net = {heads, groups, d, v, width, corrects};
  const int lane = threadIdx.x % COLUMNS, first = threadIdx.x / COLUMNS;
  const i64 h = blockIdx.x, column = (i64)blockIdx.y * COLUMNS + lane;
  i64 last = m;  // the row after which s is
  for (i64 t = 0; t < m; ++t) {
    const i64 parent = before(parents, t);
    if (parent != last) {
      i64 at = parent;
      while (at >= 0) at = before(parents, at);
      base(net, slot_of(at, slots), state, log, replay, past, most, limit, s, part);
      follow(net, rows, parents, parent, s, part, path);
    }
    advance(net, rows + t * width, s, part);
    const float* own = q + (t * groups + group_of(net, h)) * d;
    float sum = 0.0f;
    for (i64 i = first; i < d; i += PARTS) sum = fmaf(own[i], s[i * COLUMNS + lane], sum);
    const float found = column_sum(sum, part);
    if (first == 0 && column < v) y[(t * heads + h) * v + column] = found;
    last = t;
  }
}

// y [N, H, D, V]: the states that texts end in. y is the state itself. Grid (H, V / COLUMNS, N).
KERNEL delta_net_next(const float* state, const float* log, const float* rows, const int* parents,
                      const int* replay, const int* past, const int* certain, float* y, i64 m,
                      i64 heads, i64 groups, i64 d, i64 v, i64 width, i64 corrects, i64 most,
                      i64 limit) {
  SHARED float s[MOST_KEY * COLUMNS], part[PARTS][COLUMNS];
  SHARED short path[MOST_ROWS];
  const Net net = {heads, groups, d, v, width, corrects};
  const int lane = threadIdx.x % COLUMNS;
  const i64 slot = blockIdx.z, column = (i64)blockIdx.y * COLUMNS + lane;
  const i64 last = last_certain(certain, slot, m);
  if (past[slot] != 0 && last < 0 && replayed_count(replay, slot, most, limit) == 0) return;
  base(net, slot, state, log, replay, past, most, limit, s, part);
  follow(net, rows, parents, last, s, part, path);
  if (column >= v) return;
  float* own = y + (slot * heads + blockIdx.x) * d * v + column;
  for (i64 i = threadIdx.x / COLUMNS; i < d; i += PARTS) own[i * v] = s[i * COLUMNS + lane];
}
