// The stored types: eight consecutive values of a row at a time, as `ggraph.formats.quants` has them.
//
// A chunk c of a row is its values 8c .. 8c+7; none crosses a scale. A value of a block type is
// step * code - floor, rounded after each operation (no fused multiply-add), so that it has the bits
// of the NumPy decoder. Codes are small integers, which bf16 holds exactly. A step spans SPAN values;
// types without FLOOR have none. Layouts: ggml `ggml-common.h`.
#pragma once
#include "common.cuh"

TABLE i8 NL_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
TABLE i8 FP4_LEVELS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Sixteen bytes of a plain type, where they may be read at once.
struct alignas(16) Quad {
  u32 w[4];
};
DEV bool is_whole(const void* p, int c, i64 k) {
  return 8 * c + 8 <= k && ((unsigned long long)p & 15) == 0;
}

// Eight floats at a multiple of 16 bytes.
DEV void eight_floats(const float* p, float* v) {
  const Quad a = ((const Quad*)p)[0], b = ((const Quad*)p)[1];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = bits_to_float(a.w[i]);
    v[i + 4] = bits_to_float(b.w[i]);
  }
}

struct f32 {
  static const int BLOCK = 1, BYTES = 4, SPAN = 0;
  DEV void eight(const void* p, float* v) { eight_floats((const float*)p, v); }
  DEV void load(const u8* row, int c, i64 k, float* v) {
    const float* p = (const float*)row + 8 * c;
    if (is_whole(p, c, k)) {
      eight(p, v);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = 8 * c + i < k ? p[i] : 0.0f;
  }
};
struct f16 {
  static const int BLOCK = 1, BYTES = 2, SPAN = 0;
  DEV void eight(const void* p, float* v) {
    const Quad a = *(const Quad*)p;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = half_to_float((u16)a.w[i]);
      v[2 * i + 1] = half_to_float((u16)(a.w[i] >> 16));
    }
  }
  DEV void load(const u8* row, int c, i64 k, float* v) {
    const u16* p = (const u16*)row + 8 * c;
    if (is_whole(p, c, k)) {
      eight(p, v);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = 8 * c + i < k ? half_to_float(p[i]) : 0.0f;
  }
};
struct bf16 {
  static const int BLOCK = 1, BYTES = 2, SPAN = 0;
  DEV void eight(const void* p, float* v) {
    const Quad a = *(const Quad*)p;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = bits_to_float(a.w[i] << 16);
      v[2 * i + 1] = bits_to_float(a.w[i] & 0xffff0000u);
    }
  }
  DEV void load(const u8* row, int c, i64 k, float* v) {
    const u16* p = (const u16*)row + 8 * c;
    if (is_whole(p, c, k)) {
      eight(p, v);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = 8 * c + i < k ? bf16_to_float(p[i]) : 0.0f;
  }
};

// Eight bytes of a block whose size is BYTES, by the widest loads that its alignment allows.
template <int BYTES>
DEV void eight_bytes(const u8* p, u8* out) {
  if (BYTES % 4 == 0) {
    const u32 first = word_at(p), second = word_at(p + 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = (u8)(first >> 8 * i);
      out[i + 4] = (u8)(second >> 8 * i);
    }
  } else if (BYTES % 2 == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u16 two = half_word_at(p + 2 * i);
      out[2 * i] = (u8)two;
      out[2 * i + 1] = (u8)(two >> 8);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = p[i];
  }
}

// Types of 32 values: chunk c % 4 is in the low (0, 1) or high nibbles (2, 3) of 16 bytes.
template <int BYTES>
DEV void nibbles(const u8* quants, int c, int* q) {
  u8 raw[8];
  eight_bytes<BYTES>(quants + 8 * (c % 2), raw);
  const int shift = c % 4 / 2 * 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) q[i] = raw[i] >> shift & 15;
}

// Four codes of a word of eight as two words of two bf16 numbers, each 128 plus a code: 0 and 2, 1
// and 3. From 128 on, bf16 counts in ones, so a code is put in place by its bits alone.
DEV void nibble_pairs(u32 word, int shift, u32* out) {
  out[0] = (word >> shift & 0x000f000fu) | 0x43004300u;
  out[1] = (word >> (shift + 8) & 0x000f000fu) | 0x43004300u;
}

