// Functions of one or two elements, gated units, and copies with strides.
//
// Sources have up to four axes with byte strides; the result is without gaps. `op` numbers are
// those of the tables in elementwise.py, and the branch on them is the same for every thread.
#define MOST_THREADS 256
#include "parts.cuh"
#include "units.cuh"

DEV bool begins_at(const void* p, int bytes) { return ((unsigned long long)p & (bytes - 1)) == 0; }

DEV float round_of(float x) {  // halves away from zero
  const float whole = floorf(fabsf(x) + 0.5f);
  return x < 0.0f ? -whole : x > 0.0f ? whole : x;
}

DEV float bounded(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

DEV float one_of(int op, float x, float a, float b) {
  switch (op) {
    case 0: return x;
    case 1: return -x;
    case 2: return fabsf(x);
    case 3: return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x;
    case 4: return x > 0.0f ? 1.0f : 0.0f;
    case 5: return x * x;
    case 6: return sqrtf(x);
    case 7: return expf(x);
    case 8: return expm1f(x);
    case 9: return logf(x);
    case 10: return sinf(x);
    case 11: return cosf(x);
    case 12: return tanhf(x);
    case 13: return sigmoid_of(x);
    case 14: return x < 0.0f ? 0.0f : x;
    case 15: return x > 0.0f ? x : expm1f(x);
    case 16: return x * sigmoid_of(x);
    case 17: return gelu_of(x);
    case 18: return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    case 19: return x * sigmoid_of(1.702f * x);
    case 20: return x > 20.0f ? x : log1pf(expf(x));
    case 21: return bounded((x + 3.0f) / 6.0f, 0.0f, 1.0f);
    case 22: return x * bounded((x + 3.0f) / 6.0f, 0.0f, 1.0f);
    case 23: return floorf(x);
    case 24: return ceilf(x);
    case 25: return round_of(x);
    case 26: return truncf(x);
    case 27: return x * a + b;
    default: return bounded(x, a, b);
  }
}

KERNEL unary(const u8* x, u8* y, i64 count, Axes shape, Axes strides, int from, int to, int op,
             float a, float b) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float v = load_plain(x + place_of(i, shape, strides), from);
  store_plain(y + i * plain_size(to), to, one_of(op, v, a, b));
}

KERNEL binary(const u8* x, const u8* z, u8* y, i64 count, Axes shape, Axes x_strides,
              Axes z_strides, int x_type, int z_type, int op) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float left = load_plain(x + place_of(i, shape, x_strides), x_type);
  const float right = load_plain(z + place_of(i, shape, z_strides), z_type);
  store_plain(y + i * plain_size(x_type), x_type, two_of(op, left, right));
}

// Both on float32 without gaps and of one shape: no index arithmetic. Of two a thread takes four, also
// in parts and, of rows of k, in codes where those are given.
KERNEL unary_flat(const float* x, float* y, i64 count, int op, float a, float b) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) y[i] = one_of(op, x[i], a, b);
}

KERNEL binary_flat(const float* x, const float* z, float* y, Quad* parts, Quad* codes,
                   i64 count, i64 k, int op) {
  const i64 i = 4 * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count && !codes) return;  // whole warps give codes
  x += i, z += i, y += i;
  const int left = count - i < 4 ? (int)(count - i) : 4;
  const bool whole = left == 4 && begins_at(x, 16) && begins_at(z, 16) && begins_at(y, 16);
  float a[4] = {}, b[4] = {}, v[4];
  if (whole) {
    four_floats(x, a);
    four_floats(z, b);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (e < left) a[e] = x[e], b[e] = z[e];
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) v[e] = two_of(op, a[e], b[e]);
  if (whole) {
    const Quad four = {{float_to_bits(v[0]), float_to_bits(v[1]), float_to_bits(v[2]),
                        float_to_bits(v[3])}};
    *(Quad*)y = four;
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (e < left) y[e] = v[e];
  }
  if (parts && left > 0) parts[i / 4] = parts_of(v);
  if (codes) {
    const i64 row = coded_row(i / 4, k / 4);
    give_codes(v, left > 0, codes, k, row, (int)(i / 4 - row * (k / 4)));
  }
}

// float32 without gaps as a 16-bit type, held within +-most; a thread takes four.
KERNEL convert(const float* x, u16* y, i64 count, int to, float most) {
  const i64 i = 4 * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  const float* from = x + i;
  u16* place = y + i;
  if (i + 4 > count || !begins_at(from, 16) || !begins_at(place, 8)) {
    for (i64 e = i; e < count && e < i + 4; ++e)
      store_plain((u8*)(y + e), to, bounded(x[e], -most, most));
    return;
  }
  float v[4];
  four_floats(from, v);
#pragma unroll
  for (int e = 0; e < 4; ++e) v[e] = bounded(v[e], -most, most);
  const Pair two = {{half_pair(v[0], v[1], to), half_pair(v[2], v[3], to)}};
  *(Pair*)place = two;
}

// gpt-oss's gated unit: the gate held below `limit`, up within +-limit and raised by one.
KERNEL swiglu_oai(const u8* x, const u8* z, u8* y, i64 count, Axes shape, Axes x_strides,
                  Axes z_strides, int x_type, int z_type, float alpha, float limit) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float given = load_plain(x + place_of(i, shape, x_strides), x_type);
  const float gate = given > limit ? limit : given;
  const float up = bounded(load_plain(z + place_of(i, shape, z_strides), z_type), -limit, limit);
  store_plain(y + i * plain_size(x_type), x_type, gate * sigmoid_of(alpha * gate) * (up + 1.0f));
}

// Elements of `size` bytes, unchanged, between any strides; element i goes to place i of the shape.
KERNEL move(const u8* x, u8* y, i64 count, Axes shape, Axes x_strides, Axes y_strides, int size) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const u8* from = x + place_of(i, shape, x_strides);
  u8* to = y + place_of(i, shape, y_strides);
  if (size == 4) *(u32*)to = *(const u32*)from;
  else if (size == 2) *(u16*)to = *(const u16*)from;
  else if (size == 8) *(i64*)to = *(const i64*)from;
  else *to = *from;
}

// x over and over until it fills y; sizes of both, byte strides of x.
KERNEL repeat(const u8* x, u8* y, i64 count, Axes shape, Axes sizes, Axes strides, int size) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const u8* from = x;
  i64 rest = i;
  for (int axis = 3; axis >= 0; --axis) {
    from += rest % shape.v[axis] % sizes.v[axis] * strides.v[axis];
    rest /= shape.v[axis];
  }
  for (int b = 0; b < size; ++b) y[i * size + b] = from[b];
}

// Integers between i32 and i64, which no float holds whole.
KERNEL integers(const u8* x, u8* y, i64 count, Axes shape, Axes strides, int from, int to) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const i64 v = load_index(x + place_of(i, shape, strides), from, 0);
  if (to == I32) ((int*)y)[i] = (int)v;
  else ((i64*)y)[i] = v;
}
