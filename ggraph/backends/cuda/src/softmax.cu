// Soft-max of rows. Legend: n row length, T rows per head, H heads.
#include "common.cuh"

// Rows of x * scale + mask as chances; a row that is all -inf gives zeros. sinks[h] is one more
// score of the sum, h = row / per_head % heads.
KERNEL soft_max(const u8* x, const u8* mask, const float* sinks, u8* y, i64 n, Axes shape,
                Axes strides, Axes mask_strides, i64 mask_step, i64 per_head, i64 heads,
                float scale, int type, int mask_type) {
  SHARED float part[32];
  const int size = plain_size(type);
  const u8* row = x + place_of(blockIdx.x, shape, strides);
  const u8* shown = mask ? mask + place_of(blockIdx.x, shape, mask_strides) : 0;
  u8* out = y + blockIdx.x * n * size;
  float top = sinks ? sinks[blockIdx.x / per_head % heads] : -INF;
  const float sink = top;
  for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
    float v = load_plain(row + i * size, type) * scale;
    if (shown) v += load_plain(shown + i * mask_step, mask_type);
    top = v > top ? v : top;
  }
  top = block_max(top, part);
  if (top == -INF) top = 0.0f;
  float sum = 0.0f;
  for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
    float v = load_plain(row + i * size, type) * scale;
    if (shown) v += load_plain(shown + i * mask_step, mask_type);
    sum += expf(v - top);
  }
  float total = block_sum(sum, part);
  if (sinks) total += expf(sink - top);
  if (total == 0.0f) total = 1.0f;
  for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
    float v = load_plain(row + i * size, type) * scale;
    if (shown) v += load_plain(shown + i * mask_step, mask_type);
    store_plain(out + i * size, type, expf(v - top) / total);
  }
}
