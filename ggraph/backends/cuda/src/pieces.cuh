// Floats as sums of two 16-bit numbers, which is how they go through the tensor cores: twice the
// precision of one. A chunk is eight values; a lane's chunk gives the fragments of two products, one
// per half.
#pragma once
#include "blocks.cuh"

// The types that tensor cores multiply. `bf16` has the range of float32; `f16` has more digits, and
// what is larger or much smaller than UNIT must be brought there first (see `lift_of`).
struct As_bf16 {
  static constexpr float UNIT = 1.0f;
  DEV u32 pair(float first, float second) { return bf16_pair(first, second); }
  DEV float first(u32 word) { return bits_to_float(word << 16); }
  DEV float second(u32 word) { return bits_to_float(word & 0xffff0000u); }
  DEV void add_product(float* sum, const u32 (&a)[4], const u32 (&b)[2]) { multiply(sum, a, b); }
};
struct As_f16 {
  static constexpr float UNIT = 1024.0f;
  DEV u32 pair(float first, float second) { return f16_pair(first, second); }
  DEV float first(u32 word) { return half_to_float((u16)word); }
  DEV float second(u32 word) { return half_to_float((u16)(word >> 16)); }
  DEV void add_product(float* sum, const u32 (&a)[4], const u32 (&b)[2]) {
    multiply_f16(sum, a, b);
  }
};

// Whether C holds every value of a stored type as it lies there.
template <class C, class T>
struct holds {
  static const bool VALUE = false;
};
template <>
struct holds<As_bf16, bf16> {
  static const bool VALUE = true;
};
template <>
struct holds<As_f16, f16> {
  static const bool VALUE = true;
};

// A power of two that brings values of up to `most` to UNIT's size.
template <class C>
DEV float lift_of(float most) {
  if (C::UNIT == 1.0f) return 1.0f;
  u32 power = float_to_bits(most) >> 23 & 255u;
  power = power < 16u ? 16u : power > 240u ? 240u : power;
  return bits_to_float((254u - power << 23) + (float_to_bits(C::UNIT) - float_to_bits(1.0f)));
}

// One over a power of two.
DEV float inverse_of(float power) { return bits_to_float(0x7f000000u - float_to_bits(power)); }

// Eight floats as the sum of N rows of C.
template <class C, int N>
DEV void pieces_of(const float* v, u32 (&words)[N][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float first = v[2 * i], second = v[2 * i + 1];
#pragma unroll
    for (int p = 0; p < N; ++p) {
      words[p][i] = C::pair(first, second);
      first -= C::first(words[p][i]);
      second -= C::second(words[p][i]);
    }
  }
}

// Four floats as the sum of two rows of C.
template <class C>
DEV void split(const float* v, u32* high, u32* low) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    high[i] = C::pair(v[2 * i], v[2 * i + 1]);
    low[i] = C::pair(v[2 * i] - C::first(high[i]), v[2 * i + 1] - C::second(high[i]));
  }
}

// Chunk c of a stored row of k values as N rows of C, of which the first is all where C holds T.
// ALIGNED: rows of plain types begin at multiples of 16 bytes, and k is a multiple of 8.
template <class C, class T, bool ALIGNED, int N>
DEV void words_of(const u8* row, int c, i64 k, u32 (&words)[N][4]) {
  if constexpr (holds<C, T>::VALUE) {
    const u8* p = row + 16 * c;
    if (ALIGNED || is_whole(p, c, k)) {  // as it lies there
      const Quad raw = *(const Quad*)p;
#pragma unroll
      for (int i = 0; i < 4; ++i) words[0][i] = raw.w[i];
      return;
    }
  }
  float v[8];
  if constexpr (ALIGNED && T::SPAN == 0) T::eight(row + 8 * c * T::BYTES, v);
  else load_chunk<T>(row, c, k, v);
  pieces_of<C>(v, words);
}
