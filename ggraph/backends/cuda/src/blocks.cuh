// The block types: eight consecutive values of a row at a time, as `ggraph.formats.quants` has them.
//
// A struct per type: `load(row, c, k, v)` decodes the values 8c .. 8c+7 of a row of k values. Eight
// values never cross a scale. Products and sums are rounded one by one (no fused multiply-add), so
// that every value has the bits of the NumPy decoder. Layouts: ggml `ggml-common.h`.
#pragma once
#include "common.cuh"

TABLE i8 NL_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
TABLE i8 FP4_LEVELS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Types of 32 values: chunk j (0..3) of a block is in the low (j < 2) or high nibbles of 16 bytes.
DEV int nibble(const u8* quants, int j, int i) {
  return j < 2 ? quants[8 * j + i] & 15 : quants[8 * (j - 2) + i] >> 4;
}

struct f32 {
  static const int BLOCK = 1, BYTES = 4;
  DEV void load(const u8* row, i64 c, i64 k, float* v) {
    const float* p = (const float*)row + 8 * c;
    for (int i = 0; i < 8; ++i) v[i] = 8 * c + i < k ? p[i] : 0.0f;
  }
};
struct f16 {
  static const int BLOCK = 1, BYTES = 2;
  DEV void load(const u8* row, i64 c, i64 k, float* v) {
    const u16* p = (const u16*)row + 8 * c;
    for (int i = 0; i < 8; ++i) v[i] = 8 * c + i < k ? half_to_float(p[i]) : 0.0f;
  }
};
struct bf16 {
  static const int BLOCK = 1, BYTES = 2;
  DEV void load(const u8* row, i64 c, i64 k, float* v) {
    const u16* p = (const u16*)row + 8 * c;
    for (int i = 0; i < 8; ++i) v[i] = 8 * c + i < k ? bf16_to_float(p[i]) : 0.0f;
  }
};
struct q4_0 {
  static const int BLOCK = 32, BYTES = 18;
  DEV void load(const u8* row, i64 c, i64, float* v) {
    const u8* b = row + c / 4 * BYTES;
    const float d = half_at(b);
    for (int i = 0; i < 8; ++i) v[i] = d * (float)(nibble(b + 2, c % 4, i) - 8);
  }
};
struct q4_1 {
  static const int BLOCK = 32, BYTES = 20;
  DEV void load(const u8* row, i64 c, i64, float* v) {
    const u8* b = row + c / 4 * BYTES;
    const float d = half_at(b), m = half_at(b + 2);
    for (int i = 0; i < 8; ++i) v[i] = d * (float)nibble(b + 4, c % 4, i) + m;
  }
};
// Fifth bits: bit 8j + i of the 32-bit word.
DEV u32 fifth_bits(const u8* word, int j) { return word[j]; }
struct q5_0 {
  static const int BLOCK = 32, BYTES = 22;
  DEV void load(const u8* row, i64 c, i64, float* v) {
    const u8* b = row + c / 4 * BYTES;
    const float d = half_at(b);
    const u32 high = fifth_bits(b + 2, c % 4);
    for (int i = 0; i < 8; ++i) {
      const int q = nibble(b + 6, c % 4, i) | ((high >> i & 1) << 4);
      v[i] = d * (float)(q - 16);
    }
  }
};
struct q5_1 {
  static const int BLOCK = 32, BYTES = 24;
  DEV void load(const u8* row, i64 c, i64, float* v) {
    const u8* b = row + c / 4 * BYTES;
    const float d = half_at(b), m = half_at(b + 2);
    const u32 high = fifth_bits(b + 4, c % 4);
    for (int i = 0; i < 8; ++i) {
      const int q = nibble(b + 8, c % 4, i) | ((high >> i & 1) << 4);
      v[i] = d * (float)q + m;
    }
  }
};
struct q8_0 {
  static const int BLOCK = 32, BYTES = 34;
  DEV void load(const u8* row, i64 c, i64, float* v) {
    const u8* b = row + c / 4 * BYTES;
    const float d = half_at(b);
    const i8* q = (const i8*)(b + 2) + 8 * (c % 4);
    for (int i = 0; i < 8; ++i) v[i] = (float)q[i] * d;
  }
};
struct iq4_nl {
  static const int BLOCK = 32, BYTES = 18;
  DEV void load(const u8* row, i64 c, i64, float* v) {
    const u8* b = row + c / 4 * BYTES;
    const float d = half_at(b);
    for (int i = 0; i < 8; ++i) v[i] = d * (float)NL_LEVELS[nibble(b + 2, c % 4, i)];
  }
};
struct mxfp4 {
  static const int BLOCK = 32, BYTES = 17;
  DEV void load(const u8* row, i64 c, i64, float* v) {
    const u8* b = row + c / 4 * BYTES;
    const u32 e = b[0];  // half of 2^(e - 127); the two least are subnormal
    const float d = bits_to_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    for (int i = 0; i < 8; ++i) v[i] = d * (float)FP4_LEVELS[nibble(b + 1, c % 4, i)];
  }
};

