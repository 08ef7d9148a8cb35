// Rows by index: scatter into caches, and gather of values that are not decoded. Small copies.
// Legend: n values per row, T rows given.
#include "common.cuh"

#define MANY 4  // values of a thread, which are on their way together

// A warp's 32 values as one block of Q8_0: d = largest / 127, halves away from zero.
DEV void store_q8_0(u8* out, float value) {
  const float size = fabsf(value), d = warp_max(size > 0.0f ? size : 0.0f) / 127.0f;
  const float v = value * (d == 0.0f ? 0.0f : 1.0f / d);
  const float whole = floorf(fabsf(v)), rounded = whole + floorf(2.0f * (fabsf(v) - whole));
  if (threadIdx.x % 32 == 0) *(u16*)out = float_to_half(d);
  out[2 + threadIdx.x % 32] = (u8)(i8)(v < 0.0f ? -rounded : rounded);
}

// rows[t] (plain, `step` bytes apart) to place index[t] of a cache; `to` is -1 for Q8_0. Of two rows
// for one place the last stays; an index outside [0, count) writes nothing. Grid (T, parts of a row).
KERNEL set_rows(const u8* rows, u8* cache, const u8* index, i64 tokens, i64 count, i64 n, i64 step,
                int from, int to, int index_type) {
  const u8* row = rows + blockIdx.x * step;
  const int first = blockIdx.y * MANY * blockDim.x + threadIdx.x;
  u32 bits[MANY] = {};
#pragma unroll
  for (int k = 0; k < MANY; ++k) {
    const int i = first + k * blockDim.x;
    if (i < n) bits[k] = float_bits_at(row + i * plain_size(from), from);
  }
  const i64 place = load_index(index, index_type, blockIdx.x);
  if (place < 0 || place >= count || is_followed(index, index_type, blockIdx.x, tokens, place))
    return;
  u8* out = cache + place * (to < 0 ? n / 32 * 34 : n * plain_size(to));
#pragma unroll
  for (int k = 0; k < MANY; ++k) {
    const int i = first + k * blockDim.x;
    if (i >= n) return;  // of Q8_0 the whole warp
    if (to < 0) store_q8_0(out + i / 32 * 34, float_of(bits[k], from));
    else store_float(out + i * plain_size(to), to, float_of(bits[k], from));
  }
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