// A chunk of eight codes in that form.
template <int BYTES>
DEV void chunk_pairs(const u8* p, int shift, u32* out) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u8* q = p + 4 * i;
    const u32 word = BYTES % 4 == 0 ? word_at(q) : half_word_at(q) | (u32)half_word_at(q + 2) << 16;
    nibble_pairs(word, shift, out + 2 * i);
  }
}

struct q4_0 {
  static const int BLOCK = 32, BYTES = 18, SPAN = 32;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 4 * BYTES;
    *step = half_at(b);
  }
  DEV void codes(const u8* row, int c, int* q) {
    const u8* b = row + c / 4 * BYTES;
    nibbles<BYTES>(b + 2, c, q);
    #pragma unroll
    for (int i = 0; i < 8; ++i) q[i] -= 8;
  }
  static const int BIAS = 136;  // of `pairs` over `codes`
  DEV void pairs(const u8* row, int c, u32* out) {
    chunk_pairs<BYTES>(row + c / 4 * BYTES + 2 + 8 * (c % 2), c % 4 / 2 * 4, out);
  }
};
struct q4_1 {
  static const int BLOCK = 32, BYTES = 20, SPAN = 32;
  static const bool FLOOR = true;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 4 * BYTES;
    *step = half_at(b);
    *floor = -half_at(b + 2);
  }
  DEV void codes(const u8* row, int c, int* q) {
    const u8* b = row + c / 4 * BYTES;
    nibbles<BYTES>(b + 4, c, q);
  }
  static const int BIAS = 128;
  DEV void pairs(const u8* row, int c, u32* out) {
    chunk_pairs<BYTES>(row + c / 4 * BYTES + 4 + 8 * (c % 2), c % 4 / 2 * 4, out);
  }
};
struct q5_0 {
  static const int BLOCK = 32, BYTES = 22, SPAN = 32;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 4 * BYTES;
    *step = half_at(b);
  }
  DEV void codes(const u8* row, int c, int* q) {
    const u8* b = row + c / 4 * BYTES;
    const u32 high = b[2 + c % 4];  // bit 8j + i of the 32-bit word
    nibbles<BYTES>(b + 6, c, q);
    #pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = (q[i] | (int)(high >> i & 1) << 4) - 16;
  }
};
struct q5_1 {
  static const int BLOCK = 32, BYTES = 24, SPAN = 32;
  static const bool FLOOR = true;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 4 * BYTES;
    *step = half_at(b);
    *floor = -half_at(b + 2);
  }
  DEV void codes(const u8* row, int c, int* q) {
    const u8* b = row + c / 4 * BYTES;
    const u32 high = b[4 + c % 4];  // bit 8j + i of the 32-bit word
    nibbles<BYTES>(b + 8, c, q);
    #pragma unroll
    for (int i = 0; i < 8; ++i) q[i] |= (int)(high >> i & 1) << 4;
  }
};
struct q8_0 {
  static const int BLOCK = 32, BYTES = 34, SPAN = 32;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 4 * BYTES;
    *step = half_at(b);
  }
  DEV void codes(const u8* row, int c, int* q) {
    const u8* b = row + c / 4 * BYTES;
    u8 raw[8];
    eight_bytes<BYTES>(b + 2 + 8 * (c % 4), raw);
    #pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = (i8)raw[i];
  }
};
struct iq4_nl {
  static const int BLOCK = 32, BYTES = 18, SPAN = 32;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 4 * BYTES;
    *step = half_at(b);
  }
  DEV void codes(const u8* row, int c, int* q) {
    const u8* b = row + c / 4 * BYTES;
    nibbles<BYTES>(b + 2, c, q);
    #pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = NL_LEVELS[q[i]];
  }
};
struct mxfp4 {
  static const int BLOCK = 32, BYTES = 17, SPAN = 32;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 4 * BYTES;
    const u32 e = b[0];  // half of 2^(e - 127); the two least are subnormal
    *step = bits_to_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  }
  DEV void codes(const u8* row, int c, int* q) {
    const u8* b = row + c / 4 * BYTES;
    nibbles<BYTES>(b + 1, c, q);
    #pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = FP4_LEVELS[q[i]];
  }
};

