// Layers that carry a state: short convolutions and gated delta nets.
//
// `ggraph.ops.recurrent` says what the course of a text's rows is: the state that text has for
// certain, rows of the log that became text, a row's forerunners, the row. One order of operations
// for all of them: a node of a draft tree gets the bits that it has as text.
// Legend: m rows, n channels, L rows of the log, R most replayed rows, P remembered inputs, K = P + 1;
// H heads of values, G of keys (head h has those of h mod G), D numbers per key, V per value.
#include "common.cuh"

#define MOST_TAPS 8
#define MOST_KEY 256
#define COLUMNS 32  // of a head's values per block
#define PARTS 4     // threads that share a column's numbers

// How many rows of the log became text.
DEV i64 replayed_count(const int* replay, i64 most, i64 limit) {
  i64 count = 0;
  while (count < most && replay[count] >= 0 && replay[count] < limit) ++count;
  return count;
}

// The row before row t in its course, -1 where that is what was replayed.
DEV i64 before(const int* parents, i64 t) {
  const i64 found = parents[t];
  return found < t ? found : t - 1;
}

// Channel c of the input `back` (1 ..) rows before the step's first one.
DEV float remembered(const float* state, const float* log, const int* replay, i64 count, bool begun,
                     i64 held, i64 n, i64 c, i64 back) {
  if (back <= count) return log[replay[count - back] * n + c];
  const i64 row = held + count - back;
  return begun && row >= 0 ? state[row * n + c] : 0.0f;
}

// y [m, n]: the last K inputs of each row's course by w [K, n]; one value per thread.
KERNEL ssm_conv(const float* state, const float* log, const float* x, const float* w,
                const int* parents, const int* replay, const int* past, float* y, i64 count, i64 n,
                i64 taps, i64 most, i64 limit) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const i64 c = i % n, became = replayed_count(replay, most, limit);
  float seen[MOST_TAPS], sum = 0.0f;
  i64 at = i / n, back = 0;
  for (i64 j = taps - 1; j >= 0; --j) {
    if (at >= 0) {
      seen[j] = x[at * n + c];
      at = before(parents, at);
    } else {
      seen[j] = remembered(state, log, replay, became, past[0] != 0, taps - 1, n, c, ++back);
    }
  }
  for (i64 j = 0; j < taps; ++j) sum = fmaf(seen[j], w[j * n + c], sum);
  y[i] = sum;
}

// y [P, n]: the inputs that text ends with, after `certain` rows of x. y is the state itself; one
// channel per thread.
KERNEL ssm_conv_next(const float* state, const float* log, const float* x, const int* replay,
                     const int* past, const int* certain, float* y, i64 count, i64 m, i64 held,
                     i64 most, i64 limit) {
  const i64 c = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= count) return;
  const i64 became = replayed_count(replay, most, limit);
  const i64 text = certain[0] < 0 ? 0 : certain[0] < m ? certain[0] : m;
  float seen[MOST_TAPS];
  for (i64 j = 0; j < held; ++j) {
    const i64 back = held - j;
    seen[j] = back <= text ? x[(text - back) * count + c]
                           : remembered(state, log, replay, became, past[0] != 0, held, count, c,
                                        back - text);
  }
  for (i64 j = 0; j < held; ++j) y[j * count + c] = seen[j];
}

struct Net {
  i64 heads, groups, d, v, width;
};

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

// s [D, COLUMNS] after a row: faded by the gate, then corrected towards v along k.
DEV void advance(const Net& net, const float* row, float* s, float (*part)[COLUMNS]) {
  const int lane = threadIdx.x % COLUMNS, first = threadIdx.x / COLUMNS;
  const i64 h = blockIdx.x, column = (i64)blockIdx.y * COLUMNS + lane;
  const float* k = row + h % net.groups * net.d;
  const float* v = row + net.groups * net.d + h * net.v;
  const float* gates = row + net.groups * net.d + net.heads * net.v;
  const float fade = expf(gates[h]), beta = gates[net.heads + h];
  float sum = 0.0f;
  for (i64 d = first; d < net.d; d += PARTS) {
    const float faded = s[d * COLUMNS + lane] * fade;
    s[d * COLUMNS + lane] = faded;
    sum = fmaf(k[d], faded, sum);
  }
  const float found = column_sum(sum, part);
  const float missing = column < net.v ? (v[column] - found) * beta : 0.0f;
  for (i64 d = first; d < net.d; d += PARTS)
    s[d * COLUMNS + lane] = fmaf(k[d], missing, s[d * COLUMNS + lane]);
}

