// Rows by index: scatter into caches, and gather of values that are not decoded. Small copies.
// Legend: n values per row, T rows given.
#include "common.cuh"

// One block of 32 values as Q8_0: d = largest / 127, halves away from zero.
DEV void store_q8_0(u8* out, const u8* row, int type) {
  const int size = plain_size(type);
  float most = 0.0f;
  for (int i = 0; i < 32; ++i) {
    const float v = fabsf(load_plain(row + i * size, type));
    most = v > most ? v : most;
  }
  const float d = most / 127.0f, inverse = d == 0.0f ? 0.0f : 1.0f / d;
  *(u16*)out = float_to_half(d);
  for (int i = 0; i < 32; ++i) {
    const float v = load_plain(row + i * size, type) * inverse;
    const float whole = floorf(fabsf(v)), rounded = whole + floorf(2.0f * (fabsf(v) - whole));
    out[2 + i] = (u8)(i8)(v < 0.0f ? -rounded : rounded);
  }
}

// rows[t] (plain, without gaps) to place index[t] of a cache; `to` is -1 for Q8_0. Of two rows for
// one place the last stays; an index outside [0, count) writes nothing.
KERNEL set_rows(const u8* rows, u8* cache, const u8* index, i64 tokens, i64 count, i64 n, int from,
                int to, int index_type) {
  const i64 place = load_index(index, index_type, blockIdx.x);
  if (place < 0 || place >= count) return;
  for (i64 t = blockIdx.x + 1; t < tokens; ++t)
    if (load_index(index, index_type, t) == place) return;
  const u8* row = rows + blockIdx.x * n * plain_size(from);
  const i64 step = (i64)gridDim.y * blockDim.x, first = (i64)blockIdx.y * blockDim.x + threadIdx.x;
  if (to < 0) {
    u8* out = cache + place * (n / 32 * 34);
    for (i64 b = first; b < n / 32; b += step)
      store_q8_0(out + b * 34, row + b * 32 * plain_size(from), from);
    return;
  }
  u8* out = cache + place * n * plain_size(to);
  for (i64 i = first; i < n; i += step)
    store_plain(out + i * plain_size(to), to, load_plain(row + i * plain_size(from), from));
}

// A copy between the device's memory and locked memory of the host: `count` pieces of 4 bytes, or 1.
KERNEL copy_small(const u8* from, u8* to, i64 count, int size) {
  const i64 t = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= count) return;
  if (size == 4)
    ((u32*)to)[t] = ((const u32*)from)[t];
  else
    to[t] = from[t];
}

// Rows of integers, by bytes: y[r] = table[ids[r]]; an id outside [0, rows) gives zeros.
KERNEL get_rows_raw(const u8* table, const u8* ids, u8* y, i64 bytes, i64 rows, i64 row_stride,
                    int id_type) {
  const i64 r = blockIdx.x, id = load_index(ids, id_type, r);
  const bool known = id >= 0 && id < rows;
  for (i64 i = threadIdx.x; i < bytes; i += blockDim.x)
    y[r * bytes + i] = known ? table[id * row_stride + i] : 0;
}