// Types of 256 values: e is the index of a chunk's first value within its block.
struct q2_k {
  static const int BLOCK = 256, BYTES = 84, SPAN = 16;
  static const bool FLOOR = true;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 32 * BYTES;
    const u8 packed = b[c % 32 / 2];
    *step = half_at(b + 80) * (float)(packed & 15);
    *floor = half_at(b + 82) * (float)(packed >> 4);
  }
  DEV void codes(const u8* row, int c, int* q) {
    const u8* b = row + c / 32 * BYTES;
    const int e = 8 * (c % 32);
    u8 raw[8];
    eight_bytes<BYTES>(b + 16 + e / 128 * 32 + e % 32, raw);
    #pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = raw[i] >> (e % 128 / 32 * 2) & 3;
  }
};
struct q3_k {
  static const int BLOCK = 256, BYTES = 110, SPAN = 16;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 32 * BYTES;
    const int s = c % 32 / 2;
    const u8* packed = b + 96;
    const int low = s < 8 ? packed[s] & 15 : packed[s - 8] >> 4;
    const int high = packed[8 + s % 4] >> (s / 4 * 2) & 3;
    *step = half_at(b + 108) * (float)((low | high << 4) - 32);
  }
  DEV void codes(const u8* row, int c, int* q) {
    const u8* b = row + c / 32 * BYTES;
    const int e = 8 * (c % 32);
    u8 p[8], mask[8];
    eight_bytes<BYTES>(b + 32 + e / 128 * 32 + e % 32, p);
    eight_bytes<BYTES>(b + e % 32, mask);
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int third = (mask[i] >> (e / 32) & 1) ^ 1;
      q[i] = (p[i] >> (e % 128 / 32 * 2) & 3) - (third << 2);
    }
  }
};
// Scale and minimum number s (0..7), six bits each, of the 12 bytes that Q4_K and Q5_K share.
DEV void six_bits(const Quad& head, int s, int* scale, int* least) {
  const u32 first = head.w[1] >> 8 * (s % 4), second = head.w[2] >> 8 * (s % 4);
  const u32 third = head.w[3] >> 8 * (s % 4);
  *scale = s < 4 ? first & 63 : (third & 15) | (first >> 2 & 48);
  *least = s < 4 ? second & 63 : (third >> 4 & 15) | (second >> 2 & 48);
}
// Step and floor number s of a block that begins with two float16 and such scales.
DEV void scaled(const Quad& head, int s, float* step, float* floor) {
  int scale, least;
  six_bits(head, s, &scale, &least);
  *step = half_to_float((u16)head.w[0]) * (float)scale;
  *floor = half_to_float((u16)(head.w[0] >> 16)) * (float)least;
}
struct q4_k {
  static const int BLOCK = 256, BYTES = 144, SPAN = 32;
  static const bool FLOOR = true;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    scaled(*(const Quad*)(row + c / 32 * BYTES), c % 32 / 4, step, floor);  // 16 bytes, aligned
  }
  DEV void codes(const u8* row, int c, int* q) {
    const u8* b = row + c / 32 * BYTES;
    const int e = 8 * (c % 32);
    u8 p[8];
    eight_bytes<BYTES>(b + 16 + e / 64 * 32 + e % 32, p);
    #pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = p[i] >> (e % 64 / 32 * 4) & 15;
  }
  static const int BIAS = 128;
  // What a lane needs of 64 columns of a block: codes of chunks t and t + 4 are in the same bytes.
  struct Held {
    Quad head;
    u32 low, high;
  };
  DEV Held hold(const u8* row, int pair, int t) {
    const u8* b = row + pair / 4 * BYTES;
    const u8* p = b + 16 + pair % 4 * 32 + 8 * t;
    const Held held = {*(const Quad*)b, word_at(p), word_at(p + 4)};
    return held;
  }
  DEV void scale(const Held& held, int s, float* step, float* floor) {
    scaled(held.head, s, step, floor);
  }
  DEV void pairs(const Held& held, int half, u32* out) {
    nibble_pairs(held.low, 4 * half, out);
    nibble_pairs(held.high, 4 * half, out + 2);
  }
};
struct q5_k {
  static const int BLOCK = 256, BYTES = 176, SPAN = 32;
  static const bool FLOOR = true;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    scaled(*(const Quad*)(row + c / 32 * BYTES), c % 32 / 4, step, floor);  // 16 bytes, aligned
  }
  DEV void codes(const u8* row, int c, int* q) {
    const u8* b = row + c / 32 * BYTES;
    const int e = 8 * (c % 32);
    u8 p[8], high[8];
    eight_bytes<BYTES>(b + 48 + e / 64 * 32 + e % 32, p);
    eight_bytes<BYTES>(b + 16 + e % 32, high);
    #pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = (p[i] >> (e % 64 / 32 * 4) & 15) | (high[i] >> (e / 32) & 1) << 4;
  }
};
struct q6_k {
  static const int BLOCK = 256, BYTES = 210, SPAN = 16;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 32 * BYTES;
    *step = half_at(b + 208) * (float)((const i8*)b)[192 + c % 32 / 2];
  }
  DEV void codes(const u8* row, int c, int* q) {
    const u8* b = row + c / 32 * BYTES;
    const int e = 8 * (c % 32);
    const int r = e % 128;
    u8 low[8], high[8];
    eight_bytes<BYTES>(b + e / 128 * 64 + r % 64, low);
    eight_bytes<BYTES>(b + 128 + e / 128 * 32 + e % 32, high);
    #pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = ((low[i] >> (r / 64 * 4) & 15) | (high[i] >> (r / 32 * 2) & 3) << 4) - 32;
  }
};
struct iq4_xs {
  static const int BLOCK = 256, BYTES = 136, SPAN = 32;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 32 * BYTES;
    const int s = c % 32 / 4;
    const int low = b[4 + s / 2] >> (s % 2 * 4) & 15;
    const int high = half_word_at(b + 2) >> 2 * s & 3;
    *step = half_at(b) * (float)((low | high << 4) - 32);
  }
  DEV void codes(const u8* row, int c, int* q) {
    const u8* b = row + c / 32 * BYTES;
    nibbles<BYTES>(b + 8 + 16 * (c % 32 / 4), c, q);
    #pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = NL_LEVELS[q[i]];
  }
};