// s before the step's first row.
DEV void base(const Net& net, const float* state, const float* log, const int* replay, i64 count,
              bool begun, float* s, float (*part)[COLUMNS]) {
  const int lane = threadIdx.x % COLUMNS;
  const i64 column = (i64)blockIdx.y * COLUMNS + lane;
  const float* own = state + blockIdx.x * net.d * net.v + column;
  for (i64 d = threadIdx.x / COLUMNS; d < net.d; d += PARTS)
    s[d * COLUMNS + lane] = begun && column < net.v ? own[d * net.v] : 0.0f;
  for (i64 i = 0; i < count; ++i) advance(net, log + replay[i] * net.width, s, part);
}

// y [m, H, V]: what q [m, G, D] finds after each row. Grid (H, V / COLUMNS), PARTS * COLUMNS threads.
KERNEL delta_net(const float* state, const float* log, const float* rows, const float* q,
                 const int* parents, const int* replay, const int* past, float* y, i64 m, i64 heads,
                 i64 groups, i64 d, i64 v, i64 width, i64 most, i64 limit) {
  SHARED float s[MOST_KEY * COLUMNS], part[PARTS][COLUMNS];
  const Net net = {heads, groups, d, v, width};
  const int lane = threadIdx.x % COLUMNS, first = threadIdx.x / COLUMNS;
  const i64 h = blockIdx.x, column = (i64)blockIdx.y * COLUMNS + lane;
  const i64 became = replayed_count(replay, most, limit);
  i64 last = -2;  // the row after which s is
  for (i64 t = 0; t < m; ++t) {
    if (before(parents, t) != last) {
      base(net, state, log, replay, became, past[0] != 0, s, part);
      i64 depth = 0;
      for (i64 at = before(parents, t); at >= 0; at = before(parents, at)) ++depth;
      for (; depth > 0; --depth) {  // forerunners, the first one first
        i64 at = t;
        for (i64 i = 0; i < depth; ++i) at = before(parents, at);
        advance(net, rows + at * width, s, part);
      }
    }
    advance(net, rows + t * width, s, part);
    const float* own = q + (t * groups + h % groups) * d;
    float sum = 0.0f;
    for (i64 i = first; i < d; i += PARTS) sum = fmaf(own[i], s[i * COLUMNS + lane], sum);
    const float found = column_sum(sum, part);
    if (first == 0 && column < v) y[(t * heads + h) * v + column] = found;
    last = t;
  }
}

// y [H, D, V]: the state that text ends in, after `certain` rows. y is the state itself.
KERNEL delta_net_next(const float* state, const float* log, const float* rows, const int* replay,
                      const int* past, const int* certain, float* y, i64 m, i64 heads, i64 groups,
                      i64 d, i64 v, i64 width, i64 most, i64 limit) {
  SHARED float s[MOST_KEY * COLUMNS], part[PARTS][COLUMNS];
  const Net net = {heads, groups, d, v, width};
  const int lane = threadIdx.x % COLUMNS;
  const i64 column = (i64)blockIdx.y * COLUMNS + lane;
  base(net, state, log, replay, replayed_count(replay, most, limit), past[0] != 0, s, part);
  for (i64 t = 0; t < certain[0] && t < m; ++t) advance(net, rows + t * width, s, part);
  if (column >= v) return;
  float* own = y + blockIdx.x * d * v + column;
  for (i64 i = threadIdx.x / COLUMNS; i < d; i += PARTS) own[i * v] = s[i * COLUMNS + lane];
}