// Types of 256 values: e is the index of a chunk's first value within its block.
struct q2_k {
  static const int BLOCK = 256, BYTES = 84;
  DEV void load(const u8* row, i64 c, i64, float* v) {
    const u8* b = row + c / 32 * BYTES;
    const int e = 8 * (int)(c % 32), shift = e % 128 / 32 * 2;
    const u8 scale = b[e / 16];
    const float step = half_at(b + 80) * (float)(scale & 15);
    const float least = half_at(b + 82) * (float)(scale >> 4);
    const u8* q = b + 16 + e / 128 * 32 + e % 32;
    for (int i = 0; i < 8; ++i) v[i] = step * (float)(q[i] >> shift & 3) - least;
  }
};
struct q3_k {
  static const int BLOCK = 256, BYTES = 110;
  DEV void load(const u8* row, i64 c, i64, float* v) {
    const u8* b = row + c / 32 * BYTES;
    const int e = 8 * (int)(c % 32), shift = e % 128 / 32 * 2, s = e / 16;
    const u8* packed = b + 96;
    const int low = s < 8 ? packed[s] & 15 : packed[s - 8] >> 4;
    const int high = packed[8 + s % 4] >> (s / 4 * 2) & 3;
    const float step = half_at(b + 108) * (float)((low | high << 4) - 32);
    const u8* q = b + 32 + e / 128 * 32 + e % 32;
    const u8* mask = b + e % 32;
    for (int i = 0; i < 8; ++i) {
      const int third = (mask[i] >> (e / 32) & 1) ^ 1;
      v[i] = step * (float)((q[i] >> shift & 3) - (third << 2));
    }
  }
};
// Scale and minimum number s (0..7), six bits each, of the 12 bytes that Q4_K and Q5_K share.
DEV void six_bits(const u8* p, int s, int* scale, int* least) {
  if (s < 4) {
    *scale = p[s] & 63;
    *least = p[s + 4] & 63;
  } else {
    *scale = (p[s + 4] & 15) | (p[s - 4] >> 2 & 48);
    *least = (p[s + 4] >> 4) | (p[s] >> 2 & 48);
  }
}
struct q4_k {
  static const int BLOCK = 256, BYTES = 144;
  DEV void load(const u8* row, i64 c, i64, float* v) {
    const u8* b = row + c / 32 * BYTES;
    const int e = 8 * (int)(c % 32), shift = e % 64 / 32 * 4;
    int scale, least;
    six_bits(b + 4, e / 32, &scale, &least);
    const float step = half_at(b) * (float)scale, floor = half_at(b + 2) * (float)least;
    const u8* q = b + 16 + e / 64 * 32 + e % 32;  // a multiple of 8
    const u32 first = word_at(q) >> shift, second = word_at(q + 4) >> shift;
    for (int i = 0; i < 4; ++i) {
      v[i] = step * (float)(first >> 8 * i & 15) - floor;
      v[i + 4] = step * (float)(second >> 8 * i & 15) - floor;
    }
  }
};
struct q5_k {
  static const int BLOCK = 256, BYTES = 176;
  DEV void load(const u8* row, i64 c, i64, float* v) {
    const u8* b = row + c / 32 * BYTES;
    const int e = 8 * (int)(c % 32), shift = e % 64 / 32 * 4, bit = e / 32;
    int scale, least;
    six_bits(b + 4, bit, &scale, &least);
    const float step = half_at(b) * (float)scale, floor = half_at(b + 2) * (float)least;
    const u8* q = b + 48 + e / 64 * 32 + e % 32;
    const u8* high = b + 16 + e % 32;
    for (int i = 0; i < 8; ++i) {
      const int value = (q[i] >> shift & 15) | ((high[i] >> bit & 1) << 4);
      v[i] = step * (float)value - floor;
    }
  }
};
struct q6_k {
  static const int BLOCK = 256, BYTES = 210;
  DEV void load(const u8* row, i64 c, i64, float* v) {
    const u8* b = row + c / 32 * BYTES;
    const int e = 8 * (int)(c % 32), r = e % 128;
    const float step = half_at(b + 208) * (float)((const i8*)b)[192 + e / 16];
    const u8* low = b + e / 128 * 64 + r % 64;
    const u8* high = b + 128 + e / 128 * 32 + e % 32;
    for (int i = 0; i < 8; ++i) {
      const int q = (low[i] >> (r / 64 * 4) & 15) | ((high[i] >> (r / 32 * 2) & 3) << 4);
      v[i] = step * (float)(q - 32);
    }
  }
};
struct iq4_xs {
  static const int BLOCK = 256, BYTES = 136;
  DEV void load(const u8* row, i64 c, i64, float* v) {
    const u8* b = row + c / 32 * BYTES;
    const int e = 8 * (int)(c % 32), s = e / 32;
    const int low = b[4 + s / 2] >> (s % 2 * 4) & 15;
    const int high = half_word_at(b + 2) >> 2 * s & 3;
    const float step = half_at(b) * (float)((low | high << 4) - 32);
    for (int i = 0; i < 8; ++i) v[i] = step * (float)NL_LEVELS[nibble(b + 8 + 16 * s, c % 4, i)];
  }
};