// Trits: 0, 1 or 2 for -d, 0 and d. TQ1_0 has five to a byte, as a fraction of 256 in base 3.
struct tq1_0 {
  static const int BLOCK = 256, BYTES = 54, SPAN = 32;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 32 * BYTES;
    *step = half_at(b + 52);
  }
  DEV void codes(const u8* row, int c, int* q) {
    const u8* b = row + c / 32 * BYTES;
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int e = 8 * (c % 32) + i;
      const int digit = e < 160 ? e / 32 : e < 240 ? (e - 160) / 16 : (e - 240) / 4;
      u32 t = b[e < 160 ? e % 32 : e < 240 ? 32 + e % 16 : 48 + e % 4];
      for (int j = 0; j < digit; ++j) t = t * 3 & 255;  // what is carried out is gone
      q[i] = (int)(t * 3 >> 8) - 1;
    }
  }
};
struct tq2_0 {
  static const int BLOCK = 256, BYTES = 66, SPAN = 32;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 32 * BYTES;
    *step = half_at(b + 64);
  }
  DEV void codes(const u8* row, int c, int* q) {
    const u8* b = row + c / 32 * BYTES;
    const int e = 8 * (c % 32);
    u8 p[8];
    eight_bytes<BYTES>(b + e / 128 * 32 + e % 32, p);
    #pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = (p[i] >> (e % 128 / 32 * 2) & 3) - 1;
  }
};

// Chunk c of a row of k values of any type.
template <class T>
DEV void load_chunk(const u8* row, int c, i64 k, float* v) {
  if constexpr (T::SPAN == 0) {
    T::load(row, c, k, v);
  } else {
    float step, floor;
    int q[8];
    T::scale(row, c, &step, &floor);
    T::codes(row, c, q);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[i] = step * (float)q[i];
      if (T::FLOOR) v[i] = v[i] - floor;
    }
  }
}

// Bytes of a row of k values.
template <class T>
DEV i64 row_bytes(i64 k) {
  return k / T::BLOCK * T::BYTES;
}
