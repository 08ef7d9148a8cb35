// Floats as sums of two bf16 numbers, which is how they go through the tensor cores: 16 bits of
// precision from products of 8. A chunk is eight values; a lane's chunk gives the fragments of two
// products, one per half.
#pragma once
#include "blocks.cuh"

// Whether bf16 holds every value of a type.
template <class T>
struct exact {
  static const bool VALUE = false;
};
template <>
struct exact<bf16> {
  static const bool VALUE = true;
};

// Four floats as the sum of two rows of bf16.
DEV void split(const float* v, u32* high, u32* low) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    high[i] = bf16_pair(v[2 * i], v[2 * i + 1]);
    low[i] = bf16_pair(v[2 * i] - bits_to_float(high[i] << 16),
                       v[2 * i + 1] - bits_to_float(high[i] & 0xffff0000u));
  }
}

// A chunk of one row, as fragments of two products.
struct Given {
  u32 high[2][2], low[2][2];
};

DEV Given given_of(const float* v) {
  Given x8;
#pragma unroll
  for (int h = 0; h < 2; ++h) split(v + 4 * h, x8.high[h], x8.low[h]);
  return x8;
}

// Chunk c of a stored row of k values as bf16 words, and what they leave out (nothing for bf16).
// ALIGNED: the row begins at a multiple of 16 bytes, and k is a multiple of 8.
template <class T, bool ALIGNED>
DEV void words_of(const u8* row, int c, i64 k, u32* high, u32* low) {
  if constexpr (exact<T>::VALUE) {
    const u8* p = row + 16 * c;
    if (ALIGNED || is_whole(p, c, k)) {  // as it lies there
      const Quad raw = *(const Quad*)p;
#pragma unroll
      for (int i = 0; i < 4; ++i) high[i] = raw.w[i];
      return;
    }
  }
  float v[8];
  load_chunk<T>(row, c, k, v);
  split(v, high, low);
  split(v + 4, high + 2, low + 2);
}