// Trits: 0, 1 or 2 for -d, 0 and d. TQ1_0 has five to a byte, as a fraction of 256 in base 3.
struct tq1_0 {
  static const int BLOCK = 256, BYTES = 54;
  DEV void load(const u8* row, i64 c, i64, float* v) {
    const u8* b = row + c / 32 * BYTES;
    const float d = half_at(b + 52);
    for (int i = 0; i < 8; ++i) {
      const int e = 8 * (int)(c % 32) + i;
      const int digit = e < 160 ? e / 32 : e < 240 ? (e - 160) / 16 : (e - 240) / 4;
      u32 q = b[e < 160 ? e % 32 : e < 240 ? 32 + e % 16 : 48 + e % 4];
      for (int j = 0; j < digit; ++j) q = q * 3 & 255;  // what is carried out is gone
      v[i] = (float)((int)(q * 3 >> 8) - 1) * d;
    }
  }
};
struct tq2_0 {
  static const int BLOCK = 256, BYTES = 66;
  DEV void load(const u8* row, i64 c, i64, float* v) {
    const u8* b = row + c / 32 * BYTES;
    const float d = half_at(b + 64);
    const int e = 8 * (int)(c % 32), shift = e % 128 / 32 * 2;
    const u8* q = b + e / 128 * 32 + e % 32;
    for (int i = 0; i < 8; ++i) v[i] = (float)((q[i] >> shift & 3) - 1) * d;
  }
};

// Bytes of a row of k values.
template <class T>
DEV i64 row_bytes(i64 k) {
  return k / T::BLOCK * T::BYTES;
}
